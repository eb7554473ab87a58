"""What a request changes about its logits before a token is drawn: biases, masks, penalties.

The order is that of vLLM: ids that nobody may sample, biases, the constraint's mask, penalties. Work that no row of the batch needs is skipped
at run time; a row that asks for nothing keeps its logits bit for bit whatever its neighbours ask for. Letters: S rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import SamplingRows
from tpu_serve.device.sampler_state import IN_PROMPT, MOST_COUNTED, SamplerState


def restrict(logits: jax.Array, num_valid: int, suppressed: tuple[int, ...] = ()) -> jax.Array:
    """Logits with ids that no request may sample at minus infinity.

    Args:
      logits: f32[S, V].
      num_valid: ids from here on do not exist in the tokenizer.
      suppressed: ids that the model's authors want never; those past V are ignored.
    """
    allowed = jnp.where(jnp.arange(logits.shape[1]) < num_valid, logits, -jnp.inf)
    return allowed.at[:, jnp.array(suppressed)].set(-jnp.inf, mode="drop") if suppressed else allowed


@jax.named_scope("logit_edits")
def edit(
    logits: jax.Array,
    rows: SamplingRows,
    slots: jax.Array,
    masks: jax.Array,
    state: SamplerState,
    whole: Callable[[jax.Array], jax.Array] = lambda array: array,
) -> jax.Array:
    """Logits as each row's request wants them.

    Args:
      logits: f32[S, V].
      rows: parameters of each row.
      slots: i32[S], rows of the state; out of range where nothing is sampled.
      masks: u32[S, ceil(V / 32)], bit i % 32 of word i // 32 says whether id i may be sampled; read if `rows.any_masks`.
      state: what was written for each slot.
      whole: keeps an array [S, V] whole where the logits are split over devices.
    """

    def change(_: jax.Array, logits: jax.Array) -> jax.Array:
        logits = jax.lax.cond(rows.any_biases > 0, lambda: _bias(logits, rows, slots, state), lambda: logits)
        logits = jax.lax.cond(rows.any_masks > 0, lambda: _mask(logits, masks, whole), lambda: logits)
        return jax.lax.cond(
            rows.any_penalties > 0, lambda: _penalise(logits, rows, slots, state.counts), lambda: logits
        )

    # The idle branch of a conditional copies the logits; a loop without turns leaves them where they lie.
    any_edits = rows.any_biases | rows.any_masks | rows.any_penalties
    return jax.lax.fori_loop(0, any_edits, change, logits)


def _bias(logits: jax.Array, rows: SamplingRows, slots: jax.Array, state: SamplerState) -> jax.Array:
    ids, values, until = (
        jnp.take(table, slots, axis=0, mode="clip") for table in (state.bias_ids, state.bias_values, state.bias_until)
    )
    applies = (rows.is_biased > 0)[:, None] & (rows.output_position[:, None] < until)
    ids = jnp.where(applies, ids, logits.shape[1])  # out of range, so dropped
    return logits.at[jnp.arange(len(ids))[:, None], ids].add(values, mode="drop")


def _mask(logits: jax.Array, masks: jax.Array, whole: Callable[[jax.Array], jax.Array]) -> jax.Array:
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & jnp.uint32(1)
    # A device's share of the ids may begin within a word: devices that unpack only what they need would have to exchange words.
    allowed = whole((bits > 0).reshape(len(masks), -1)[:, : logits.shape[1]])
    return jnp.where(allowed, logits, -jnp.inf)


def _penalise(logits: jax.Array, rows: SamplingRows, slots: jax.Array, counts: jax.Array) -> jax.Array:
    found = jnp.take(counts, slots, axis=0, mode="clip").astype(jnp.int32)
    generated = (found & MOST_COUNTED).astype(jnp.float32)
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(found > 0, repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * generated
    return logits - jnp.where(generated > 0, rows.presence_penalty[:, None], 0.0)


def count(state: SamplerState, rows: SamplingRows, slots: jax.Array, token_ids: jax.Array) -> SamplerState:
    """The state once these tokens are generated. Only rows with penalties are counted.

    Args:
      token_ids: i32[S], sampled for each row; negative ones are no tokens.
      slots: see `edit`.
    """
    is_penalised = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)
    num_slots, vocabulary = state.counts.shape
    # Not skipped where no row needs it: a condition around the whole array might copy it, and this touches one element a row.
    at = jnp.where(is_penalised & (token_ids >= 0), slots, num_slots)
    before = state.counts[jnp.clip(at, 0, num_slots - 1), jnp.clip(token_ids, 0, vocabulary - 1)]
    once_more = (before < IN_PROMPT + MOST_COUNTED) & (before != MOST_COUNTED)
    after = before + once_more.astype(jnp.uint16)
    return dataclasses.replace(state, counts=state.counts.at[at, jnp.maximum(token_ids, 0)].set(after, mode="drop"))
