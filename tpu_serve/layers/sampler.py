"""From logits to the next token of every row, in one program whatever the rows ask for.

Order of the filters: temperature, min_p, top_k, top_p (over what is left). Work that no row of the batch needs is skipped at run time, never by
compiling another program. Letters: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import SamplingRows, pytree
from tpu_serve.request import MAX_LOGPROBS


@pytree
@dataclass(frozen=True, slots=True)
class Sampled:
    """What each row sampled. The log-probability fields hold zeros when no row of the batch asked for them.

    Attributes:
      token_ids: i32[S], -1 where the logits hold a NaN.
      logprobs: f32[S], of the sampled token in the raw distribution.
      top_ids, top_logprobs: i32[S, 20] and f32[S, 20], most probable tokens of the raw distribution (fewer for a tiny vocabulary).
    """

    token_ids: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(logits: jax.Array, rows: SamplingRows, num_valid: int, suppressed: tuple[int, ...] = ()) -> Sampled:
    """Samples one token per row.

    Args:
      logits: f32[S, V].
      rows: parameters of each row.
      num_valid: ids from here on do not exist in the tokenizer and are never sampled.
      suppressed: ids that are never sampled either.
    """
    allowed = jnp.where(jnp.arange(logits.shape[1]) < num_valid, logits, -jnp.inf)
    if suppressed:
        allowed = allowed.at[:, jnp.array(suppressed)].set(-jnp.inf, mode="drop")
    greedy = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    token_ids = jax.lax.cond(
        rows.any_random > 0, lambda: jnp.where(rows.temperature > 0, _draw(allowed, rows), greedy), lambda: greedy
    )
    token_ids = jnp.where(jnp.isnan(logits).any(axis=-1), -1, token_ids)
    count = min(MAX_LOGPROBS, logits.shape[1])

    def report() -> tuple[jax.Array, jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        top, ids = jax.lax.top_k(logprobs, count)
        return jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)[:, 0], ids.astype(jnp.int32), top

    def nothing() -> tuple[jax.Array, jax.Array, jax.Array]:
        size = len(logits)
        return jnp.zeros(size, jnp.float32), jnp.zeros((size, count), jnp.int32), jnp.zeros((size, count), jnp.float32)

    return Sampled(token_ids, *jax.lax.cond(rows.any_logprobs > 0, report, nothing))


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """A random token per row by the Gumbel-max trick; the noise depends on seed, choice and position in the answer only."""
    scaled = logits / jnp.maximum(rows.temperature, 1e-5)[:, None]
    scaled = jax.lax.cond(rows.any_filter > 0, lambda: _filter(scaled, rows), lambda: scaled)

    def noise(low: jax.Array, high: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(jnp.stack([high, low]), jnp.uint32)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        # One number for both, as every fold is a program of its own to compile: fewer than 2**24 positions, fewer than 2**8 choices.
        return jax.random.gumbel(jax.random.fold_in(key, (choice << 24) + position), logits.shape[1:], jnp.float32)

    gumbel = jax.vmap(noise)(rows.seed_low, rows.seed_high, rows.choice, rows.output_position)
    return jnp.argmax(scaled + gumbel, axis=-1).astype(jnp.int32)


def _filter(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """Scaled logits with everything outside min_p, top_k and top_p at minus infinity. Tokens that tie with the last one kept are kept."""
    highest = scaled.max(axis=-1, keepdims=True)
    # p >= min_p * p_max is the same as logit >= max + log(min_p).
    scaled = jnp.where(scaled >= highest + jnp.log(rows.min_p)[:, None], scaled, -jnp.inf)
    keys = _ordered(scaled)
    vocabulary = scaled.shape[1]
    limit = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocabulary), vocabulary)
    kth = _largest_key(keys, lambda kept: jnp.sum(kept, axis=-1) >= limit)
    scaled = jnp.where(keys >= kth[:, None], scaled, -jnp.inf)
    weights = jnp.exp(scaled - highest)
    needed = rows.top_p * weights.sum(axis=-1)
    nucleus = _largest_key(keys, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= needed)
    return jnp.where((keys >= nucleus[:, None]) | (rows.top_p >= 1)[:, None], scaled, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Unsigned integers in the same order as these float32 values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _largest_key(keys: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Per row, the largest key t for which the set `keys >= t` is still enough: 32 counting passes instead of a sort."""

    def body(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(keys >= candidate[:, None]), candidate, found)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(len(keys), jnp.uint32))
