"""Where an engine's time goes: steps by what their rows are."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpu_serve.runner.buckets import pick
from tpu_serve.scheduler.step import SchedulerOutput

KINDS = ("prefill", "decode", "mixed")


@dataclass(slots=True)
class StepTimes:
    """Steps of an engine; its `record` is an `on_step` of `EngineCore`.

    Attributes:
      seconds, num_steps, num_tokens: by kind: `prefill` has rows with chunks of prompts only, `decode` rows of one token only.
      buckets: token counts that have a program; steps are padded to one of them.
      num_places: tokens that all steps computed, padding included.
    """

    buckets: tuple[int, ...] = ()
    num_places: int = 0

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    num_steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def record(self, output: SchedulerOutput, seconds: float) -> None:
        """Counts the steps of one launch."""
        lengths = [item.length for item in output.scheduled]
        kind = "decode" if max(lengths) == 1 else "prefill" if min(lengths) > 1 else "mixed"
        self.seconds[kind] += seconds
        self.num_steps[kind] += output.num_steps
        self.num_tokens[kind] += output.num_tokens_in_all
        if self.buckets:
            in_a_step = len(output.by_rank) * pick(self.buckets, output.num_tokens_of_largest)
            self.num_places += output.num_steps * in_a_step

    @property
    def padding(self) -> float | None:
        """Share of what was computed that nobody needed, 0 to 1; None without buckets or steps."""
        return 1 - sum(self.num_tokens.values()) / self.num_places if self.num_places else None

    def ms_per_step(self, kind: str) -> float | None:
        """None without such steps."""
        return self.seconds[kind] / self.num_steps[kind] * 1e3 if self.num_steps[kind] else None
