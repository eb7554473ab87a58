"""What is tried, what came of it, and who tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tpu_serve.device.chip import TPU_CHIPS, Chip, cpu_chip
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.moe_plan.key import config_from_json, config_to_json
from tpu_serve.tuning_tables.typed import from_json, to_json

BYTES, SCHEDULE, MEASURED = "bytes", "schedule", "measured"
"""Kinds of scores: calculated for configs that compile; modelled from the compiled schedule; measured on the device. Microseconds all."""

WORKED, REFUSED, FAILED = "worked", "refused", "failed"
"""Outcomes. Refused: by the compiler, or wrong results; trying again changes nothing. Failed: it took too long, or its process ended."""


@dataclass(frozen=True, slots=True)
class Task:
    """One config to try.

    Attributes:
      workload: name of the layer in `cases.WORKLOADS`, where it has one.
      config: None for XLA's own program for the problem.
    """

    workload: str
    chip: Chip
    problem: Problem
    config: Config | None

    def as_json(self) -> dict[str, Any]:
        config = None if self.config is None else config_to_json(self.config)
        return {
            "workload": self.workload,
            "chip": self.chip.name,
            "problem": to_json(self.problem),
            "config": config,
        }

    @classmethod
    def of_json(cls, read: Mapping[str, Any]) -> Task:
        config = None if read["config"] is None else config_from_json(read["config"], "config")
        chip = TPU_CHIPS[read["chip"]] if read["chip"] in TPU_CHIPS else cpu_chip()
        return cls(read["workload"], chip, from_json(Problem, read["problem"], "problem"), config)


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a config.

    Attributes:
      outcome: one of those above.
      reason: why it did not work, in a line; or what its score lacks.
      score: microseconds, lower is better; only of what worked.
      score_kind: what the score is.
      found: figures behind it, as JSON. Of a measured one: spread and iterations.
    """

    outcome: str
    reason: str = ""
    score: float | None = None
    score_kind: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)


class Executor(Protocol):
    """Tries configs.

    Attributes:
      kind: of the scores that it gives.
      routing: how tokens are spread over experts meanwhile, as in `Provenance.routing`.
    """

    @property
    def kind(self) -> str: ...

    @property
    def routing(self) -> str: ...

    def run(self, task: Task) -> Trial:
        """Tries a config, for as long as it may take.

        Raises:
          Stopped: somebody wants no more. Any other exception is a failure of this config alone.
        """

    def close(self) -> None:
        """Ends whatever runs."""


class Stopped(Exception):
    """The run is to end: what was under way counts for nothing."""
