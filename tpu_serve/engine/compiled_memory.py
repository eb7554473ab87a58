"""What compiled steps take of a device's memory, by the compiler's own account, and the sizes of the caches that follow from it."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.config import ConfigError
from tpu_serve.device.chip import GIB
from tpu_serve.engine.memory import COMPILED, StepBytes
from tpu_serve.engine.plan import EnginePlan

logger = logging.getLogger(__name__)

MOST_COMPILES = 3
"""One for the calculated plan; one for the plan by its figures; one more where these turn out to depend on the size of the caches."""
UNUSED_SHARE = 0.04
"""Of the usable memory: less is left unused rather than compiled for once more."""

_NEEDED = re.compile(
    r"on HBM, the total memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)|memory space hbm\. Used ([\d.]+)([KMGT]?) of",
    re.IGNORECASE,
)
"""In what libtpu says of a program that does not fit; both numbers are arguments and temporaries together."""


@dataclass(frozen=True, slots=True)
class ProgramBytes:
    """Memory of each device that a program takes.

    Attributes:
      argument, output: arrays that it is given and gives back, as they lie on the device.
      alias: of the output, what lies where an argument was.
      temporary: scratch while it runs.
      code: the program itself, for as long as it is loaded.
    """

    argument: int
    output: int
    alias: int
    temporary: int
    code: int

    @classmethod
    def of(cls, compiled: Any) -> ProgramBytes | None:
        """Of a `jax.stages.Compiled`; None where its backend does not tell."""
        told = compiled.memory_analysis()
        if told is None:
            return None
        return cls(
            int(told.argument_size_in_bytes),
            int(told.output_size_in_bytes),
            int(told.alias_size_in_bytes),
            int(told.temp_size_in_bytes),
            int(told.generated_code_size_in_bytes),
        )

    @classmethod
    def of_refusal(cls, error: BaseException) -> ProgramBytes | None:
        """Of a program that the TPU compiler refused because it takes more than a device has: in all, as it says, for code is not told. None
        where it refused for another reason."""
        found = _NEEDED.search(str(error))
        if found is None:
            return None
        size, unit = (one for one in found.groups() if one is not None)
        return cls(0, 0, 0, int(float(size) * 1024 ** (" KMGT".index(unit) if unit else 0)), 0)

    @property
    def running(self) -> int:
        """All that lies on the device while it runs, but for code."""
        return self.argument + self.output - self.alias + self.temporary


@dataclass(frozen=True, slots=True)
class Budget:
    """What a device's memory is used for, in bytes.

    Attributes:
      usable: what may be taken.
      weights, sampler: that lie there whatever the caches' size.
    """

    usable: int
    weights: int
    sampler: int

    def beside(self, plan: EnginePlan, program: ProgramBytes) -> int:
        """What a step keeps beside weights, caches and the sampler's state while it runs: scratch, what it is sent and gives back, and
        what arrays take beyond their values."""
        return program.running - self.weights - self.sampler - plan.cache_bytes

    def left(self, plan: EnginePlan) -> int:
        """What the plan leaves unused; negative where it does not fit."""
        taken = self.weights + self.sampler + plan.cache_bytes + plan.temporary_bytes + plan.code_bytes
        return self.usable - taken

    def text(self, plan: EnginePlan) -> str:
        """By kind of use, in GiB."""
        kinds = {
            "weights": self.weights, "caches": plan.cache_bytes, "sampler": self.sampler,
            f"temporaries ({plan.figures})": plan.temporary_bytes, f"programs ({plan.figures})": plan.code_bytes,
        }  # fmt: skip
        listed = ", ".join(f"{kind} {size / GIB:.3f}" for kind, size in kinds.items())
        return f"{listed}; {self.left(plan) / GIB:.3f} of {self.usable / GIB:.3f} GiB are left"


def settle(
    first: EnginePlan,
    budget: Budget,
    assumed: StepBytes,
    compile: Callable[[EnginePlan], ProgramBytes | None],
    replan: Callable[[StepBytes], EnginePlan],
    all_code: Callable[[int], int],
) -> EnginePlan:
    """The plan with as many pages as the compiler's figures leave room for.

    Args:
      first: by calculated figures.
      assumed: those figures.
      compile: the most demanding step of a plan; None where the backend does not tell what it takes, and the first plan has to do.
      replan: sizes by other figures; raises `ConfigError` where nothing fits.
      all_code: from the code of that step to that of all programs.

    Raises:
      ConfigError: nothing fits; the message has the compiler's numbers and the flag.
    """
    plan, best = first, None
    points: list[tuple[int, int]] = []
    for _ in range(MOST_COMPILES):
        program = compile(plan)
        if program is None:
            return first
        points.append((plan.cache_bytes, budget.beside(plan, program)))
        code = all_code(program.code)
        done = dataclasses.replace(plan, temporary_bytes=max(0, points[-1][1]), code_bytes=code, figures=COMPILED)
        logger.info("By the compiler's figures, memory of each device in GiB: %s", budget.text(done))
        fits = budget.left(done) >= 0
        if fits and (best is None or done.cache_bytes > best.cache_bytes):
            best = done
        try:
            better = _better(points, assumed.per_cache_byte, code, replan)
        except ConfigError:
            if best is None:
                raise
            return best
        gain = better.cache_bytes - plan.cache_bytes
        if gain == 0 or (fits and gain <= UNUSED_SHARE * budget.usable):
            break
        logger.info(
            "Planned again: %s pages instead of %s", "+".join(map(str, better.num_pages)),
            "+".join(map(str, plan.num_pages)),
        )  # fmt: skip
        plan = better
    if best is None:
        raise ConfigError(
            f"A step of {done.max_num_batched_tokens} tokens does not fit by the compiler's figures, on each device in GiB: {budget.text(done)}. "
            "Lower --max-num-batched-tokens or --kv-cache-memory-bytes, or raise --device-memory-utilization."
        )
    return best


def _better(
    points: Sequence[tuple[int, int]], assumed_slope: float, code: int, replan: Callable[[StepBytes], EnginePlan]
) -> EnginePlan:
    """The plan by the figures so far. Where nothing fits by a single one, which may hold copies of the caches, one that finds out.

    Raises:
      ConfigError: nothing fits.
    """
    try:
        return replan(_line(points, assumed_slope, code))
    except ConfigError:
        cache_bytes, beside = points[-1]
        if len(points) > 1 or not cache_bytes:
            raise
        try:
            return replan(StepBytes(0, max(0.0, beside / cache_bytes), code, COMPILED))
        except ConfigError:
            pass
        raise


def _line(points: Sequence[tuple[int, int]], assumed_slope: float, code: int) -> StepBytes:
    """What a step takes by the caches' size, through the last two points (bytes of the caches, bytes beside them), or with the assumed slope
    through the only one."""
    cache_bytes, beside = points[-1]
    slope = assumed_slope
    others = [point for point in points[:-1] if point[0] != cache_bytes]
    if others:
        slope = max(0.0, (beside - others[-1][1]) / (cache_bytes - others[-1][0]))
    fixed = beside - slope * cache_bytes
    if fixed < 0 < cache_bytes:
        slope, fixed = max(0.0, beside / cache_bytes), 0.0
    return StepBytes(round(fixed), slope, code, COMPILED)


def verify(plan: EnginePlan, budget: Budget, programs: Mapping[str, ProgramBytes]) -> EnginePlan:
    """The plan with the figures of all its programs, by their names.

    Raises:
      ConfigError: they do not fit together.
    """
    beside = {name: budget.beside(plan, program) for name, program in programs.items()}
    most = max(beside, key=lambda name: beside[name])
    code = sum(program.code for program in programs.values())
    done = dataclasses.replace(plan, temporary_bytes=max(0, beside[most]), code_bytes=code, figures=COMPILED)
    if budget.left(done) < 0:
        raise ConfigError(
            f"The programs do not fit by the compiler's figures, on each device in GiB: {budget.text(done)}. The {most} takes the most. "
            "Lower --max-num-batched-tokens, --kv-cache-memory-bytes or --num-pages, or raise --device-memory-utilization."
        )
    return done
