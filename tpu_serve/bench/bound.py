"""The least time that launched steps can take on their device, which a measured time is a share of."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.bench.models.bound import least
from tpu_serve.bench.models.step import PREFILL, Step
from tpu_serve.config import EngineConfig
from tpu_serve.device.chip import Chip, chip_of
from tpu_serve.device.devices import take_devices
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.design import Design, design_engine
from tpu_serve.engine.engine import Engine
from tpu_serve.hf_config import read_config
from tpu_serve.runner.compile_counter import expected

Rows = Sequence[tuple[int, int]]
"""Rows of a step: (position of the first token, how many tokens)."""

PUBLISHED, MEASURED = "published", "measured"
_NUM_TRIES = 6
_NUM_BYTES = 2**28
_SIZES = (512, 1024)


@dataclass(frozen=True, slots=True)
class LaunchedStep(Step):
    """A step as it was launched, with rows of any kind."""

    rows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_rows(cls, rows: Rows) -> LaunchedStep:
        num_tokens = sum(length for _, length in rows)
        return cls(PREFILL, num_tokens, max(start + length for start, length in rows), tuple(rows))

    @property
    def num_sequences(self) -> int:
        return len(self.rows)

    def num_seen(self, window: int | None) -> int:
        return sum(_seen(start + length, window) - _seen(start, window) for start, length in self.rows)

    def num_keys(self, window: int | None) -> int:
        first = [0 if window is None else max(0, start + 1 - window) for start, _ in self.rows]
        return sum(start + length - place for (start, length), place in zip(self.rows, first, strict=True))


def _seen(num_tokens: int, window: int | None) -> int:
    """Pairs of a token and a key that it sees, over the first tokens of a sequence."""
    most = min(num_tokens, window or num_tokens)
    return most * (most + 1) // 2 + (num_tokens - most) * most


@dataclass(frozen=True, slots=True)
class Bound:
    """Of an engine's steps. Links between devices are left out, which makes it smaller.

    Attributes:
      design: its placement's chip has the rates.
      page_size: tokens of a page of the caches.
      source: of the rates: "published" for a TPU, "measured" here and now for a CPU.
    """

    design: Design
    page_size: int
    source: str

    @classmethod
    def of(cls, engine: Engine) -> Bound:
        """Of an engine on this machine's devices."""
        config = engine.config
        devices = take_devices(config.parallel)
        chip = chip_of(devices[0])
        rated = chip if chip.is_tpu else measured(chip)
        return cls(
            design_of(config, rated), engine.core.scheduler.cache.page_size, PUBLISHED if chip.is_tpu else MEASURED
        )

    def seconds(self, rows: Rows) -> float:
        """Of one step with these rows."""
        return least(self.design, LaunchedStep.of_rows(rows), self.page_size, 0.0).us * 1e-6

    def document(self) -> dict[str, Any]:
        """The rates, as JSON values."""
        chip = self.design.placement.chip
        return {
            "rates": self.source,
            "bytes_per_second": chip.hbm_bytes_per_second,
            "operations_per_second": chip.peak_ops["bfloat16"],
        }

    def __str__(self) -> str:
        chip = self.design.placement.chip
        return (
            f"{self.source} rates of {chip.hbm_bytes_per_second / 1e9:.1f} GB/s and "
            f"{chip.peak_ops['bfloat16'] / 1e9:.0f} GFLOP/s a device"
        )


def design_of(config: EngineConfig, chip: Chip) -> Design:
    """What `build_engine` decided for the same options, with a chip of other rates in it."""
    devices = take_devices(config.parallel)
    folder = read_config(_folder(config), config.model.hf_overrides)
    design = design_engine(config, folder, chip_of(devices[0]), make_mesh(devices, config.parallel.data_parallel_size))
    return dataclasses.replace(design, placement=dataclasses.replace(design.placement, chip=chip))


def _folder(config: EngineConfig) -> Any:
    from tpu_serve.checkpoint.folder import resolve

    return resolve(config.model.source, config.model.revision, weights=False)


def measured(chip: Chip) -> Chip:
    """The chip with the best rates at which XLA reads memory and multiplies here; all types are given that of the fastest one."""
    with expected():
        values = jnp.ones((64, _NUM_BYTES // 64 // 4), jnp.float32)
        rate = values.nbytes / _best(lambda x: x.sum(axis=1), values)
        del values
        operations = 0.0
        for dtype in (jnp.float32, jnp.bfloat16):
            for size in _SIZES:
                square = jnp.ones((size, size), dtype)
                operations = max(operations, 2 * size**3 / _best(lambda x: x @ x, square))
    return dataclasses.replace(chip, hbm_bytes_per_second=rate, peak_ops=dict.fromkeys(chip.peak_ops, operations))


def _best(run: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    """Seconds of the fastest of a few calls."""
    program = jax.jit(run)
    jax.block_until_ready(program(argument))
    seconds = []
    for _ in range(_NUM_TRIES):
        started = time.perf_counter()
        jax.block_until_ready(program(argument))
        seconds.append(time.perf_counter() - started)
    return min(seconds)
