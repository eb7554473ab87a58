"""The program of a step, one per token bucket: made from shapes alone, so that it can be compiled before weights are read or for devices
that are not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_serve.device.batch import Batch, SamplingRows, pytree
from tpu_serve.device.mesh import by_rank, num_data_ranks, replicated
from tpu_serve.device.ranks import Ranks
from tpu_serve.device.sampler_state import SamplerState
from tpu_serve.layers.attention_on_mesh import MeshAttention
from tpu_serve.layers.logit_edits import count, edit, restrict
from tpu_serve.layers.logprobs import Logprobs, prompt_logprobs
from tpu_serve.layers.mixing import PagedMixing
from tpu_serve.layers.sampler import Sampled, sample
from tpu_serve.models.base import Experts, Model
from tpu_serve.runner.compilation import Program
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
    """What lives on the device from step to step; each step consumes it and returns the next. Where there are several data ranks, each has a
    part of everything, see `Ranks`.

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
          layout: of a data rank's part of `packed`.
          packed: what `pack_ranks` wrote.
          masks: what `pack_masks` wrote, or anything of that shape.

        Returns:
          The new state, and what the rows and the tokens brought, one rank after another.
        """
        batch = Ranks(self.attention.mesh).each(layout.unpack)(packed)
        return self.run(batch, params, state, masks, batch.seq_of_token >= 0)

    def run(
        self, batch: Batch, params: Any, state: DeviceState, masks: jax.Array, is_read: jax.Array
    ) -> tuple[DeviceState, Sampled, Logprobs]:
        """The step of a batch that is on the device.

        Args:
          batch: of all data ranks.
          is_read: bool[T], tokens that anybody asks for; experts have no work with the others.
        """
        ranks = Ranks(self.attention.mesh)
        last_token, sampler, masks = ranks.apart((state.last_token, state.sampler, masks))
        token_ids = ranks.each(_newest)(batch, last_token)
        mixing = PagedMixing(batch, self.windows, self.attention)
        token_ids, positions, is_read = ranks.together((token_ids, batch.positions, is_read))
        hidden, caches = self.model.forward(params, token_ids, positions, is_read, state.caches, mixing, self.experts)
        finish = partial(self._finish, params, _wanted(batch))
        *new, sampled, prompt = ranks.each(finish)(ranks.apart(hidden), batch, last_token, sampler, masks)
        return DeviceState(caches, *ranks.together(new)), *ranks.together((sampled, prompt))

    def _finish(
        self,
        params: Any,
        wanted: Mapping[str, jax.Array],
        hidden: jax.Array,
        batch: Batch,
        last_token: jax.Array,
        sampler: SamplerState,
        masks: jax.Array,
    ) -> tuple[jax.Array, SamplerState, Sampled, Logprobs]:
        """From hidden states [T, H] of a data rank's tokens to tokens, log-probabilities and the state that remembers them.

        Args:
          wanted: flags of the batch, as all ranks together have them.
        """
        model, mode = self.model, self.logprobs_mode
        flags = {name: wanted[name] for name in _SAMPLING_FLAGS}
        rows, slots = dataclasses.replace(batch.sampling, **flags), batch.slots

        def project(hidden: jax.Array) -> jax.Array:
            return model.logits(params, hidden)[:, : model.vocab_size]  # the table may be filled up

        logits = project(hidden[batch.sample_at])
        restricted = restrict(logits, self.allowed.num_valid_ids, self.allowed.suppressed_ids)
        edited = edit(restricted, rows, slots, masks, sampler, Ranks(self.attention.mesh).whole)
        sampled = sample(logits, edited, rows, mode)
        prompt = prompt_logprobs(project, hidden, batch.prompt_targets, wanted["any_prompt_logprobs"], mode)
        last_token = last_token.at[slots].set(sampled.token_ids, mode="drop")
        return last_token, count(sampler, rows, slots, sampled.token_ids), sampled, prompt


_SAMPLING_FLAGS = tuple(name for name in SamplingRows.__dataclass_fields__ if name.startswith("any_"))


def _newest(batch: Batch, last_token: jax.Array) -> jax.Array:
    """i32[T]: the tokens of a step, those in flight from where the step before has left them."""
    return jnp.where(batch.from_slot >= 0, last_token[jnp.maximum(batch.from_slot, 0)], batch.token_ids)


def _wanted(batch: Batch) -> dict[str, jax.Array]:
    """The batch's flags by name, i32[]: whether any row of any data rank needs that work."""
    flags = {name: getattr(batch.sampling, name) for name in _SAMPLING_FLAGS}
    flags["any_prompt_logprobs"] = batch.any_prompt_logprobs
    if batch.any_prompt_logprobs.ndim == 0:
        return flags
    return dict(zip(flags, jnp.stack(list(flags.values())).max(axis=1), strict=True))  # together: one message for all


class Programs:
    """The step for every bucket, not yet compiled.

    Args:
      function: what a step computes.
      layouts: one per token bucket, for each data rank.
      params, state: trees of arrays, or of shapes with shardings.
      num_decode_steps: most decode steps in one launch; with more than one there are further programs, see `multi_step.py`.

    Attributes:
      layouts: by token count, in rising order.
      function: see above.
      params, state: shapes, types and shardings.
    """

    def __init__(
        self,
        function: StepFunction,
        layouts: Sequence[PackLayout],
        params: Any,
        state: DeviceState,
        num_decode_steps: int = 1,
    ):
        self.layouts: Mapping[int, PackLayout] = {
            layout.num_tokens: layout for layout in sorted(layouts, key=lambda layout: layout.num_tokens)
        }
        self.params, self.state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (params, state)
        )
        self.function, self.num_decode_steps = function, num_decode_steps

    @property
    def everywhere(self) -> jax.sharding.Sharding:
        """Of what every device holds whole: what the host reads of a step."""
        return replicated(self.mesh)

    @property
    def mesh(self) -> Mesh:
        return self.function.attention.mesh

    @property
    def by_rank(self) -> jax.sharding.Sharding:
        """Of what a step is given: each data rank's devices hold its part."""
        return by_rank(self.mesh)

    @property
    def num_ranks(self) -> int:
        return num_data_ranks(self.mesh)

    @property
    def vocab_size(self) -> int:
        return int(self.state.sampler.counts.shape[1])

    def mask_shape(self, num_tokens: int) -> tuple[int, int]:
        """Of the masks of a bucket's step: rows of all data ranks, and words of 32 token ids."""
        return self.num_ranks * self.layouts[num_tokens].num_rows, -(-self.vocab_size // 32)

    def packed_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Of what `pack_ranks` writes for a bucket."""
        size = self.layouts[num_tokens].size
        return (size,) if self.num_ranks == 1 else (self.num_ranks, size)

    def lower(self, num_tokens: int) -> jax.stages.Lowered:
        """The step of a bucket, traced and ready to be compiled: (params, state, packed, masks) -> (state, sampled, prompt)."""
        step = jax.jit(
            named(partial(self.function, self.layouts[num_tokens]), f"step_{num_tokens}"),
            donate_argnums=(1,),
            # State stays where it lies, or the next step could not take it; samples go where the host can read them whole.
            out_shardings=(jax.tree.map(lambda x: x.sharding, self.state), self.everywhere, self.everywhere),
        )
        inputs = (self.packed_shape(num_tokens), jnp.int32), (self.mask_shape(num_tokens), jnp.uint32)
        return step.lower(
            self.params,
            self.state,
            *(jax.ShapeDtypeStruct(shape, dtype, sharding=self.by_rank) for shape, dtype in inputs),
        )

    def lower_fresh(self) -> jax.stages.Lowered:
        """A state of zeros: () -> state."""
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        return jax.jit(named(partial(_zeros, self.state), "fresh_state"), out_shardings=shardings).lower()

    def lower_no_masks(self) -> jax.stages.Lowered:
        """Masks of zeros by number of rows, which are read by no row: () -> masks."""
        rows = {rows: num_words for rows, num_words in map(self.mask_shape, self.layouts)}
        shapes = {one: jax.ShapeDtypeStruct((one, num_words), jnp.uint32) for one, num_words in rows.items()}
        return jax.jit(named(partial(_zeros, shapes), "no_masks"), out_shardings=self.by_rank).lower()

    @property
    def steps(self) -> list[Program]:
        """The step of every bucket, in rising order."""
        return [Program(step_name(size), partial(self.lower, size)) for size in self.layouts]

    @property
    def others(self) -> list[Program]:
        """What is run before the first step."""
        return [Program(FRESH_STATE, self.lower_fresh), Program(NO_MASKS, self.lower_no_masks)]


FRESH_STATE, NO_MASKS = "fresh state", "no masks"
"""Names of programs."""


def step_name(num_tokens: int) -> str:
    """The name of a bucket's program."""
    return f"step of {num_tokens} tokens"


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function under a name that compilers, caches and traces show."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
