"""How tokens see one another: all that a model needs to know of sequences and their caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from tpu_serve.device.batch import Batch
from tpu_serve.layers.attention_on_mesh import MeshAttention
from tpu_serve.layers.recurrence_on_mesh import MeshRecurrence


class Mixing(Protocol):
    """Each function takes what a layer computed of this step's tokens and the layer's cache, and gives the mixed values and the new cache.

    Letters: T tokens, N query heads, K KV heads, D head size; Hk key heads and Hv value heads of a recurrent layer, Dk and Dv their sizes; W
    taps.
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
        """Causal convolution of each channel of x [T, heads * D] with the taps [heads, D, W], the token's own last. The cache keeps W - 1
        inputs, those of a head together: [heads * (W - 1) * D]."""

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
      attention: how layers attend, and on which mesh.
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
        return self._recurrence.convolve(x, weight, cache, self.batch)

    def delta_rule(
        self, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        return self._recurrence.delta_rule(q, k, v, log_decay, beta, cache, self.batch)

    @property
    def _recurrence(self) -> MeshRecurrence:
        return MeshRecurrence(self.attention.mesh, self.attention.rules, self.attention.chip)
