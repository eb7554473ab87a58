"""Steps and values for the tests of the attention kernel, and its simulated runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from simulator import Simulation

from tpu_serve.device.batch import Batch
from tpu_serve.device.chip import cpu_chip
from tpu_serve.device.kv_cache import narrowed
from tpu_serve.device.quantised import QuantisedArray
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.ragged_paged_attention import reference
from tpu_serve.kernels.ragged_paged_attention.config import Config, supports
from tpu_serve.kernels.ragged_paged_attention.op import ragged_paged_attention
from tpu_serve.kernels.ragged_paged_attention.problem import Problem

NUM_PAGES = 80
SCALE = 0.3


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem and how it is cut; tokens, rows and pages are those of every test."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 8
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: str = "float32"
    stored: str | None = None
    config: Config = dataclasses.field(default_factory=lambda: Config(16, 2, 1, 2, 3))
    num_tokens: int = 64
    num_rows: int = 8
    max_pages: int = 12

    @property
    def problem(self) -> Problem:
        return Problem(
            self.num_tokens, self.num_rows, self.max_pages, self.num_heads, self.num_kv_heads, self.head_dim,
            self.page_size, self.window, self.soft_cap, self.has_sinks, self.dtype, self.stored,
        )  # fmt: skip

    def arrays(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """q, k, v and a cache that is full of other values than those."""
        draw = np.random.default_rng(seed)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(draw.normal(size=shape), self.dtype)

        tokens, heads = self.num_tokens, self.num_kv_heads
        q = normal(tokens, self.num_heads, self.head_dim)
        k, v = (normal(tokens, heads, self.head_dim) for _ in range(2))
        cache = normal(NUM_PAGES, heads, self.page_size, 2 * self.head_dim)
        return q, k, v, cache if self.stored is None else quantised(cache, self.stored)

    def sinks(self) -> jax.Array | None:
        return jnp.linspace(-2.0, 2.0, self.num_heads, dtype=jnp.float32) if self.has_sinks else None

    def batch(self, spans: list[tuple[int, int]], share: tuple[int, int, int] | None = None) -> Batch:
        """The step of rows (tokens before this step, tokens of this step), their pages in random order.

        Behind a window and behind a sequence's end the table names the padding page, 0.

        Args:
          share: (row, other row, pages): the first pages of the one are those of the other.
        """
        size = self.page_size
        free = np.random.default_rng(7).permutation(np.arange(1, NUM_PAGES)).tolist()
        ints = functools.partial(np.zeros, dtype=np.int32)
        seq, positions, index = (ints(self.num_tokens) for _ in range(3))
        seq -= 1
        index[:] = np.arange(self.num_tokens) % size
        table, lengths, starts = ints((self.num_rows, self.max_pages)), ints(self.num_rows), ints(self.num_rows + 1)
        at = 0
        for row, (before, count) in enumerate(spans):
            assert before + count <= self.max_pages * size
            pages = [free.pop() for _ in range(-(-(before + count) // size))]
            if share is not None and row == share[0]:
                pages[: share[2]] = table[share[1], : share[2]]
            first_seen = 0 if self.window is None else max(0, before + 1 - self.window)
            table[row, first_seen // size : len(pages)] = pages[first_seen // size :]
            where = np.arange(before, before + count)
            tokens = slice(at, at + count)
            seq[tokens], positions[tokens] = row, where
            index[tokens] = table[row, where // size] * size + where % size
            at += count
            lengths[row], starts[row + 1] = before + count, at
        starts[len(spans) + 1 :] = at
        none = {field.name: None for field in dataclasses.fields(Batch)}
        given = {
            "positions": positions, "seq_of_token": seq, "kv_index": index[None], "page_table": table[None],
            "kv_lens": lengths, "cu_q_lens": starts, "num_seqs": np.int32(len(spans)), "num_tokens": np.int32(at),
        }  # fmt: skip
        return Batch(**none | {name: jnp.asarray(value) for name, value in given.items()})


def quantised(cache: jax.Array, stored: str) -> QuantisedArray:
    """A cache that is by head, in 8 bits."""
    halves = jnp.stack(jnp.split(cache, 2, axis=-1), axis=2)  # [pages, K, 2, page size, D]
    values, scale = narrowed(halves, stored)
    return QuantisedArray(jnp.concatenate([values[:, :, 0], values[:, :, 1]], axis=-1), scale)


@functools.cache
def simulated(case: Case, detect_races: bool = True) -> Simulation:
    """The kernel compiled for a case; `run` takes q, k, v, cache and batch."""
    assert supports(case.problem, cpu_chip()) is None

    def kernel(interpret: Any, q: Any, k: Any, v: Any, cache: Any, batch: Batch) -> Any:
        return ragged_paged_attention(
            q, k, v, cache, batch, SCALE, context=Context(cpu_chip(), interpret), window=case.window,
            sinks=case.sinks(), soft_cap=case.soft_cap, config=case.config,
        )  # fmt: skip

    return Simulation(kernel, detect_races=detect_races)


def written(case: Case, k: Any, v: Any, cache: Any, batch: Batch) -> Any:
    """The cache with this step's keys and values, written token by token."""
    both = jnp.stack([k, v], axis=2)
    scale = None
    if case.stored is not None:
        both, scale = narrowed(both, case.stored)
    values = np.array(cache.values if scale is not None else cache)
    scales = np.array(cache.scale) if scale is not None else None
    for token in range(int(batch.num_tokens)):
        page, offset = divmod(int(batch.kv_index[0, token]), case.page_size)
        values[page, :, offset] = np.asarray(both[token]).reshape(case.num_kv_heads, -1)
        if scales is not None:
            scales[page, :, :, offset] = scale[token]
    return values if scales is None else QuantisedArray(values, scales)


@functools.partial(jax.jit, static_argnames="case")
def expected(case: Case, q: Any, cache: Any, batch: Batch) -> jax.Array:
    """What attention over a cache gives that holds this step's keys and values."""
    return reference.attention(q, cache, batch, SCALE, window=case.window, sinks=case.sinks(), soft_cap=case.soft_cap)
