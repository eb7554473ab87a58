"""The weights of a layer's experts, quantised or not."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from tpu_serve.device.batch import pytree


@pytree
@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Canonical layout: gate and up on an axis of their own, so that weights, scales and biases are sliced by one expression.

    Letters: E experts, H hidden, I intermediate, B1 and B2 blocks of the contraction (H and I) that share a scale, 1 for one scale a column.
    A product is `sum_b (x[b] @ values[b]) * scale[b] + bias`.

    Attributes:
      gate_up: [E, 2, H, I], gate first.
      down: [E, I, H].
      gate_up_scale: f32[E, 2, B1, I] or None; kernels may ask for more rows than there are blocks, which nothing reads.
      down_scale: f32[E, B2, 1, H] or None.
      gate_up_bias: f32[E, 2, 1, I] or None.
      down_bias: f32[E, 1, H] or None.
    """

    gate_up: jax.Array
    down: jax.Array
    gate_up_scale: jax.Array | None = None
    down_scale: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
