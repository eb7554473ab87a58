"""How long a layer takes on its devices: the time of calls that follow one another there, without what launching them costs.

A program that calls the layer n times, each on what the last one returned, is timed with n and with 3n calls. Launching, and waiting for the
end, are in both, and the difference is 2n calls.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TIMED_SECONDS = 0.02
"""That the shorter program should take: so much more than launching that the clock's jitter does not matter."""

MOST_CALLS = 4096


class TooShort(ValueError):
    """A call takes so little time that it cannot be told from noise."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call.

    Attributes:
      us: microseconds, the median of the repeats.
      spread: of the middle half of the repeats, relative to the median.
      iterations: calls that were timed, all repeats together.
    """

    us: float
    spread: float
    iterations: int


def loop(run: Callable[..., Any]) -> Callable[..., Any]:
    """`function(number, x, *rest)`, which calls `run(x, *rest)` so many times, each on what the last one returned."""
    import jax

    return lambda number, x, *rest: jax.lax.fori_loop(0, number, lambda _, value: run(value, *rest), x)


def chained(run: Callable[..., Any]) -> Callable[..., Any]:
    """`loop` compiled once for all numbers, and waited for: what `time_calls` wants, and with a number of 1 a way to see the result."""
    import jax

    program = jax.jit(loop(run))
    return lambda number, *arguments: jax.block_until_ready(program(jax.numpy.int32(number), *arguments))


def time_layer(
    run: Callable[..., Any],
    arguments: Sequence[Any],
    repeats: int = 20,
    *,
    calls: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Times `run(x, *rest)`, which returns something of the shape, type and sharding of x.

    What the values become on their way through many calls does not matter to the time, so they may overflow or vanish.

    Args:
      run: traced once, inside a loop; may contain `shard_map` and kernels.
      arguments: x and the rest, on the devices.
      repeats: pairs of programs that are timed.
      calls: of the shorter program; None for as many as take `TIMED_SECONDS`.
      clock: in seconds.

    Raises:
      TooShort: see there.
    """
    program = chained(run)
    return time_calls(lambda number: program(number, *arguments), repeats, calls, clock)


def time_calls(
    chain: Callable[[int], Any],
    repeats: int,
    calls: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Times one call by `chain(number)`, which makes so many calls one after the other and returns when they are done.

    Args:
      repeats, calls: see `time_layer`.

    Raises:
      TooShort: see there.
    """
    if repeats < 1 or (calls is not None and calls < 1):
        raise ValueError(f"repeats and calls must be at least 1, got {repeats} and {calls}")
    most = calls or MOST_CALLS

    def seconds(number: int) -> float:
        start = clock()
        chain(number)
        return clock() - start

    chain(1)  # compiles
    if calls is None:
        calls = 1
        while (taken := seconds(calls)) < TIMED_SECONDS and calls < most:
            # Launching is part of it, so more may be needed than it says.
            calls = min(most, max(2 * calls, math.ceil(calls * TIMED_SECONDS / max(taken, 1e-9) / 2)))
    while True:
        found = sorted((-seconds(calls) + seconds(3 * calls)) / (2 * calls) for _ in range(repeats))
        median = statistics.median(found)
        if median > 0:
            break
        if calls == most:
            raise TooShort(f"{calls} calls and {3 * calls} take the same time")
        calls = min(most, 4 * calls)  # something else kept the machine busy meanwhile
    quarter = len(found) // 4
    spread = (found[-1 - quarter] - found[quarter]) / median
    return Timing(median * 1e6, spread, repeats * 4 * calls)
