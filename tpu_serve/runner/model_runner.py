"""Where sequences become arrays: compiles one program per token bucket, launches steps and collects what they sampled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.device.batch import pytree
from tpu_serve.layers.mixing import PagedMixing
from tpu_serve.layers.sampler import Sampled, sample
from tpu_serve.models.base import Experts, Model
from tpu_serve.request import TokenLogprobs
from tpu_serve.runner.buckets import pick
from tpu_serve.runner.compile_counter import num_compiled
from tpu_serve.runner.pack import PackLayout, pack
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
    """

    caches: list[Any]
    last_token: jax.Array


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step under way on the device."""

    output: SchedulerOutput
    sampled: Sampled


def model_step(
    model: Model,
    experts: Experts,
    layout: PackLayout,
    windows: tuple[int | None, ...],
    allowed: Allowed,
    params: Any,
    state: DeviceState,
    packed: jax.Array,
) -> tuple[DeviceState, Sampled]:
    """One whole step: tokens in, tokens out. The first five arguments are static; `packed` is what `pack` wrote."""
    batch = layout.unpack(packed)
    in_flight = batch.from_slot >= 0
    token_ids = jnp.where(in_flight, state.last_token[jnp.maximum(batch.from_slot, 0)], batch.token_ids)
    mixing = PagedMixing(batch, windows)
    hidden, caches = model.forward(
        params, token_ids, batch.positions, batch.seq_of_token >= 0, state.caches, mixing, experts
    )
    logits = model.logits(params, hidden[batch.sample_at])
    sampled = sample(logits, batch.sampling, allowed.num_valid_ids, allowed.suppressed_ids)
    last_token = state.last_token.at[batch.slots].set(sampled.token_ids, mode="drop")
    return DeviceState(caches, last_token), sampled


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
    ):
        self.params, self._state = params, state
        self._state_shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state
        )
        everywhere = state.last_token.sharding
        self._layouts = {layout.num_tokens: layout for layout in layouts}
        self._buckets = sorted(self._layouts)
        self._programs: dict[int, Any] = {}
        self._step = {
            size: jax.jit(
                lambda params, state, packed, layout=layout: model_step(
                    model, experts, layout, windows, allowed, params, state, packed
                ),
                donate_argnums=(1,),
                # State stays where it lies, or the next step could not take it; samples go where the host can read them whole.
                out_shardings=(jax.tree.map(lambda x: x.sharding, self._state), everywhere),
            )
            for size, layout in self._layouts.items()
        }

    @property
    def compile_count(self) -> int:
        """Programs compiled in this process so far; constant once `compile` has returned."""
        return num_compiled()

    def compile(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every bucket's program, several at a time, and runs each once on padding."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (self.params, self._state)
        )

        def build(size: int) -> Any:
            everywhere = self._state_shapes.last_token.sharding
            packed = jax.ShapeDtypeStruct((self._layouts[size].size,), jnp.int32, sharding=everywhere)
            return self._step[size].lower(*shapes, packed).compile()

        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            for done, (size, program) in enumerate(zip(self._buckets, pool.map(build, self._buckets), strict=True)):
                self._programs[size] = program
                on_progress(done + 1, len(self._buckets))
        for size in self._buckets:  # the first call of a program loads it and sets up its transfers
            self._state, sampled = self._programs[size](self.params, self._state, pack((), self._layouts[size]))
            jax.block_until_ready(sampled)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Starts a step and returns at once.

        Raises:
          KeyError: `compile` has not run.
        """
        size = pick(self._buckets, output.num_tokens)
        packed = pack(output.scheduled, self._layouts[size])
        self._state, sampled = self._programs[size](self.params, self._state, packed)
        return LaunchedStep(output, sampled)

    def reset(self) -> None:
        """Can launch again after a launch that was cut short: state that it consumed without a successor is replaced by zeros."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            self._state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._state_shapes)

    def collect(self, ticket: LaunchedStep) -> list[SampledToken | None]:
        """Waits for a step; one entry per scheduled row, None where nothing was sampled."""
        scheduled, sampled = ticket.output.scheduled, ticket.sampled
        token_ids = np.asarray(sampled.token_ids).tolist()
        wanted = [item.sequence.request.params.logprobs if item.samples else None for item in scheduled]
        if any(count is not None for count in wanted):
            own, top_ids, top = (
                np.asarray(part).tolist() for part in (sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
            )
        results: list[SampledToken | None] = []
        for row, (item, count) in enumerate(zip(scheduled, wanted, strict=True)):
            if not item.samples:
                results.append(None)
            elif count is None:
                results.append(SampledToken(token_ids[row]))
            else:
                best = tuple(zip(top_ids[row][:count], top[row][:count], strict=True))
                results.append(SampledToken(token_ids[row], TokenLogprobs(token_ids[row], own[row], best)))
        return results
