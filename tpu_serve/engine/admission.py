"""How fast requests leave the queue, measured, and what that says to those who are turned away."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 30.0
LEAST_SECONDS, MOST_SECONDS = 1, 60


class AdmissionRate:
    """Requests that got their first token, or ended without any, within the last `WINDOW_SECONDS`.

    Args:
      clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._left: deque[float] = deque(maxlen=10_000)

    def left_queue(self) -> None:
        """One more is not waiting any longer."""
        self._left.append(self._clock())

    def seconds_until_drained(self, num_waiting: int) -> int:
        """After how long so many requests will have left the queue at the present rate, in whole seconds between `LEAST_SECONDS` and
        `MOST_SECONDS`. Where nothing has left the queue for a while the rate is that of one just now."""
        now = self._clock()
        while len(self._left) > 1 and self._left[0] < now - WINDOW_SECONDS:
            self._left.popleft()
        if not num_waiting or not self._left:
            return LEAST_SECONDS
        seconds_each = (now - self._left[0]) / len(self._left)
        return min(MOST_SECONDS, max(LEAST_SECONDS, math.ceil(num_waiting * seconds_each)))
