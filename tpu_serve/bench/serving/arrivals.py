"""When requests leave."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tpu_serve.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests are spread over time.

    Attributes:
      rate: requests per second; infinite sends all at once.
      burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, less comes in bursts, more is steadier.
      ramp_up: how the rate goes from `start_rate` with the first request to `end_rate` with the last, instead of `rate`.

    Raises:
      ConfigError: a number is out of range, or they contradict one another.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: Literal["linear", "exponential"] | None = None
    start_rate: float | None = None
    end_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"--request-rate must be above 0 requests per second, got {self.rate:g}.")
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness must be above 0, got {self.burstiness:g}.")
        rates = (self.start_rate, self.end_rate)
        if self.ramp_up is None:
            if rates != (None, None):
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
            return
        if math.isfinite(self.rate):
            raise ConfigError(f"--request-rate {self.rate:g} contradicts --ramp-up-strategy: leave one of them out.")
        if None in rates:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.")
        start, end = self.start_rate or 0.0, self.end_rate or 0.0
        if not 0 <= start < end or not math.isfinite(end):
            raise ConfigError(f"--ramp-up-start-rps {start:g} must be at least 0 and below --ramp-up-end-rps {end:g}.")
        if self.ramp_up == "exponential" and start == 0:
            raise ConfigError("--ramp-up-strategy exponential needs a --ramp-up-start-rps above 0.")

    def delays(self, count: int, seed: int) -> list[float]:
        """Seconds from the start of the run at which each of `count` requests leaves, never falling.

        Gaps are drawn from a gamma distribution of the mean 1 / rate. Without a ramp they are scaled together so that the last request
        leaves at exactly count / rate: two runs with the same rate last equally long whatever was drawn.
        """
        random, gaps = np.random.default_rng(seed), []
        for place in range(count):
            rate = self._rate(place, count)
            if math.isinf(rate):
                gaps.append(0.0)
            elif math.isinf(self.burstiness):
                gaps.append(1 / rate)
            else:
                gaps.append(float(random.gamma(self.burstiness, 1 / (rate * self.burstiness))))
        delays = list(itertools.accumulate(gaps))
        if self.ramp_up is None and delays and delays[-1] > 0:
            scale = count / self.rate / delays[-1]
            delays = [delay * scale for delay in delays]
        return delays

    def _rate(self, place: int, count: int) -> float:
        if self.ramp_up is None or self.start_rate is None or self.end_rate is None:
            return self.rate
        progress = place / max(count - 1, 1)
        if self.ramp_up == "exponential":
            return self.start_rate * (self.end_rate / self.start_rate) ** progress
        # A rate of exactly 0 would never let the first request leave.
        return max(self.start_rate + (self.end_rate - self.start_rate) * progress, self.end_rate / max(count, 1))


def check_delays(delays: Sequence[float]) -> None:
    """Raises `ConfigError` when times of a trace fall."""
    if any(after < before for before, after in itertools.pairwise(delays)):
        raise ConfigError("The times of the trace are not in order.")
