"""Rows with a single token: each state passes through VMEM once and is written back to where it lies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.gated_delta_rule.problem import LANES, SUBLANES, Config, Problem
from tpu_serve.kernels.gated_delta_rule.states import States
from tpu_serve.kernels.gated_delta_rule.steps import Steps, in_turn

F32 = jnp.float32
NORM_EPSILON = 1e-6
GONE = -128.0
"""The exponential of less is 0 in float32 anyway."""

STRIP = 16
"""Tokens that are converted at a time: a register of 16-bit values."""


def run(problem: Problem, config: Config, num_rows: Any, states: States, refs: Any, out: Any, scratch: Any) -> None:
    """Lets token i update row i, for i below `num_rows`.

    Args:
      refs: queries, keys, values, log-decay and strength of a block of heads, in VMEM.
      out: f32[num_single, heads * Dv] in VMEM; rows behind `num_rows` are left as they are.
    """
    size, groups = config.rows, config.slots // config.rows
    num_batches = jax.lax.div(num_rows + (size - 1), size)

    def each(batch: Any, what: Callable[[Any, Any], None]) -> None:
        """Does something with the rows of a batch and their slots."""
        first = jax.lax.rem(batch, groups) * size
        for index in range(size):
            row = batch * size + index
            pl.when(row < num_rows)(functools.partial(what, row, first + index))

    each(0, states.load)
    _convert(problem, refs[:3], scratch)

    def update(batch: Any, _: None) -> None:
        pl.when(batch >= groups - 1)(lambda: each(batch - (groups - 1), states.wait_stored))
        each(batch + 1, states.load)
        each(batch, states.wait_loaded)
        first = jax.lax.rem(batch, groups) * size
        # Those behind the last row compute with what lies in their slots, and nobody sees what.
        in_turn(
            [
                _token(problem, config, batch * size + index, states.held(first + index), refs[3:], out, scratch)
                for index in range(size)
            ]
        )
        each(batch, states.store)

    jax.lax.fori_loop(0, num_batches, update, None)
    for behind in range(groups - 1):
        batch = num_batches - (groups - 1) + behind
        pl.when(batch >= 0)(functools.partial(each, batch, states.wait_stored))


def _convert(problem: Problem, refs: Any, scratch: Any) -> None:
    """To float32, in which a row can be picked."""
    wide = scratch["queries"], scratch["keys"], scratch["values"]
    num_strips, rest = divmod(problem.num_single, STRIP)

    def strip(index: Any, _: None) -> None:
        rows = pl.ds(pl.multiple_of(index * STRIP, STRIP), STRIP)
        for source, target in zip(refs, wide, strict=True):
            target[rows] = source[rows].astype(F32)

    jax.lax.fori_loop(0, num_strips, strip, None)
    if rest:
        rows = pl.ds(num_strips * STRIP, rest)
        for source, target in zip(refs, wide, strict=True):
            target[rows] = source[rows].astype(F32)


def _token(problem: Problem, config: Config, row: Any, state: Any, gates: Any, out: Any, scratch: Any) -> Steps[None]:
    heads, group, size = config.key_heads, problem.group, problem.key_dim
    place = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
    both = jnp.zeros((SUBLANES, LANES), F32)
    for index in range(2 * heads):
        name, head = ("keys", index) if index < heads else ("queries", index - heads)
        both = jnp.where(place == index, _pick(scratch[name], row, slice(head * size, (head + 1) * size)), both)
    both = both * jax.lax.rsqrt(jnp.sum(both * both, axis=1, keepdims=True) + NORM_EPSILON)
    both = jnp.where(place < heads, both, both * size**-0.5)
    columns = both.T  # [Dk, 8]
    decays = jnp.exp(jnp.maximum(_pick(gates[0], row), GONE))
    strengths = _pick(gates[1], row)
    tile, of_tile = _tile_of(row)
    yield
    for key_head in range(heads):
        overlap = jnp.sum(both[key_head : key_head + 1] * both[heads + key_head : heads + key_head + 1], axis=1)[
            :, None
        ]
        key = jnp.broadcast_to(columns[:, key_head : key_head + 1], (size, LANES))
        query = jnp.broadcast_to(columns[:, heads + key_head : heads + key_head + 1], (size, LANES))
        for head in range(key_head * group, (key_head + 1) * group):
            held, decay = state[head], decays[:, head : head + 1]
            lanes = slice(head * problem.value_dim, (head + 1) * problem.value_dim)
            value = _pick(scratch["values"], row, lanes)
            # Both products read the state as it was, so that one pass over it is enough.
            known = decay * jnp.sum(held * key, axis=0, keepdims=True)
            answer = decay * jnp.sum(held * query, axis=0, keepdims=True)
            correction = strengths[:, head : head + 1] * (value - known)
            state[head] = decay * held + key * correction
            out[tile, lanes] = jnp.where(place == of_tile, answer + overlap * correction, out[tile, lanes])
            yield


def _tile_of(row: Any) -> tuple[Any, Any]:
    """The rows of the register that holds `row`, and its place among them."""
    of_tile = row & (SUBLANES - 1)
    return pl.ds(pl.multiple_of(row - of_tile, SUBLANES), SUBLANES), of_tile


def _pick(ref: Any, row: Any, lanes: slice = slice(None)) -> jax.Array:
    """[1, lanes]: a row of a float32 array [rows, lanes]. Only whole registers can be loaded from anywhere."""
    tile, of_tile = _tile_of(row)
    return pltpu.roll(ref[tile, lanes], SUBLANES - of_tile, 0)[:1]
