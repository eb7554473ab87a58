"""Many tokens of a row at once: the triangular system of a chunk, on the matrix unit. Formulas as in `README.md`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_serve.kernels.gated_delta_rule.problem import Config, Problem
from tpu_serve.kernels.gated_delta_rule.products import product, sums
from tpu_serve.kernels.gated_delta_rule.single import GONE, NORM_EPSILON
from tpu_serve.kernels.gated_delta_rule.steps import Steps, in_turn
from tpu_serve.kernels.gated_delta_rule.triangle import inverse, iota, on_diagonal

F32, BF16 = jnp.float32, jnp.bfloat16
PAIR = 2
"""Value heads that lie side by side: their matrices [C, C] fill the lanes of a register."""


class Tokens(NamedTuple):
    """Of one item, in VMEM. Attributes: queries, keys [C, heads * Dk] and values [C, heads * Dv]; log_decay and strength f32[C, value heads]."""

    queries: Any
    keys: Any
    values: Any
    log_decay: Any
    strength: Any


class Shared(NamedTuple):
    """What the value heads of a key head share.

    Attributes:
      keys: [C, Dk] as they came, exact in the type that is multiplied. both: [2 C, Dk], queries below them.
      overlaps, answers: [C, C], products of keys and of queries with the keys.
      key_norm, key_scale, query_scale: [C, 1].
    """

    keys: jax.Array
    both: jax.Array
    overlaps: jax.Array
    answers: jax.Array
    key_norm: jax.Array
    key_scale: jax.Array
    query_scale: jax.Array


def advance(
    problem: Problem, config: Config, tokens: Tokens, first: Any, stop: Any, state: Any, out: Any, keep: Any
) -> None:
    """Lets the tokens from `first` to `stop` of a chunk update a row's state, and answers them.

    Args:
      tokens: the whole chunk; what the others hold does not matter.
      state: [value heads, Dk, Dv] in VMEM, updated in place.
      out: [C, heads * Dv]; other rows keep what they have where `keep`, and are anything otherwise.
    """
    place = iota((config.chunk, 1), 0)
    own = (place >= first) & (place < stop)
    log_decay = jnp.where(own, jnp.maximum(tokens.log_decay[...], GONE), 0.0)
    strength = jnp.where(own, tokens.strength[...], 0.0)
    width, pairs, steps = problem.value_dim, [], []
    for key_head in range(config.key_heads):
        shared = _share(problem, tokens, own, key_head)
        heads = range(key_head * problem.group, (key_head + 1) * problem.group)
        for start in heads[::PAIR]:
            pair = range(start, min(start + PAIR, heads.stop))
            values = jnp.where(own, tokens.values[:, start * width : pair.stop * width].astype(F32), 0.0)
            gates = [(log_decay[:, one : one + 1], strength[:, one : one + 1]) for one in pair]
            states = jnp.concatenate([state[one] for one in pair], axis=1)
            pairs.append(pair)
            steps.append(_pair(problem, shared, values, gates, states))
    for pair, (answers, states) in zip(pairs, in_turn(steps), strict=True):
        for index, one in enumerate(pair):
            state[one] = states[:, index * width : (index + 1) * width]
        lanes = slice(pair.start * width, pair.stop * width)
        out[:, lanes] = jnp.where(own | jnp.logical_not(keep), answers, out[:, lanes].astype(F32)).astype(out.dtype)


def _share(problem: Problem, tokens: Tokens, own: jax.Array, key_head: int) -> Shared:
    lanes = slice(key_head * problem.key_dim, (key_head + 1) * problem.key_dim)
    keys, queries = (jnp.where(own, part[:, lanes].astype(F32), 0.0) for part in (tokens.keys, tokens.queries))
    size, exact = len(keys), problem.dtype == "float32"
    squares = jnp.sum(keys * keys, axis=1, keepdims=True) + NORM_EPSILON
    query_scale = jax.lax.rsqrt(jnp.sum(queries * queries, axis=1, keepdims=True) + NORM_EPSILON)
    both = jnp.concatenate([keys, queries], axis=0)
    both = both if exact else both.astype(BF16)  # what came in bfloat16 is exact in it
    overlaps = product(both, both[:size], exact, (1, 1))
    scale = jax.lax.rsqrt(squares)
    return Shared(
        both[:size],
        both,
        overlaps[:size],
        overlaps[size:],
        squares * scale,
        scale,
        query_scale * problem.key_dim**-0.5,
    )


def _pair(
    problem: Problem, shared: Shared, values: jax.Array, gates: list[tuple[jax.Array, jax.Array]], states: jax.Array
) -> Steps[tuple[jax.Array, jax.Array]]:
    """Answers [C, heads * Dv] and new states [Dk, heads * Dv] of value heads side by side.

    Args:
      values: [C, heads * Dv].
      gates: of each head log-decays and strengths, f32[C, 1].
      states: [Dk, heads * Dv].
    """
    size, count, width = len(values), len(gates), problem.value_dim
    exact = problem.dtype == "float32"
    log_decays = [log_decay for log_decay, _ in gates]
    pulls = [strength * shared.key_scale * shared.key_scale for _, strength in gates]

    # Sums over just the tokens between: a difference of two running sums would lose a small decay behind a large one.
    row, column = iota((size, count * size), 0), iota((size, count * size), 1) & (size - 1)
    place, other = iota((size, size), 0), iota((size, size), 1)
    logs = sums(place >= other, jnp.where(row > column, _side_by_side(log_decays, size), 0.0))
    decays = jnp.where(row >= column, jnp.exp(logs), 0.0)
    spread = _side_by_side(log_decays, width)
    since_start, until_end = jnp.exp(sums(place >= other, spread)), jnp.exp(sums(place < other, spread))
    pull_of_column = jnp.sum(jnp.where(row == column, _side_by_side(pulls, size), 0.0), axis=0, keepdims=True)
    weights = decays * pull_of_column

    yield
    reads = product(shared.both, states, exact)
    yield
    wanted = values * shared.key_norm - since_start * reads[:size]
    earlier = jnp.where(row > column, _repeated(shared.overlaps, count) * weights, 0.0)
    inverted = yield from inverse(earlier, exact)
    solved = product(inverted, on_diagonal(wanted, count), exact)
    yield
    answers = product(_repeated(shared.answers, count) * weights, on_diagonal(solved, count), exact)
    answers = shared.query_scale * (since_start * reads[size:] + answers)
    yield
    growth = product(shared.keys, until_end * _side_by_side(pulls, width) * solved, exact, (0, 0))
    return answers, since_start[size - 1 :] * states + growth


def _side_by_side(columns: list[jax.Array], width: int) -> jax.Array:
    """[C, heads * width], in which each head's column [C, 1] is repeated."""
    return jnp.concatenate([jnp.broadcast_to(column, (len(column), width)) for column in columns], axis=1)


def _repeated(matrix: jax.Array, count: int) -> jax.Array:
    return jnp.concatenate([matrix] * count, axis=1)
