"""A causal depthwise convolution over the sequences of a ragged batch.

Letters: T tokens, S sequence rows, C channels, W taps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def convolve(
    x: jax.Array, weight: jax.Array, tails: jax.Array, seq_of_token: jax.Array, cu_q_lens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`y[t] = sum_a weight[:, a] * x[t - (W - 1) + a]` within each sequence, before any activation.

    Rows may come in any order; those with a single token are cheap when they come first, as they do in a `Batch`.

    Args:
      x: [T, C], the tokens of all sequences one after another.
      weight: [C, W], the last tap belongs to the token itself.
      tails: [S, W - 1, C] of x's type, the inputs that came before this step, zeros before a sequence's first token.
      seq_of_token: i32[T], row in S, -1 for padding. What padding holds in x does not matter.
      cu_q_lens: i32[S + 1], where each row's tokens start in T.

    Returns:
      [T, C] of x's type, summed in float32 and rounded once, 0 at padding; and the tails after this step, unchanged where a row has no
      tokens. How a sequence is cut into steps changes neither.
    """
    num_tokens, reach = len(x), weight.shape[1] - 1
    taps = weight.astype(jnp.float32).T
    num_rows = min(len(tails), num_tokens)
    lengths = jnp.diff(cu_q_lens)

    # A sequence's first tokens get wrong neighbours here, and are overwritten below.
    padded = jnp.pad(x, ((reach, reach), (0, 0)))
    out = _sum_taps(padded[: num_tokens + reach], taps)

    # Row i of the leading single tokens is token i.
    single = (lengths[:num_rows] == 1) & (seq_of_token[:num_rows] == jnp.arange(num_rows))
    inputs = jnp.concatenate([tails[:num_rows], x[:num_rows, None]], axis=1)
    alone = jax.vmap(_sum_taps, in_axes=(0, None))(inputs, taps)[:, 0]
    out = _replace(out, jnp.where(single[:, None], alone, out[:num_rows]), 0)
    out = jnp.where(seq_of_token[:, None] >= 0, out, 0)
    new_tails = _replace(tails, jnp.where(single[:, None, None], inputs[:, 1:], tails[:num_rows]), 0)

    # In float32 while it goes on: on CPUs, an update of a slice of bfloat16 converts the whole array.
    def begin_row(row: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, new_tails = carry
        start, length = cu_q_lens[row], lengths[row]
        first = jax.lax.dynamic_slice_in_dim(padded, start + reach, reach)
        inputs = jnp.concatenate([tails[row], first])
        own = (jnp.arange(reach) < length)[:, None]
        held = jax.lax.dynamic_slice_in_dim(out, start, reach)
        out = _replace(out, jnp.where(own, _sum_taps(inputs, taps), held), start)
        last = jax.lax.dynamic_slice_in_dim(padded, start + length, reach)
        tail = jnp.where(length < reach, jax.lax.dynamic_slice_in_dim(inputs, length, reach), last)
        return out, _replace(new_tails, tail[None].astype(jnp.float32), row)

    num_leading = jnp.cumprod(single.astype(jnp.int32)).sum()
    num_used = (cu_q_lens[:-1] < cu_q_lens[-1]).sum()
    out = jnp.pad(out, ((0, reach), (0, 0)))  # a slice never ends behind it, where it would be moved
    out, wide_tails = jax.lax.fori_loop(num_leading, num_used, begin_row, (out, new_tails.astype(jnp.float32)))
    return out[:num_tokens].astype(x.dtype), wide_tails.astype(x.dtype)


def _replace(whole: jax.Array, part: jax.Array, start: jax.Array | int) -> jax.Array:
    """`whole` with `part` along its first axis from `start`."""
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)


def _sum_taps(inputs: jax.Array, taps: jax.Array) -> jax.Array:
    """f32[L - (W - 1), C]: what taps f32[W, C] make of inputs [L, C]."""
    num_out = len(inputs) - len(taps) + 1
    total = sum(inputs[i : i + num_out].astype(jnp.float32) * taps[i] for i in range(len(taps)))
    return jnp.asarray(total)
