"""The same model without an engine, to see what the engine costs: the forward pass jitted as it is, a dense cache, a greedy loop.

No pages, no scheduler, no sampler beside an argmax, no bucket: programs have exactly the shapes of the case. Sequences of a batch are all
equally long. Experts run by the engine's plan for the number of tokens at hand.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.bench.decode import full_steps
from tpu_serve.bench.driver import Driver
from tpu_serve.bench.report import percentile
from tpu_serve.bench.run import prepare
from tpu_serve.bench.sweep import Sweep
from tpu_serve.checkpoint.folder import resolve
from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import chip_of
from tpu_serve.device.devices import take_devices
from tpu_serve.device.kv_cache import PagedCache
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.build import Phase
from tpu_serve.engine.design import Design, design_engine
from tpu_serve.hf_config import read_config

COLUMNS = (
    "batch", "input len", "output len", "engine prefill ms", "plain", "ratio", "engine step ms", "plain", "ratio", "engine tokens/s",
)  # fmt: skip

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of a layer, [B, L, K, D] each."""


@dataclasses.dataclass(frozen=True)
class DenseMixing:
    """Attention of a batch of sequences with equally many tokens each, `Mixing` without pages.

    Attributes:
      batch_size: B; tokens lie sequence after sequence.
      start: i32[], tokens that each sequence had before.
    """

    batch_size: int
    start: jax.Array

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Cache,
        *,
        scale: float,
        window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        if sinks is not None:
            raise ConfigError("bench plain has no attention sinks, which this model has.")
        rows, heads, size = self.batch_size, k.shape[1], q.shape[-1]
        q, k, v = (array.reshape(rows, -1, *array.shape[1:]) for array in (q, k, v))
        held = tuple(_written(array, new, self.start) for array, new in zip(cache, (k, v), strict=True))
        keys, values = (_values(array, q.dtype) for array in held)
        grouped = q.reshape(rows, q.shape[1], heads, -1, size)
        scores = jnp.einsum("btkgd,blkd->bkgtl", grouped, keys, preferred_element_type=jnp.float32) * scale
        distance = self.start + jnp.arange(q.shape[1])[:, None] - jnp.arange(keys.shape[1])
        visible = (distance >= 0) & (distance < (window or keys.shape[1]))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(q.dtype)
        out = jnp.einsum("bkgtl,blkd->btkgd", weights, values, preferred_element_type=jnp.float32)
        return out.astype(q.dtype).reshape(-1, q.shape[2], size), (held[0], held[1])

    def convolve(self, x: jax.Array, weight: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        raise NotImplementedError

    def delta_rule(
        self, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        raise NotImplementedError


def _written(array: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    if array.dtype != new.dtype:
        new = jax.lax.bitcast_convert_type(new, array.dtype)
    return jax.lax.dynamic_update_slice_in_dim(array, new, start, axis=1)


def _values(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


class Plain:
    """A model's greedy loop.

    Args:
      params: its weights on one device.

    Raises:
      ConfigError: the model has recurrent layers, or is on several devices.
    """

    def __init__(self, design: Design, params: Any):
        self._design, self._params = design, params
        layers = design.placement.cache_layout.layers
        self._layers = [layer for layer in layers if isinstance(layer, PagedCache)]
        if len(self._layers) < len(layers):
            raise ConfigError("bench plain has attention only; this model has recurrent layers.")
        if design.placement.mesh.size > 1:
            raise ConfigError("bench plain runs on one device (--tensor-parallel-size 1).")
        self._step = jax.jit(self._forward, donate_argnums=1)

    def run(self, prompts: np.ndarray, output_len: int) -> tuple[np.ndarray, float, float]:
        """Answers i32[B, output_len], seconds to the first token of each, and seconds of each step after that.

        Args:
          prompts: i32[B, L].
        """
        batch_size, input_len = prompts.shape
        caches = jax.block_until_ready(self._caches(batch_size, input_len + output_len))
        started = time.perf_counter()
        token, caches = self._step(self._params, caches, jnp.asarray(prompts, jnp.int32), jnp.int32(0))
        token.block_until_ready()
        first, found = time.perf_counter(), [token]
        for place in range(input_len, input_len + output_len - 1):
            token, caches = self._step(self._params, caches, token[:, None], jnp.int32(place))
            found.append(token)
        token.block_until_ready()
        ended = time.perf_counter()
        answers = np.stack([np.asarray(one) for one in found], axis=1)
        return answers, first - started, (ended - first) / max(1, output_len - 1)

    def _forward(self, params: Any, caches: list[Cache], token_ids: jax.Array, start: jax.Array) -> tuple[Any, Any]:
        """Next tokens i32[B] of token_ids [B, L] that stand from `start` on."""
        batch_size, length = token_ids.shape
        model, mixing = self._design.model, DenseMixing(batch_size, start)
        positions = jnp.tile(start + jnp.arange(length, dtype=jnp.int32), batch_size)
        is_token = jnp.ones(batch_size * length, bool)
        experts: Any = self._design.experts
        hidden, caches = model.forward(params, token_ids.reshape(-1), positions, is_token, caches, mixing, experts)
        logits = model.logits(params, hidden.reshape(batch_size, length, -1)[:, -1])[:, : model.vocab_size]
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), caches

    def _caches(self, batch_size: int, length: int) -> list[Cache]:
        dtype = self._design.dtype
        stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype  # see `CacheLayout.as_bits`

        def zeros(layer: PagedCache) -> jax.Array:
            return jnp.zeros((batch_size, length, layer.num_kv_heads, layer.head_dim), stored)

        return [(zeros(layer), zeros(layer)) for layer in self._layers]


def bench_plain(
    config: EngineConfig, sweep: Sweep, output_len: int, on_phase: Phase, on_run: Callable[[], None]
) -> list[dict[str, Any]]:
    """Engine and plain loop in turn, in one process, with the same weights; a result per prompt length and batch size.

    Times are the least of all measured batches: whatever else the machine does only adds to them.

    Raises:
      ConfigError: see `Plain` and `bench.run.prepare`; or `output_len` leaves nothing to decode.
    """
    if output_len < 3:
        raise ConfigError("--output-len must be at least 3: the first token and the last are no decode steps.")
    engine, driver = prepare(config, sweep, max(sweep.input_lens) + output_len, on_phase)
    device = take_devices(config.parallel)[0]
    hf_config = read_config(
        resolve(config.model.source, config.model.revision, weights=False), config.model.hf_overrides
    )
    runner: Any = engine.core.runner
    plain = Plain(design_engine(config, hf_config, chip_of(device), make_mesh([device])), runner.params)
    random = np.random.default_rng(config.model.seed)
    results = []
    for input_len, batch_size in sweep.cases:
        prompts = random.integers(0, engine.info.vocab_size, (batch_size, input_len))
        run = partial(_both, driver, plain, prompts, output_len)
        found = sweep.measure(run, on_run)
        least = {name: min(one[name] for one in found) for name in found[0]}
        results.append({"input_len": input_len, "output_len": output_len, "batch_size": batch_size, **least})
    return results


def _both(driver: Driver, plain: Plain, prompts: np.ndarray, output_len: int) -> dict[str, float]:
    """Milliseconds of one batch by both."""
    batch_size, input_len = prompts.shape
    prefill = driver.run(batch_size, input_len, 1)
    decode = driver.run(batch_size, input_len, output_len)
    steps = full_steps(decode, batch_size)
    if not steps:
        raise ConfigError(f"With --output-len {output_len} a batch of {batch_size} never decodes as a whole: raise it.")
    _, plain_prefill, plain_step = plain.run(prompts, output_len)
    return {
        "engine_prefill_ms": prefill.seconds * 1e3, "plain_prefill_ms": plain_prefill * 1e3,
        "engine_step_ms": percentile(steps, 50) * 1e3, "plain_step_ms": plain_step * 1e3,
    }  # fmt: skip


def cells(result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    found = []
    for part in ("prefill", "step"):
        engine, plain = result[f"engine_{part}_ms"], result[f"plain_{part}_ms"]
        found += [f"{engine:.2f}", f"{plain:.2f}", f"{engine / plain:.2f}"]
    rate = result["batch_size"] / result["engine_step_ms"] * 1e3
    return [str(result["batch_size"]), str(result["input_len"]), str(result["output_len"]), *found, f"{rate:.1f}"]
