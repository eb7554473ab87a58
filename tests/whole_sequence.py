"""How tokens of one whole sequence see one another, written independently of pages, batches and chunks: a `Mixing` without caches."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


class WholeSequence:
    """Row t of every array is the token at position t."""

    def attend(self, q, k, v, cache, *, scale, window=None, sinks=None):
        group = q.shape[1] // k.shape[1]
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k, precision=HIGHEST).astype(jnp.float32) * scale
        distance = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:2], 1))
            weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
        else:
            weights = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v, precision=HIGHEST), cache

    def convolve(self, x, weight, cache):
        weight = weight.reshape(x.shape[1], -1)
        taps = weight.shape[1]
        padded = jnp.pad(x, ((taps - 1, 0), (0, 0)))
        return sum(padded[tap : tap + len(x)] * weight[:, tap] for tap in range(taps)), cache

    def delta_rule(self, q, k, v, log_decay, beta, cache):
        repeats = v.shape[1] // k.shape[1]

        def unit(x):
            x = x.astype(jnp.float32)
            return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)

        q, k = (jnp.repeat(unit(x), repeats, axis=1) for x in (q, k))
        q = q * q.shape[-1] ** -0.5

        def token(state, row):
            q, k, v, log_decay, beta = row
            state = state * jnp.exp(log_decay)[:, None, None]
            update = beta[:, None] * (v - jnp.einsum("hkv,hk->hv", state, k, precision=HIGHEST))
            state = state + k[:, :, None] * update[:, None, :]
            return state, jnp.einsum("hkv,hk->hv", state, q, precision=HIGHEST)

        start = jnp.zeros((v.shape[1], q.shape[2], v.shape[2]), jnp.float32)
        _, out = jax.lax.scan(token, start, (q, k, v.astype(jnp.float32), log_decay, beta))
        return out.astype(v.dtype), cache
