"""Several decode steps in one launch: a loop around the step of a bucket, for rows that have one token each.

A row goes on until it has taken as many steps as the host gave it, or has sampled a token that ends its sequence. From then on it is a
sequence of one token on the padding page that remembers nothing, and the loop ends with the last row. The number of turns is no constant of
the program, so one per bucket serves every launch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.device.batch import Batch, pytree
from tpu_serve.layers.sampler import Sampled
from tpu_serve.runner.compilation import Program
from tpu_serve.runner.pack import Packer, PackLayout, forced_id
from tpu_serve.runner.programs import DeviceState, Programs, StepFunction, named
from tpu_serve.runner.slot_rows import NUM_ENDS
from tpu_serve.scheduler.page_pool import PADDING_PAGE
from tpu_serve.scheduler.prefixes import snapshot_end
from tpu_serve.scheduler.step import Scheduled


@pytree
@dataclass(frozen=True, slots=True)
class Turns:
    """What a loop needs besides the batch of its first step.

    Attributes:
      num_steps: i32[S], steps of each row; 0 for padding.
      snapshot_step: i32[S], step after which the row's recurrent state goes to its snapshot, if it has one.
      end_ids: i32[S, NUM_ENDS], tokens that end the row's sequence, -1 in unused entries.
      forced_ids: i32[S, N], token that is taken in each step whatever was drawn; -1 for none.
    """

    num_steps: jax.Array
    snapshot_step: jax.Array
    end_ids: jax.Array
    forced_ids: jax.Array


@dataclass(frozen=True, slots=True)
class LoopLayout:
    """Where a loop's fields lie in one flat array: those of its first step, then `Turns`.

    Attributes:
      step: of the first step.
      num_steps: N, most steps of a launch.
    """

    step: PackLayout
    num_steps: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every field of `Turns`, in the order in which they are packed."""
        rows = self.step.num_rows
        return {
            "num_steps": (rows,),
            "snapshot_step": (rows,),
            "end_ids": (rows, NUM_ENDS),
            "forced_ids": (rows, self.num_steps),
        }

    @property
    def size(self) -> int:
        return self.step.size + sum(math.prod(shape) for shape in self.shapes().values())

    def unpack(self, flat: jax.Array) -> tuple[Batch, Turns]:
        """The first step's batch and the rest, inside a compiled program."""
        values, offset = {}, self.step.size
        for name, shape in self.shapes().items():
            count = math.prod(shape)
            values[name] = jax.lax.slice(flat, (offset,), (offset + count,)).reshape(shape)
            offset += count
        return self.step.unpack(flat[: self.step.size]), Turns(**values)


def pack_loop(scheduled: tuple[Scheduled, ...], layout: LoopLayout, packer: Packer) -> np.ndarray:
    """The flat array of a launch of several steps, i32[layout.size]. There is one data rank."""
    first = packer.pack((scheduled,), layout.step)
    rest = np.full(layout.size - layout.step.size, -1, np.int32)
    fields, offset = {}, 0
    for name, shape in layout.shapes().items():
        count = math.prod(shape)
        fields[name] = rest[offset : offset + count].reshape(shape)
        offset += count
    fields["num_steps"][: len(scheduled)] = [item.num_steps for item in scheduled]
    fields["num_steps"][len(scheduled) :] = 0
    slots = [item.sequence.slot for item in scheduled]
    fields["end_ids"][: len(scheduled)] = packer.slots[0].end_ids[slots]
    for row, item in enumerate(scheduled):
        if item.snapshot >= 0:
            end = snapshot_end(item.start + item.num_steps, layout.step.page_size)
            fields["snapshot_step"][row] = end - item.start - 1
        request = item.sequence.request
        if request.forced_token_ids:
            place = item.start + 1 - item.sequence.num_prompt
            fields["forced_ids"][row] = [forced_id(request, place + step) for step in range(layout.num_steps)]
    return np.concatenate([first, rest])


def batch_of_step(
    batch: Batch, turns: Turns, layout: PackLayout, number: jax.Array, runs: jax.Array
) -> tuple[Batch, jax.Array]:
    """What the step `number` of a loop computes.

    Args:
      batch: of the first step.
      number: i32[], from 0.
      runs: bool[S], rows that still go on.

    Returns:
      The batch, and bool[T], tokens of rows that go on.
    """
    num_rows, padding = layout.num_rows, layout.num_tokens - layout.num_rows
    tokens_run = jnp.pad(runs, (0, padding))
    positions = jnp.where(tokens_run, batch.positions + number, 0)
    page, offset = jnp.divmod(positions[:num_rows], layout.page_size)
    pages = jnp.take_along_axis(
        batch.page_table, jnp.broadcast_to(page[None, :, None], (layout.num_tables, num_rows, 1)), axis=2
    )
    beside = PADDING_PAGE * layout.page_size + jnp.arange(num_rows, dtype=jnp.int32) % layout.page_size
    places = jnp.where(runs, pages[:, :, 0] * layout.page_size + offset, beside)
    state: dict[str, jax.Array] = {}
    if layout.num_snapshots is not None:
        is_kept = runs & (turns.snapshot_step == number)
        state["state_write"] = jnp.where(runs, batch.state_write, layout.num_state_rows)
        state["snapshot_write"] = jnp.where(is_kept, batch.snapshot_write, layout.num_state_rows)
    slots = jnp.where(runs, batch.slots, layout.num_slots)
    reads_slot = tokens_run & (number > 0)
    sampling = dataclasses.replace(
        batch.sampling,
        output_position=batch.sampling.output_position + number,
        forced_id=jax.lax.dynamic_index_in_dim(turns.forced_ids, number, axis=1, keepdims=False),
    )
    own = dataclasses.replace(
        batch,
        from_slot=jnp.where(reads_slot, jnp.pad(batch.slots, (0, padding)), jnp.where(number > 0, -1, batch.from_slot)),
        positions=positions,
        kv_index=jnp.concatenate([places, batch.kv_index[:, num_rows:]], axis=1),
        page_table=jnp.where(runs[None, :, None], batch.page_table, PADDING_PAGE),
        kv_lens=jnp.where(runs, batch.kv_lens + number, jnp.minimum(batch.kv_lens, 1)),
        slots=slots,
        sampling=sampling,
        **state,
    )
    return own, tokens_run


_Carry = tuple[jax.Array, jax.Array, DeviceState, Sampled]
"""Of a loop: the number of its next step, rows that go on, the state, and what has been found."""


@dataclass(frozen=True)
class LoopFunction:
    """What a launch of several steps computes, but for its bucket."""

    step: StepFunction

    def __call__(
        self, layout: LoopLayout, params: Any, state: DeviceState, packed: jax.Array, masks: jax.Array
    ) -> tuple[DeviceState, Sampled]:
        """Tokens in, tokens of several steps out.

        Args:
          layout: of `packed`, which `pack_loop` wrote.
          masks: what `pack_masks` wrote, or anything of that shape; the same in every step.

        Returns:
          The new state, and what each step's rows brought, with a leading axis for the N steps. What a row brings once it goes on no more means
          nothing.
        """
        first, turns = layout.unpack(packed)

        def step(number: jax.Array, runs: jax.Array, state: DeviceState) -> tuple[DeviceState, Sampled]:
            batch, is_read = batch_of_step(first, turns, layout.step, number, runs)
            state, sampled, _ = self.step.run(batch, params, state, masks, is_read)
            return state, sampled

        def goes_on(carry: _Carry) -> jax.Array:
            return carry[1].any()

        def turn(carry: _Carry) -> _Carry:
            number, runs, state, found = carry
            state, sampled = step(number, runs, state)
            found = jax.tree.map(lambda all, one: all.at[number].set(one), found, sampled)
            token_ids = sampled.token_ids
            has_ended = (token_ids < 0) | (token_ids[:, None] == turns.end_ids).any(axis=1)
            number += 1
            return number, runs & ~has_ended & (number < turns.num_steps), state, found

        number, runs = jnp.int32(0), turns.num_steps > 0
        _, one = jax.eval_shape(step, number, runs, state)
        found = jax.tree.map(lambda x: jnp.zeros((layout.num_steps, *x.shape), x.dtype), one)
        _, _, state, found = jax.lax.while_loop(goes_on, turn, (number, runs, state, found))
        return state, found


class Loops:
    """The loops around the steps of all buckets that decodes can need, none where a launch has one step.

    Attributes:
      layouts: by token count, in rising order.
    """

    def __init__(self, programs: Programs):
        self._programs, self._function = programs, LoopFunction(programs.function)
        self.layouts: Mapping[int, LoopLayout] = {
            size: LoopLayout(layout, programs.num_decode_steps) for size, layout in _decoding(programs).items()
        }

    @property
    def programs(self) -> list[Program]:
        """In rising order of buckets."""
        return [Program(loop_name(size), partial(self.lower, size)) for size in self.layouts]

    def lower(self, num_tokens: int) -> jax.stages.Lowered:
        """Traced and ready to be compiled: (params, state, packed, masks) -> (state, sampled)."""
        layout, programs = self.layouts[num_tokens], self._programs
        loop = jax.jit(
            named(partial(self._function, layout), f"steps_{layout.num_steps}_of_{num_tokens}"),
            donate_argnums=(1,),
            out_shardings=(jax.tree.map(lambda x: x.sharding, programs.state), programs.everywhere),
        )
        inputs = ((layout.size,), jnp.int32), (programs.mask_shape(num_tokens), jnp.uint32)
        return loop.lower(
            programs.params,
            programs.state,
            *(jax.ShapeDtypeStruct(shape, dtype, sharding=programs.by_rank) for shape, dtype in inputs),
        )


def loop_name(num_tokens: int) -> str:
    """The name of a bucket's program."""
    return f"decode steps of {num_tokens} tokens"


def _decoding(programs: Programs) -> dict[int, PackLayout]:
    """Buckets up to the one in which all sequences fit."""
    if programs.num_decode_steps == 1:
        return {}
    most = max(layout.num_rows for layout in programs.layouts.values())
    smaller = {size: layout for size, layout in programs.layouts.items() if layout.num_rows < most}
    last = min(size for size, layout in programs.layouts.items() if layout.num_rows == most)
    return {**smaller, last: programs.layouts[last]}
