"""How far a load has come, in words."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

GB = 10**9


class LoadProgress:
    """Turns counts of bytes into lines for the log: "12.3 of 61.1 GB, 1.8 GB/s, 27 s left".

    Args:
      write: takes a line.
      every: least seconds between two lines, the last one excepted.
      window: seconds of the past that the rate is taken from: a slow start is forgotten.
      clock: seconds, as `time.monotonic`.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        every: float = 5.0,
        window: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._write, self._every, self._window, self._clock = write, every, window, clock
        self._seen: deque[tuple[float, int]] = deque()
        self._written_at = clock()

    def __call__(self, done: int, total: int) -> None:
        """Notes that `done` of `total` bytes are read, and writes a line when it is time for one, or all are read after an earlier line."""
        now = self._clock()
        self._seen.append((now, done))
        # One that is older than the window stays: the rate spans it.
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window:
            self._seen.popleft()
        if now - self._written_at >= self._every and 0 < done < total:
            self._written_at = now
            self._write(self.line(done, total))

    @property
    def rate(self) -> float | None:
        """Bytes per second over the recent past, None while there is none."""
        if not self._seen:
            return None
        (start, before), (now, done) = self._seen[0], self._seen[-1]
        return (done - before) / (now - start) if now > start and done > before else None

    def line(self, done: int, total: int) -> str:
        """Where it stands; without rate and time left while nothing is known of them."""
        text, rate = f"{done / GB:.1f} of {total / GB:.1f} GB", self.rate
        if rate is None:
            return text
        return f"{text}, {rate / GB:.1f} GB/s, {_duration((total - done) / rate)} left"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60:02d} s"
