"""What is minimised: the forward pass of `models/qwen3_moe.py` with attention over whole rows and experts by capacity."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from rows import ROW

from tpu_serve.layers.moe.routing import ExpertWeights, Routing
from tpu_serve.models.qwen3_moe import Qwen3Moe

CAPACITY = 1.25
"""Tokens that an expert takes in training, over its fair share; what does not fit is left out of that step."""
BALANCE = 0.02
"""Weight of the penalty for uneven work of the experts."""


class WholeRows:
    """A `Mixing` for training: rows of equal length, each token sees what lies before it in its row."""

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: Any = None,
    ) -> tuple[jax.Array, Any]:
        assert window is None
        assert sinks is None
        group = q.shape[1] // k.shape[1]
        q, k, v = (
            x.reshape(-1, ROW, *x.shape[1:]).swapaxes(1, 2)
            for x in (q, jnp.repeat(k, group, 1), jnp.repeat(v, group, 1))
        )
        pieces = []
        for start in range(
            0, ROW, ROW // 4
        ):  # a quarter of the queries sees only so many keys, which saves nearly half the work
            end = start + ROW // 4
            scores = jnp.einsum("rnqd,rnkd->rnqk", q[:, :, start:end], k[:, :, :end]) * scale
            is_seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)
            shares = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
            pieces.append(jnp.einsum("rnqk,rnkd->rnqd", shares, v[:, :, :end]))
        out = jnp.concatenate(pieces, axis=2).swapaxes(1, 2)
        return out.reshape(-1, *out.shape[2:]), cache


@jax.custom_vjp
def also_lowering(x: jax.Array, penalty: jax.Array) -> jax.Array:
    """`x` itself; but whatever is minimised through it, `BALANCE` times the penalty is minimised too. Layers are traced as functions of
    their own, so a penalty that arises in one cannot be collected beside them."""
    return x


also_lowering.defvjp(lambda x, penalty: (x, None), lambda _, gradient: (gradient, jnp.float32(BALANCE)))


def experts_by_capacity(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    """The mixture of experts for training: each expert multiplies a fixed number of tokens, so that the work is a few dense products.

    Uneven work is penalised: the sum over experts of (share of tokens) * (share of weight), times their number, is 1 when it is even.
    """
    num_tokens, top_k = routing.expert_ids.shape
    num_experts = weights.gate_up.shape[0]
    capacity = int(CAPACITY * num_tokens * top_k / num_experts)
    ids, share = routing.expert_ids.reshape(-1), routing.weights.reshape(-1)
    chosen = jax.nn.one_hot(ids, num_experts, dtype=jnp.int32)
    place = ((jnp.cumsum(chosen, axis=0) - 1) * chosen).sum(axis=1)
    imbalance = (
        num_experts * top_k * (chosen.mean(axis=0) * (chosen.astype(share.dtype) * share[:, None]).mean(axis=0)).sum()
    )
    slot = jnp.where(place < capacity, ids * capacity + place, num_experts * capacity)
    sources = jnp.arange(num_tokens * top_k, dtype=jnp.int32) // top_k
    taken = x[jnp.zeros(num_experts * capacity, jnp.int32).at[slot].set(sources, mode="drop")]
    taken = taken.reshape(num_experts, capacity, -1)
    gate, up = (jnp.einsum("ech,ehi->eci", taken, weights.gate_up[:, part]) for part in (0, 1))
    results = jnp.einsum("eci,eih->ech", jax.nn.silu(gate) * up, weights.down).reshape(num_experts * capacity, -1)
    back = jnp.take(results, slot, axis=0, mode="fill", fill_value=0)
    return also_lowering((back * share[:, None]).reshape(num_tokens, top_k, -1).sum(axis=1), imbalance)


def loss(model: Qwen3Moe, params: Any, tokens: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weighted mean of the loss in nats a token; and the plain mean over what the model writes."""
    given, wanted = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
    positions = jnp.tile(jnp.arange(ROW), len(tokens))
    caches = [None] * len(model.moe_layers)
    is_token = jnp.ones(len(given), bool)
    hidden, _ = model.forward(params, given, positions, is_token, caches, WholeRows(), experts_by_capacity)
    nats = optax.softmax_cross_entropy_with_integer_labels(model.logits(params, hidden), wanted)
    flat = weights.reshape(-1)
    written = (flat == 1.0).astype(jnp.float32)
    return (nats * flat).sum() / flat.sum(), (nats * written).sum() / jnp.maximum(written.sum(), 1)
