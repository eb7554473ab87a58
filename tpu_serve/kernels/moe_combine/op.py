"""`combine` and `permute`, differentiable, whatever computes them: the entry of this package.

Letters: T tokens, K choices of a token, E experts, R rows in order of expert, H columns.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.moe_combine import gather, portable, scatter
from tpu_serve.kernels.moe_combine.problem import Operation, Problem, granule, heuristic, supported

logger = logging.getLogger(__name__)

Backend = Literal["tc", "onehot", "xla"]
BACKENDS: tuple[Backend, ...] = ("tc", "onehot", "xla")

ONE_HOT_TOKENS = 256
"""Up to so many tokens "auto" multiplies by a matrix of zeros and weights: a kernel's windows would mostly carry other tokens' rows."""

fallbacks: Counter[tuple[Operation, str]] = Counter()
"""How often, while tracing, the kernel was asked for and did not run, by operation and reason."""


@dataclass(frozen=True)
class Choice:
    """What computes an operation.

    Attributes:
      backend: "tc" for the kernels on the TensorCore, "onehot" for products with matrices of zeros and weights, "xla" for XLA's gathers;
        "auto" takes the one that is expected to be fastest.
      context: where the kernels run.
      num_experts: E.
    """

    backend: str
    context: Context
    num_experts: int

    def __post_init__(self) -> None:
        if self.backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend {self.backend!r} is unknown; known are auto, {', '.join(BACKENDS)}")


def reason_against(problem: Problem, context: Context, operation: Operation) -> str | None:
    """Why the kernel does not run there, or None."""
    if not context.chip.is_tpu and context.interpret is False:
        return f"the kernel runs on TPUs, and {context.chip.name} can only simulate it"
    return supported(problem, context.chip, operation)


def choose(problem: Problem, choice: Choice, operation: Operation) -> Backend:
    """The backend of a call. Where the kernel is asked for and does not run, XLA does; the reason is logged once and counted."""
    backend = _chosen(problem, choice, operation)
    _log_choice(operation, problem.num_tokens, backend)
    return backend


def _chosen(problem: Problem, choice: Choice, operation: Operation) -> Backend:
    if choice.backend == "onehot":
        return "onehot"
    if choice.backend == "xla":
        return "xla"
    reason = reason_against(problem, choice.context, operation)
    if choice.backend == "auto":
        if not choice.context.chip.is_tpu:
            return "xla"
        if problem.num_tokens <= ONE_HOT_TOKENS:
            return "onehot"
    if reason is None:
        return "tc"
    if not fallbacks[operation, reason]:
        logger.warning("MoE %s: the kernel (tc) does not run, XLA does: %s", operation, reason)
    fallbacks[operation, reason] += 1
    return "xla"


@functools.cache
def _log_choice(operation: Operation, num_tokens: int, backend: Backend) -> None:
    """Once for all layers of a program."""
    logger.info("MoE %s of %d tokens: %s", operation, num_tokens, backend)


def _problem(
    choice: Choice,
    ids: jax.Array,
    array: jax.Array,
    weights: jax.Array | None,
    num_rows: int,
    out_dtype: str | None = None,
) -> Problem:
    weight_dtype = None if weights is None else jnp.dtype(weights.dtype).name
    dtype = jnp.dtype(array.dtype).name
    align = granule(dtype, choice.context.chip)
    num_tokens, top_k = ids.shape
    return Problem(
        num_tokens, top_k, choice.num_experts, num_rows, array.shape[1], dtype, weight_dtype, align, out_dtype
    )


class Portable(NamedTuple):
    """The three operations of a backend in plain JAX."""

    sums: Any
    dots: Any
    scattered: Any


def portable_operations(backend: Backend) -> Portable:
    """Of "onehot" or "xla"."""
    if backend == "onehot":
        return Portable(portable.one_hot_sums, portable.one_hot_dots, portable.one_hot_scattered)
    return Portable(portable.gather_sums, portable.gather_dots, portable.gather_scattered)


def _sums(
    choice: Choice, rows: jax.Array, ids: jax.Array, weights: jax.Array | None, out_dtype: str | None
) -> jax.Array:
    problem = _problem(choice, ids, rows, weights, len(rows), out_dtype)
    backend = choose(problem, choice, "combine")
    if backend == "tc":
        config = heuristic(problem, choice.context.chip, "combine")
        return gather.sums(problem, config, choice.context, rows, ids, weights)
    return portable_operations(backend).sums(rows, ids, weights, choice.num_experts, problem.out_type)


def _dots(choice: Choice, rows: jax.Array, ids: jax.Array, tokens: jax.Array) -> jax.Array:
    problem = _problem(choice, ids, rows, None, len(rows))
    backend = choose(problem, choice, "dots")
    if backend == "tc":
        config = heuristic(problem, choice.context.chip, "dots")
        return gather.dots(problem, config, choice.context, rows, ids, tokens)
    return portable_operations(backend).dots(rows, ids, tokens, choice.num_experts)


def _scattered(
    choice: Choice, tokens: jax.Array, ids: jax.Array, weights: jax.Array | None, num_rows: int, zero_rest: bool
) -> jax.Array:
    problem = _problem(choice, ids, tokens, weights, num_rows)
    backend = choose(problem, choice, "permute")
    if backend == "tc":
        config = heuristic(problem, choice.context.chip, "permute")
        return scatter.scattered(problem, config, choice.context, tokens, ids, weights, zero_rest=zero_rest)
    return portable_operations(backend).scattered(tokens, ids, weights, choice.num_experts, num_rows)


def _no_gradient(ids: jax.Array) -> Any:
    return np.zeros(ids.shape, jax.dtypes.float0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def combine(
    rows: jax.Array, ids: jax.Array, weights: jax.Array, choice: Choice, out_dtype: str | None = None
) -> jax.Array:
    """Weighted sum of each token's rows: y[t] = sum over k of weights[t, k] * rows[row of choice (t, k)], added in float32.

    Rows are in order of expert, within an expert in order of token, then of choice, as `permute` makes them; a choice whose id is -1 has no
    row. Differentiable in rows and weights.

    Args:
      rows: [R, H], bfloat16 or float32; those behind the last choice's may hold anything.
      ids: i32[T, K], each at least -1 and less than the number of experts.
      weights: [T, K], bfloat16 or float32.
      choice: what computes it.
      out_dtype: of the sums, bfloat16 or float32; that of the rows by default. Gradients are rounded to the type of the rows first.

    Returns:
      [T, H]. A row that is not finite makes its own token so, and no other one.
    """
    return _sums(choice, rows, ids, weights, out_dtype)


def _combine_forward(
    rows: jax.Array, ids: jax.Array, weights: jax.Array, choice: Choice, out_dtype: str | None = None
) -> Any:
    return _sums(choice, rows, ids, weights, out_dtype), (rows, ids, weights)


def _combine_backward(choice: Choice, out_dtype: str | None, kept: Any, gradient: jax.Array) -> Any:
    rows, ids, weights = kept
    gradient = gradient.astype(rows.dtype)
    by_rows = _scattered(choice, gradient, ids, weights, len(rows), True)
    by_weights = _dots(choice, rows, ids, gradient).astype(weights.dtype)
    return by_rows, _no_gradient(ids), by_weights


combine.defvjp(_combine_forward, _combine_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def permute(tokens: jax.Array, ids: jax.Array, choice: Choice, num_rows: int) -> jax.Array:
    """A copy of its token for every choice, in order of expert, within an expert in order of token, then of choice.

    Differentiable in the tokens, where their type is a floating one of at least 16 bits.

    Args:
      tokens: [T, H], of a type in `problem.BYTES`.
      ids: i32[T, K], each at least -1, which makes no row, and less than the number of experts.
      choice: what computes it.
      num_rows: R, at least the number of ids that are not -1; rows behind theirs hold anything. The kernel runs where it is a multiple of
        `problem.granule`.

    Returns:
      [R, H] in the type of the tokens, unchanged but for the sign of zero, the payload of NaN and subnormal numbers, which products clear.
    """
    return _scattered(choice, tokens, ids, None, num_rows, False)


def _permute_forward(tokens: jax.Array, ids: jax.Array, choice: Choice, num_rows: int) -> Any:
    return permute(tokens, ids, choice, num_rows), ids


def _permute_backward(choice: Choice, num_rows: int, ids: jax.Array, gradient: jax.Array) -> Any:
    return _sums(choice, gradient, ids, None, None), _no_gradient(ids)


permute.defvjp(_permute_forward, _permute_backward)
