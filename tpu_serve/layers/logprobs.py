"""Log-probabilities that are reported: of a token, and of the most probable ones. Letters: S rows, T tokens, V vocabulary, H hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import pytree
from tpu_serve.request import MAX_LOGPROBS

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
"""What is reported: of the logits as the model gave them, or as tokens are drawn from them; normalised, or as they are."""

SMALLEST_PIECE = 128
"""Logits of at least so many tokens of a prompt are computed at a time: the output table is read once for all of them."""


@pytree
@dataclass(frozen=True, slots=True)
class Logprobs:
    """What is reported of some rows, zeros where nobody asked. N is the number of rows.

    Attributes:
      own: f32[N], of the row's token.
      top_ids, top: i32[N, 20] and f32[N, 20], the most probable tokens (fewer for a tiny vocabulary).
    """

    own: jax.Array
    top_ids: jax.Array
    top: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, token_ids: jax.Array, mode: str) -> Logprobs:
        """Of f32[N, V] logits and i32[N] tokens."""
        values = jax.nn.log_softmax(logits, axis=-1) if mode.endswith("logprobs") else logits
        top, ids = jax.lax.top_k(values, num_reported(logits.shape[1]))
        own = jnp.take_along_axis(values, jnp.maximum(token_ids, 0)[:, None], axis=-1)[:, 0]
        return cls(own, ids.astype(jnp.int32), top)

    @classmethod
    def nothing(cls, num_rows: int, vocab_size: int) -> Logprobs:
        shape = (num_rows, num_reported(vocab_size))
        return cls(jnp.zeros(num_rows, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def num_reported(vocab_size: int) -> int:
    """How many of the most probable tokens are reported."""
    return min(MAX_LOGPROBS, vocab_size)


@jax.named_scope("prompt_logprobs")
def prompt_logprobs(
    project: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array, any_wanted: jax.Array, mode: str
) -> Logprobs:
    """Of the token that follows each token of a prompt, a row per token of the step.

    A few tokens at a time, as the logits of all of them would take more memory than the model leaves. A prompt is not sampled, so "processed"
    means nothing here: every mode reports the model's own distribution.

    Args:
      project: [N, H] to f32[N, V] logits.
      hidden: [T, H].
      targets: i32[T], -1 where nothing is reported.
      any_wanted: i32[], whether anything is.
      mode: one of `LOGPROBS_MODES`.
    """
    num_tokens = len(hidden)
    vocab_size: int = jax.eval_shape(project, hidden[:1]).shape[-1]
    size = min(num_tokens, SMALLEST_PIECE)
    missing = -num_tokens % size

    def piece(inputs: tuple[jax.Array, jax.Array]) -> Logprobs:
        return Logprobs.of(project(inputs[0]), inputs[1], mode)

    def report() -> Logprobs:
        if num_tokens == size:
            return piece((hidden, targets))  # a loop would take twice as long to compile
        tokens = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, size, hidden.shape[1])
        found = jax.lax.map(piece, (tokens, jnp.pad(targets, (0, missing)).reshape(-1, size)))
        joined: Logprobs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], found)
        return joined

    return jax.lax.cond(any_wanted > 0, report, lambda: Logprobs.nothing(num_tokens, vocab_size))
