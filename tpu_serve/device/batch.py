"""What crosses to the device for one step: a ragged batch of mixed prefill chunks and decodes.

Letters: T tokens of the bucket, S sequence rows of the bucket, P pages a sequence can hold, W different windows of attention layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp


def pytree(cls: type) -> type:
    """Registers a dataclass whose fields are all arrays or trees of arrays."""
    return jax.tree_util.register_dataclass(cls, data_fields=[item.name for item in fields(cls)], meta_fields=[])


def zeros(shapes: Any) -> Any:
    """Arrays of zeros with these shapes, types and shardings."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


@pytree
@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each sequence row samples; see `SamplingParams`.

    Attributes:
      temperature: f32[S], 0 for greedy.
      top_p, min_p: f32[S].
      top_k: i32[S], 0 for no limit.
      seed_low, seed_high: i32[S], halves of the 64-bit seed.
      choice: i32[S].
      output_position: i32[S], index of the sampled token within the answer.
      presence_penalty, frequency_penalty, repetition_penalty: f32[S]; 0, 0 and 1 change nothing.
      is_biased: i32[S], whether the slot's biases are the row's.
      forced_id: i32[S], token that is taken whatever was drawn; -1 for none.
      any_random, any_filter, any_logprobs, any_biases, any_masks, any_penalties: i32[], whether any row needs that work at all.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    seed_low: jax.Array
    seed_high: jax.Array
    choice: jax.Array
    output_position: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    is_biased: jax.Array
    forced_id: jax.Array
    any_random: jax.Array
    any_filter: jax.Array
    any_logprobs: jax.Array
    any_biases: jax.Array
    any_masks: jax.Array
    any_penalties: jax.Array


@pytree
@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Sequences lie one after another along T, those with a single token first; rows after `num_seqs` are padding.

    Attributes:
      token_ids: i32[T].
      from_slot: i32[T], slot whose last sampled token is to be read instead of token_ids, -1 for none.
      positions: i32[T], index of the token in its sequence.
      seq_of_token: i32[T], row in S, -1 for padding.
      kv_index: i32[W, T], where the token's key and value go: page * page_size + offset; padding goes to page 0.
      page_table: i32[W, S, P]; page 0 where a sequence has no page any more, behind a window.
      kv_lens: i32[S], tokens of the sequence once this step has run.
      cu_q_lens: i32[S + 1], where each sequence's tokens start in T.
      num_seqs: i32[], rows in use.
      num_tokens: i32[], tokens in use.
      sample_at: i32[S], index in T of the row's last token.
      slots: i32[S], slot that takes the sampled token; out of range where nothing is sampled.
      state_read: i32[S], row of recurrent state that the sequence starts this step from, -1 for zeros.
      state_write: i32[S], row that takes its state after this step; out of range for padding.
      snapshot_write: i32[S], one more such row; out of range where there is none.
      prompt_targets: i32[T], token of the prompt whose log-probability after this token is reported; -1 for none.
      any_prompt_logprobs: i32[], whether any is.
      sampling: how each row samples.
    """

    token_ids: jax.Array
    from_slot: jax.Array
    positions: jax.Array
    seq_of_token: jax.Array
    kv_index: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array
    num_tokens: jax.Array
    sample_at: jax.Array
    slots: jax.Array
    state_read: jax.Array
    state_write: jax.Array
    snapshot_write: jax.Array
    prompt_targets: jax.Array
    any_prompt_logprobs: jax.Array
    sampling: SamplingRows


def own_batch(batch: Batch, ranks: str | None) -> Batch:
    """The batch of the data rank at hand, inside of a `shard_map`.

    Args:
      batch: its share of those of all ranks, whose fields have a leading axis; or the only one there is.
      ranks: mesh axis of the ranks, None for a single one.
    """
    own: Batch = batch if ranks is None else jax.tree.map(lambda x: jnp.squeeze(x, 0), batch)
    return own
