"""Where an engine's time goes: steps by what their rows are."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpu_serve.scheduler.step import SchedulerOutput

KINDS = ("prefill", "decode", "mixed")


@dataclass(slots=True)
class StepTimes:
    """Steps of an engine; its `record` is an `on_step` of `EngineCore`.

    Attributes:
      seconds, num_steps, num_tokens: by kind: `prefill` has rows with chunks of prompts only, `decode` rows of one token only.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    num_steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def record(self, output: SchedulerOutput, seconds: float) -> None:
        """Counts one step."""
        lengths = [item.length for item in output.scheduled]
        kind = "decode" if max(lengths) == 1 else "prefill" if min(lengths) > 1 else "mixed"
        self.seconds[kind] += seconds
        self.num_steps[kind] += 1
        self.num_tokens[kind] += output.num_tokens

    def ms_per_step(self, kind: str) -> float | None:
        """None without such steps."""
        return self.seconds[kind] / self.num_steps[kind] * 1e3 if self.num_steps[kind] else None
