"""Times one mixture-of-experts layer on this CPU by the implementations in XLA's own operations: `dense`, `ragged` and `gathered`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.bench.moe_cases import BACKENDS, Case, Layer
from tpu_serve.bench.moe_rows import EMPTY, Row
from tpu_serve.layers.moe.backends import Dense, Ragged
from tpu_serve.layers.moe.gathered import Gathered
from tpu_serve.layers.moe.routing import ExpertWeights, Routing

Program = Callable[[jax.Array, Routing, ExpertWeights], jax.Array]
Choose = Callable[[int, int, int], str]
"""What a server takes for (num_tokens, num_experts, top_k): a name of `BACKENDS`."""


def cpu() -> jax.Device:
    """The device of this process that is its CPU; no other platform is started."""
    jax.config.update("jax_platforms", "cpu")
    return jax.local_devices(backend="cpu")[0]


def measure(
    cases: Sequence[Case],
    num_iters: int,
    choose: Choose,
    on_round: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """One row per case. Weights are made once for neighbouring cases of one layer and type.

    Args:
      num_iters: measured rounds of a case. One more goes before, which compiles and compares the results. A round has new tokens and a new
        routing and calls every program once, beginning with another one than the round before: load on the machine and what is left in its
        caches meet all alike.
      on_round: called after every round.
      clock: in seconds.
    """
    device = cpu()
    rows = []
    for (layer, dtype), neighbours in itertools.groupby(cases, lambda case: (case.layer, case.dtype)):
        weights = _weights(layer, dtype, device)
        for case in neighbours:
            samples, difference = _measure(case, weights, num_iters, device, on_round, clock)
            chosen = choose(case.num_tokens, layer.num_experts, layer.top_k)
            rows.append(Row(case, {name: tuple(found) for name, found in samples.items()}, chosen, difference))
        del weights  # those of one layer fill a good part of a small machine
    return rows


def _measure(
    case: Case,
    weights: ExpertWeights,
    num_iters: int,
    device: jax.Device,
    on_round: Callable[[], None],
    clock: Callable[[], float],
) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of every program, and how far the results are apart."""
    programs = _programs()
    samples: dict[str, list[float]] = {name: [] for name in programs}
    rng = np.random.default_rng(case.num_tokens)
    difference = _difference(programs, _tokens(case, rng, device), weights)
    on_round()
    for number in range(num_iters):
        x, routing = jax.block_until_ready(_tokens(case, rng, device))
        for name in _rotated(list(programs), number):
            started = clock()
            jax.block_until_ready(programs[name](x, routing, weights))
            samples[name].append((clock() - started) * 1e3)
        on_round()
    return samples, difference


def _programs() -> dict[str, Program]:
    """Each compiled on its first call. The empty one has the same arguments and tells what a call costs."""
    made: dict[str, Program] = {
        "dense": Dense(),
        "ragged": Ragged(chip_is_tpu=False),
        "gathered": Gathered(),
        EMPTY: _nothing,
    }
    assert tuple(made) == (*BACKENDS, EMPTY)
    return {name: jax.jit(program) for name, program in made.items()}


def _nothing(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    return x


def _rotated(names: Sequence[str], by: int) -> list[str]:
    start = by % len(names)
    return [*names[start:], *names[:start]]


def _difference(programs: Mapping[str, Program], tokens: tuple[jax.Array, Routing], weights: ExpertWeights) -> float:
    """How far the backends' results are apart at most, as a share of the largest value."""
    found = {name: np.asarray(program(*tokens, weights), np.float32) for name, program in programs.items()}
    first = found[BACKENDS[0]]
    largest = float(np.abs(first).max())
    return max(float(np.abs(found[name] - first).max()) for name in BACKENDS[1:]) / largest


def _weights(layer: Layer, dtype: str, device: jax.Device) -> ExpertWeights:
    """Normal, of a size that keeps the values of a token about as large as they come."""
    rng = np.random.default_rng(0)

    def normal(contracted: int, *shape: int) -> jax.Array:
        values = rng.standard_normal(shape, np.float32) * np.float32(contracted**-0.5)
        return jax.device_put(values.astype(jnp.dtype(dtype)), device)

    experts, hidden, inner = layer.num_experts, layer.hidden, layer.intermediate
    return ExpertWeights(normal(hidden, experts, 2, hidden, inner), normal(inner, experts, inner, hidden))


def _tokens(case: Case, rng: np.random.Generator, device: jax.Device) -> tuple[jax.Array, Routing]:
    """Tokens [T, H] and a routing that prefers no expert; the last `num_padding` rows go to none."""
    layer, num_tokens = case.layer, case.num_tokens
    x = rng.standard_normal((num_tokens, layer.hidden), np.float32).astype(jnp.dtype(case.dtype))
    ids = np.argsort(rng.random((num_tokens, layer.num_experts)), axis=1)[:, : layer.top_k].astype(np.int32)
    shares = rng.random((num_tokens, layer.top_k), np.float32) + np.float32(0.1)
    shares /= shares.sum(axis=1, keepdims=True)
    ids[num_tokens - case.num_padding :], shares[num_tokens - case.num_padding :] = -1, 0.0
    put = functools.partial(jax.device_put, device=device)
    return put(x), Routing(put(shares), put(ids))


def document(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as JSON values, raw samples included."""
    return [
        {
            "layer": dataclasses.asdict(row.case.layer),
            "dtype": row.case.dtype,
            "num_tokens": row.case.num_tokens,
            "num_padding": row.case.num_padding,
            "median_ms": {name: row.median(name) for name in row.samples_ms},
            "ratio": row.ratio,
            "fastest": row.fastest,
            "is_clear": row.is_clear,
            "chosen": row.chosen,
            "loss": row.loss,
            "difference": row.difference,
            "samples_ms": {name: list(samples) for name, samples in row.samples_ms.items()},
        }
        for row in rows
    ]
