"""Where sequences become arrays: compiles one program per token bucket, launches steps and collects what they sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.device.batch import pytree
from tpu_serve.device.sampler_state import SamplerState
from tpu_serve.layers.logit_edits import count, edit, restrict
from tpu_serve.layers.logprobs import Logprobs, prompt_logprobs
from tpu_serve.layers.mixing import PagedMixing
from tpu_serve.layers.sampler import Sampled, sample
from tpu_serve.models.base import Experts, Model
from tpu_serve.runner.buckets import pick
from tpu_serve.runner.collect import collect
from tpu_serve.runner.compile_counter import num_compiled
from tpu_serve.runner.pack import PackLayout, pack, pack_masks
from tpu_serve.runner.slot_writer import SlotWriter
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput

COMPILE_THREADS = 4
"""XLA spends part of a compilation in one thread, so a few at a time keep even two cores busy."""


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


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step under way on the device."""

    output: SchedulerOutput
    sampled: Sampled
    prompt: Logprobs


def model_step(
    model: Model,
    experts: Experts,
    layout: PackLayout,
    windows: tuple[int | None, ...],
    allowed: Allowed,
    logprobs_mode: str,
    params: Any,
    state: DeviceState,
    packed: jax.Array,
    masks: jax.Array,
) -> tuple[DeviceState, Sampled, Logprobs]:
    """One whole step: tokens in, tokens out, and log-probabilities of a prompt's tokens.

    The first six arguments are static; `packed` is what `pack` wrote, `masks` what `pack_masks` did, or anything of that shape.
    """
    batch = layout.unpack(packed)
    rows, slots = batch.sampling, batch.slots
    in_flight = batch.from_slot >= 0
    token_ids = jnp.where(in_flight, state.last_token[jnp.maximum(batch.from_slot, 0)], batch.token_ids)
    mixing = PagedMixing(batch, windows)
    hidden, caches = model.forward(
        params, token_ids, batch.positions, batch.seq_of_token >= 0, state.caches, mixing, experts
    )
    logits = model.logits(params, hidden[batch.sample_at])
    edited = edit(restrict(logits, allowed.num_valid_ids, allowed.suppressed_ids), rows, slots, masks, state.sampler)
    sampled = sample(logits, edited, rows, logprobs_mode)
    prompt = prompt_logprobs(
        lambda piece: model.logits(params, piece), hidden, batch.prompt_targets, batch.any_prompt_logprobs,
        logprobs_mode,
    )  # fmt: skip
    last_token = state.last_token.at[slots].set(sampled.token_ids, mode="drop")
    sampler = count(state.sampler, rows, slots, sampled.token_ids)
    return DeviceState(caches, last_token, sampler), sampled, prompt


class ModelRunner:
    """Runs planned steps on the device.

    Args:
      model: sizes and functions.
      params: weights on the device.
      state: fresh device state; owned by the runner from now on. Where several devices share the work, each holds all of `last_token`.
      experts: the mixture-of-experts backend.
      layouts: one per token bucket, in rising order.
      windows: of the model's attention layers, in the order of the batch's page tables.
      allowed: which token ids may be sampled.
      logprobs_mode: what log-probabilities are of, one of `LOGPROBS_MODES`.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        state: DeviceState,
        experts: Experts,
        layouts: list[PackLayout],
        windows: tuple[int | None, ...],
        allowed: Allowed,
        logprobs_mode: str = "raw_logprobs",
    ):
        self.params, self._state = params, state
        self._state_shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state
        )
        everywhere = state.last_token.sharding
        self._layouts = {layout.num_tokens: layout for layout in layouts}
        self._buckets = sorted(self._layouts)
        self._vocab_size = state.sampler.counts.shape[1]
        self._slot_writer = SlotWriter(state.sampler)
        self._programs: dict[int, Any] = {}
        self._no_masks: dict[int, jax.Array] = {}
        self._step = {
            size: jax.jit(
                lambda params, state, packed, masks, layout=layout: model_step(
                    model, experts, layout, windows, allowed, logprobs_mode, params, state, packed, masks
                ),
                donate_argnums=(1,),
                # State stays where it lies, or the next step could not take it; samples go where the host can read them whole.
                out_shardings=(jax.tree.map(lambda x: x.sharding, self._state), everywhere, everywhere),
            )
            for size, layout in self._layouts.items()
        }

    @property
    def compile_count(self) -> int:
        """Programs compiled in this process so far; constant once `compile` has returned."""
        return num_compiled()

    def compile(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every bucket's program, several at a time, and runs each once on padding."""
        everywhere = self._state_shapes.last_token.sharding
        num_words = -(-self._vocab_size // 32)
        # Read by no row: it stands for masks where nobody has one, and need not be sent to the device.
        self._no_masks = {
            rows: jnp.zeros((rows, num_words), jnp.uint32, device=everywhere)
            for rows in {layout.num_rows for layout in self._layouts.values()}
        }
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (self.params, self._state)
        )

        def build(size: int) -> Any:
            layout = self._layouts[size]
            inputs = (((layout.size,), jnp.int32), ((layout.num_rows, num_words), jnp.uint32))
            return (
                self._step[size]
                .lower(*shapes, *(jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in inputs))
                .compile()
            )

        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            for done, (size, program) in enumerate(zip(self._buckets, pool.map(build, self._buckets), strict=True)):
                self._programs[size] = program
                on_progress(done + 1, len(self._buckets))
        self._state = dataclasses.replace(self._state, sampler=self._slot_writer.compile(self._state.sampler))
        for size in self._buckets:  # the first call of a program loads it and sets up its transfers
            layout = self._layouts[size]
            for masks in (self._no_masks[layout.num_rows], np.zeros((layout.num_rows, num_words), np.uint32)):
                self._state, *sampled = self._programs[size](self.params, self._state, pack((), layout), masks)
            jax.block_until_ready(sampled)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Starts a step and returns at once.

        Raises:
          KeyError: `compile` has not run.
        """
        scheduled, size = output.scheduled, pick(self._buckets, output.num_tokens)
        layout = self._layouts[size]
        masks = pack_masks(scheduled, layout.num_rows, self._vocab_size)
        sampler = self._slot_writer.write(self._state.sampler, scheduled)
        self._state = dataclasses.replace(self._state, sampler=sampler)
        self._state, sampled, prompt = self._programs[size](
            self.params, self._state, pack(scheduled, layout),
            self._no_masks[layout.num_rows] if masks is None else masks,
        )  # fmt: skip
        return LaunchedStep(output, sampled, prompt)

    def reset(self) -> None:
        """Can launch again after a launch that was cut short: state that it consumed without a successor is replaced by zeros."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            self._state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._state_shapes)

    def collect(self, ticket: LaunchedStep) -> list[SampledToken | None]:
        """Waits for a step; one entry per scheduled row, None where it brought nothing."""
        return collect(ticket.output.scheduled, ticket.sampled, ticket.prompt)
