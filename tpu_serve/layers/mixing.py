"""How tokens see one another: all that a model needs to know of sequences and their caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import Batch
from tpu_serve.layers.attention_on_mesh import MeshAttention
from tpu_serve.layers.convolution import convolve
from tpu_serve.layers.delta_rule import delta_rule


class Mixing(Protocol):
    """Each function takes what a layer computed of this step's tokens and the layer's cache, and gives the mixed values and the new cache.

    Letters: T tokens, N query heads, K KV heads, D head size; Hk key heads and Hv value heads of a recurrent layer, Dk and Dv their sizes; C
    channels, W taps.
    """

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Causal attention of q [T, N, D] over keys and values [T, K, D] and those before them: [T, N, D].

        Args:
          scale: factor on the scores.
          window: a token sees so many keys, its own included; as in the cache of the layer.
          sinks: [N], a score per head that takes its share of the softmax and gives nothing; never scaled.
        """

    def convolve(self, x: jax.Array, weight: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Causal convolution of each channel of x [T, C] with the taps [C, W], the token's own last. The cache keeps W - 1 inputs."""

    def delta_rule(
        self, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """The gated delta rule; q, k [T, Hk, Dk] before their normalisation, v [T, Hv, Dv], log_decay and beta f32[T, Hv]: [T, Hv, Dv].
        The cache keeps f32[Hv, Dk, Dv]."""


@dataclass(frozen=True)
class PagedMixing:
    """Over a step's ragged batch and the caches of all sequences.

    Attributes:
      windows: of the page tables of the batch, in their order.
      attention: how layers attend.
    """

    batch: Batch
    windows: tuple[int | None, ...]
    attention: MeshAttention

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        table = self.windows.index(window)
        return self.attention(q, k, v, cache, self.batch, scale, window=window, table=table, sinks=sinks)

    def convolve(self, x: jax.Array, weight: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        y, tails = convolve(x, weight, self._read(cache), self.batch.seq_of_token, self.batch.cu_q_lens)
        return y, self._write(cache, tails)

    def delta_rule(
        self, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        batch = self.batch
        out, states = delta_rule(q, k, v, log_decay, beta, self._read(cache), batch.seq_of_token, batch.cu_q_lens)
        return out, self._write(cache, states)

    def _read(self, pool: jax.Array) -> jax.Array:
        """What each sequence row starts from, [S, ...]."""
        rows = self.batch.state_read
        started = (rows >= 0).reshape(-1, *[1] * (pool.ndim - 1))
        return jnp.where(started, pool[jnp.maximum(rows, 0)], jnp.zeros((), pool.dtype))

    def _write(self, pool: jax.Array, rows: jax.Array) -> jax.Array:
        rows = rows.astype(pool.dtype)
        for target in (self.batch.state_write, self.batch.snapshot_write):
            pool = pool.at[target].set(rows, mode="drop")
        return pool
