"""The gated delta rule over the sequences of a ragged batch.

A head's state is a matrix M [Dk, Dv] that maps keys to values. A token lets it fade and corrects what it answers to the token's key:

    M <- exp(g) * M;    M <- M + k (beta * (v - M^T k))^T;    out = M^T q

Sequences with one token do just that. Longer ones go in chunks, where the corrections u_i of C tokens are the solution of a triangular
system (Yang et al., "Gated Delta Networks", 2024): with G_ij the decay between tokens j and i, G_i that since the chunk's start,

    u_i + beta_i * sum_{j < i} G_ij (k_i . k_j) u_j = beta_i * (v_i - G_i M^T k_i)
    out_i = G_i M^T q_i + sum_{j <= i} G_ij (q_i . k_j) u_j
    M <- G_C M + sum_j G_Cj k_j u_j^T

Letters: T tokens, S sequence rows, Hk key heads, Hv value heads, Dk and Dv their sizes, C tokens of a chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 64
ROW_BLOCK = 16
"""Rows with a single token that one inner step updates: few enough to skip most of a bucket's unused rows."""
NORM_EPSILON = 1e-6
GONE = -128.0
"""The exponential of less is 0 in float32 anyway, and sums stay finite."""

Tokens = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    seq_of_token: jax.Array,
    cu_q_lens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The answers of this step's tokens, and the states after them.

    Rows may come in any order; those with a single token are cheap when they come first, as they do in a `Batch`.

    Args:
      q, k: [T, Hk, Dk], neither normalised nor scaled. Value heads that lie side by side share a key head, Hv / Hk each.
      v: [T, Hv, Dv].
      log_decay: f32[T, Hv], g above, at most 0.
      beta: f32[T, Hv], from 0 to 1.
      states: f32[S, Hv, Dk, Dv], before this step, zeros before a sequence's first token.
      seq_of_token: i32[T], row in S, -1 for padding. What padding holds in the other arrays does not matter.
      cu_q_lens: i32[S + 1], where each row's tokens start in T.

    Returns:
      [T, Hv, Dv] of v's type, 0 at padding; and the states after this step, the same bits where a row has no tokens. All is computed in
      float32. How a sequence is cut into steps changes both by no more than rounding.
    """
    tokens = (q, k, v, log_decay, beta)
    # Products of float32 are to be exact to its last bits; beside bfloat16 inputs three passes of bfloat16 leave nothing to see.
    precision = jax.lax.Precision.HIGHEST if v.dtype == jnp.float32 else jax.lax.Precision.HIGH
    lengths = jnp.diff(cu_q_lens)
    num_rows = min(len(states), len(v))
    # Row i of the leading single tokens is token i.
    single = (lengths[:num_rows] == 1) & (seq_of_token[:num_rows] == jnp.arange(num_rows))
    # In float32 until the end: on CPUs, an update of a slice of bfloat16 converts the whole array.
    out = jnp.zeros(v.shape, jnp.float32)
    out, states = _single_tokens(tokens, single, out, states)
    chunked = jnp.where(jnp.pad(single, (0, len(states) - num_rows)), 0, lengths)
    out, states = _chunks(tokens, chunked, seq_of_token, cu_q_lens, out, states, precision)
    return out.astype(v.dtype), states


def _single_tokens(tokens: Tokens, single: jax.Array, out: jax.Array, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lets token i update row i where `single` bool[rows] says so, block by block up to the last such row."""
    size = min(ROW_BLOCK, len(single))

    def update(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        at, fresh = _window(index * size, size, len(single))
        valid = _slice(single, at, size) & fresh
        q, k, v, log_decay, beta = _prepare(tokens, at, valid)
        group = v.shape[1] // k.shape[1]
        q, k = jnp.repeat(q, group, axis=1), jnp.repeat(k, group, axis=1)
        state, held = _slice(states, at, size), _slice(out, at, size)
        decay = jnp.exp(log_decay)[..., None]
        # Both products read the state as it was, so that one pass over it is enough.
        known = decay * jnp.sum(state * k[..., None], axis=-2)
        answer = decay * jnp.sum(state * q[..., None], axis=-2)
        correction = beta[..., None] * (v - known)
        answer += jnp.sum(q * k, axis=-1, keepdims=True) * correction
        new = decay[..., None] * state + k[..., None] * correction[..., None, :]
        return (
            _replace(out, jnp.where(valid[:, None, None], answer, held), at),
            _replace(states, jnp.where(valid[:, None, None, None], new, state), at),
        )

    num_needed = jnp.max(jnp.where(single, jnp.arange(len(single)) // size + 1, 0))
    return jax.lax.fori_loop(0, num_needed, update, (out, states))


def _chunks(
    tokens: Tokens,
    lengths: jax.Array,
    seq_of_token: jax.Array,
    cu_q_lens: jax.Array,
    out: jax.Array,
    states: jax.Array,
    precision: jax.lax.Precision,
) -> tuple[jax.Array, jax.Array]:
    """Lets the rows with tokens left in `lengths` i32[S] take them chunk by chunk."""
    size = min(CHUNK, len(out))
    num_chunks = jax.lax.div(lengths + (size - 1), size)
    ends = jnp.cumsum(num_chunks)  # chunks up to and with each row
    starts = cu_q_lens[:-1] - (ends - num_chunks) * size

    def update(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        row = jnp.sum(ends <= index)
        start = starts[row] + index * size
        at, fresh = _window(start, size, len(out))
        valid = (_slice(seq_of_token, at, size) == row) & fresh
        answer, state = _chunk(_prepare(tokens, at, valid), states[row], precision)
        answer = jnp.where(valid[:, None, None], answer, _slice(out, at, size))
        return _replace(out, answer, at), _replace(states, state[None], row)

    return jax.lax.fori_loop(0, ends[-1], update, (out, states))


def _chunk(tokens: Tokens, state: jax.Array, precision: jax.lax.Precision) -> tuple[jax.Array, jax.Array]:
    """The answers [C, Hv, Dv] of a chunk of prepared tokens, and the state [Hv, Dk, Dv] after it.

    A token of zeros changes nothing, wherever in the chunk it is.
    """

    def product(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(letters, left, right, precision=precision)

    q, k, v, log_decay, beta = (jnp.moveaxis(part, 0, 1) for part in tokens)  # heads first
    num_heads, size = beta.shape
    group = num_heads // len(k)
    both = jnp.concatenate([k, q], axis=1)
    overlaps = jnp.repeat(product("hid,hjd->hij", both, k), group, axis=0)  # [Hv, 2 C, C]
    reads = product("hid,hde->hie", jnp.repeat(both, group, axis=0), state)  # [Hv, 2 C, Dv]

    # Sums over just the tokens between: a difference of two running sums would lose a small decay behind a large one.
    place = jnp.arange(size)
    past = place[:, None] >= place
    after = jnp.where(place[:, None] > place, log_decay[..., None], 0.0)  # [Hv, m, j]: m's decay where it follows j
    between = jnp.einsum("im,hmj->hij", past.astype(jnp.float32), after, precision=jax.lax.Precision.HIGHEST)
    decays = jnp.where(past, jnp.exp(between), 0.0)
    since_start = jnp.exp(between[..., 0] + log_decay[:, :1])[..., None]  # [Hv, C, 1]

    wanted = beta[..., None] * (v - since_start * reads[:, :size])
    earlier = jnp.where(place[:, None] > place, beta[..., None] * overlaps[:, :size] * decays, 0.0)
    corrections = product("hij,hje->hie", _inverse(earlier, precision), wanted)
    answers = since_start * reads[:, size:] + product("hij,hje->hie", overlaps[:, size:] * decays, corrections)
    keys = jnp.repeat(k, group, axis=0) * decays[:, -1, :, None]
    state = since_start[:, -1:] * state + product("hjd,hje->hde", keys, corrections)
    return jnp.moveaxis(answers, 1, 0), state


def _inverse(lower: jax.Array, precision: jax.lax.Precision) -> jax.Array:
    """The inverse of I + lower, for strictly lower triangular matrices f32[..., C, C].

    Inverts blocks on the diagonal and joins neighbours to blocks of twice the size, [[A, 0], [B, D]] being [[a, 0], [-d B a, d]] then.
    The product (I - L)(I + L^2)(I + L^4)… is no alternative: where keys repeat, powers of L grow like binomials before they vanish.
    """
    place = jnp.arange(lower.shape[-1])

    def below(level: jax.Array | int) -> jax.Array:
        block = place >> level
        return jnp.where((block[:, None] == block + 1) & (block % 2 == 0), lower, 0.0)

    def join(level: jax.Array, inverse: jax.Array) -> jax.Array:
        right = jnp.matmul(below(level), inverse, precision=precision)
        return inverse - jnp.matmul(inverse, right, precision=precision)

    pairs = jnp.eye(len(place), dtype=lower.dtype) - below(0)
    return jax.lax.fori_loop(1, (len(place) - 1).bit_length(), join, pairs)


def _prepare(tokens: Tokens, at: jax.Array, valid: jax.Array) -> Tokens:
    """The tokens from `at` on in float32, q and k of unit length, q scaled; zeros where not `valid` bool[n]."""
    q, k, v, log_decay, beta = (
        jnp.where(valid.reshape(-1, *[1] * (part.ndim - 1)), _slice(part, at, len(valid)).astype(jnp.float32), 0.0)
        for part in tokens
    )
    return _unit(q) * q.shape[-1] ** -0.5, _unit(k), v, jnp.maximum(log_decay, GONE), beta


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


def _window(start: jax.Array, size: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Where a slice of `size` from `start` is to begin to end within `length`, and which of it bool[size] is from `start` on."""
    at = jnp.minimum(start, length - size)
    return at, at + jnp.arange(size) >= start


def _slice(whole: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(whole, start, size)


def _replace(whole: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)
