"""The program of a step, one per token bucket: made from shapes alone, so that it can be compiled before weights are read or for devices
that are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import pytree
from tpu_serve.device.sampler_state import SamplerState
from tpu_serve.layers.attention_on_mesh import MeshAttention
from tpu_serve.layers.logit_edits import count, edit, restrict
from tpu_serve.layers.logprobs import Logprobs, prompt_logprobs
from tpu_serve.layers.mixing import PagedMixing
from tpu_serve.layers.sampler import Sampled, sample
from tpu_serve.models.base import Experts, Model
from tpu_serve.runner.pack import PackLayout


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which token ids may be sampled.

    Attributes:
      num_valid_ids: those from here on do not exist in the tokenizer.
      suppressed_ids: the model's authors want none of these.
    """

    num_valid_ids: int
    suppressed_ids: tuple[int, ...] = ()


@pytree
@dataclass(frozen=True, slots=True)
class DeviceState:
    """What lives on the device from step to step; each step consumes it and returns the next.

    Attributes:
      caches: pages of keys and values or recurrent state, for each layer as `CacheLayout` arranges them.
      last_token: i32[slots], token that each slot sampled last.
      sampler: what sampling needs of each slot's sequence.
    """

    caches: list[Any]
    last_token: jax.Array
    sampler: SamplerState


@dataclass(frozen=True)
class StepFunction:
    """What a step computes, but for its bucket.

    Attributes:
      model: sizes and functions.
      experts: the mixture-of-experts backend.
      attention: how attention runs.
      windows: of the model's attention layers, in the order of the batch's page tables.
      allowed: which token ids may be sampled.
      logprobs_mode: what log-probabilities are of, one of `LOGPROBS_MODES`.
    """

    model: Model
    experts: Experts
    attention: MeshAttention
    windows: tuple[int | None, ...]
    allowed: Allowed
    logprobs_mode: str = "raw_logprobs"

    def __call__(
        self, layout: PackLayout, params: Any, state: DeviceState, packed: jax.Array, masks: jax.Array
    ) -> tuple[DeviceState, Sampled, Logprobs]:
        """One whole step: tokens in, tokens out, and log-probabilities of a prompt's tokens.

        Args:
          layout: of `packed`, which `pack` wrote.
          masks: what `pack_masks` wrote, or anything of that shape.
        """
        model, mode = self.model, self.logprobs_mode
        batch = layout.unpack(packed)
        rows, slots = batch.sampling, batch.slots
        in_flight = batch.from_slot >= 0
        token_ids = jnp.where(in_flight, state.last_token[jnp.maximum(batch.from_slot, 0)], batch.token_ids)
        mixing = PagedMixing(batch, self.windows, self.attention)
        hidden, caches = model.forward(
            params, token_ids, batch.positions, batch.seq_of_token >= 0, state.caches, mixing, self.experts
        )
        logits = model.logits(params, hidden[batch.sample_at])
        restricted = restrict(logits, self.allowed.num_valid_ids, self.allowed.suppressed_ids)
        sampled = sample(logits, edit(restricted, rows, slots, masks, state.sampler), rows, mode)
        prompt = prompt_logprobs(
            lambda piece: model.logits(params, piece), hidden, batch.prompt_targets, batch.any_prompt_logprobs, mode
        )
        last_token = state.last_token.at[slots].set(sampled.token_ids, mode="drop")
        sampler = count(state.sampler, rows, slots, sampled.token_ids)
        return DeviceState(caches, last_token, sampler), sampled, prompt


class Programs:
    """The step for every bucket, not yet compiled.

    Args:
      function: what a step computes.
      layouts: one per token bucket.
      params, state: trees of arrays, or of shapes with shardings. Where several devices share the work, each holds all of `last_token`.

    Attributes:
      layouts: by token count, in rising order.
      params, state: shapes, types and shardings.
    """

    def __init__(self, function: StepFunction, layouts: Sequence[PackLayout], params: Any, state: DeviceState):
        self.layouts: Mapping[int, PackLayout] = {
            layout.num_tokens: layout for layout in sorted(layouts, key=lambda layout: layout.num_tokens)
        }
        self.params, self.state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (params, state)
        )
        self._function = function

    @property
    def everywhere(self) -> jax.sharding.Sharding:
        """Of what every device holds whole: what a step is given and what the host reads of it."""
        return self.state.last_token.sharding

    @property
    def vocab_size(self) -> int:
        return int(self.state.sampler.counts.shape[1])

    def mask_shape(self, num_tokens: int) -> tuple[int, int]:
        """Of the masks of a bucket's step: rows, and words of 32 token ids."""
        return self.layouts[num_tokens].num_rows, -(-self.vocab_size // 32)

    def lower(self, num_tokens: int) -> jax.stages.Lowered:
        """The step of a bucket, traced and ready to be compiled: (params, state, packed, masks) -> (state, sampled, prompt)."""
        layout = self.layouts[num_tokens]
        step = jax.jit(
            partial(self._function, layout),
            donate_argnums=(1,),
            # State stays where it lies, or the next step could not take it; samples go where the host can read them whole.
            out_shardings=(jax.tree.map(lambda x: x.sharding, self.state), self.everywhere, self.everywhere),
        )
        inputs = ((layout.size,), jnp.int32), (self.mask_shape(num_tokens), jnp.uint32)
        return step.lower(
            self.params,
            self.state,
            *(jax.ShapeDtypeStruct(shape, dtype, sharding=self.everywhere) for shape, dtype in inputs),
        )
