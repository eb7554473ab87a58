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
from tpu_serve.layers.logprobs import Logprobs
from tpu_serve.request import NOT_A_NUMBER_ID, NOTHING_ALLOWED_ID


@pytree
@dataclass(frozen=True, slots=True)
class Sampled:
    """What each row sampled.

    Attributes:
      token_ids: i32[S]; `NOT_A_NUMBER_ID` where the logits hold a NaN, `NOTHING_ALLOWED_ID` where every token is forbidden.
      logprobs: of S rows.
    """

    token_ids: jax.Array
    logprobs: Logprobs


@jax.named_scope("sampler")
def sample(logits: jax.Array, edited: jax.Array, rows: SamplingRows, mode: str = "raw_logprobs") -> Sampled:
    """Samples one token per row.

    Args:
      logits: f32[S, V], as the model gave them.
      edited: f32[S, V], as the row's request wants them; minus infinity for forbidden tokens.
      rows: parameters of each row.
      mode: what log-probabilities are of, one of `LOGPROBS_MODES`.
    """
    greedy = jnp.argmax(edited, axis=-1).astype(jnp.int32)
    is_forbidden = jnp.isneginf(edited.max(axis=-1))
    is_processed = mode.startswith("processed")

    def draw() -> tuple[jax.Array, ...]:
        # Greedy rows have neutral filters, so they are what they were.
        scaled = edited / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        final = jax.lax.cond(rows.any_filter > 0, lambda: _filter(scaled, rows), lambda: scaled)
        drawn = jnp.argmax(final + _noise(rows, logits.shape[1]), axis=-1).astype(jnp.int32)
        token_ids = jnp.where(rows.temperature > 0, drawn, greedy)
        return (token_ids, final) if is_processed else (token_ids,)

    token_ids, *final = jax.lax.cond(rows.any_random > 0, draw, lambda: (greedy, edited) if is_processed else (greedy,))
    token_ids = jnp.where(is_forbidden, NOTHING_ALLOWED_ID, token_ids)
    token_ids = jnp.where(rows.forced_id >= 0, rows.forced_id, token_ids)
    token_ids = jnp.where(jnp.isnan(logits).any(axis=-1), NOT_A_NUMBER_ID, token_ids)
    reported = final[0] if is_processed else logits
    logprobs = jax.lax.cond(
        rows.any_logprobs > 0,
        lambda: Logprobs.of(reported, token_ids, mode),
        lambda: Logprobs.nothing(*reported.shape),
    )
    return Sampled(token_ids, logprobs)


def _noise(rows: SamplingRows, vocab_size: int) -> jax.Array:
    """f32[S, V] for the Gumbel-max trick; it depends on seed, choice and position in the answer only."""

    def noise(low: jax.Array, high: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(jnp.stack([high, low]), jnp.uint32)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        # One number for both, as every fold is a program of its own to compile: fewer than 2**24 positions, fewer than 2**8 choices.
        return jax.random.gumbel(jax.random.fold_in(key, (choice << 24) + position), (vocab_size,), jnp.float32)

    return jax.vmap(noise)(rows.seed_low, rows.seed_high, rows.choice, rows.output_position)


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
    # A top_p that float32 takes for zero would be reached by no token at all.
    needed = jnp.maximum(rows.top_p, jnp.finfo(jnp.float32).tiny) * weights.sum(axis=-1)
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
