"""The three products with their problems and configs made from the arrays: what the differentiable functions are put together from."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.grouped_matmul import forward, portable, weight_gradient
from tpu_serve.kernels.grouped_matmul.config import Config, heuristic, supported
from tpu_serve.kernels.grouped_matmul.problem import Problem

BACKENDS = ("tc", "xla")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)  # hashable: a static argument of differentiable functions
class Plan:
    """What does not depend on values.

    Attributes:
      context: chip, and compiled or simulated.
      problem: the forward product.
      config: of the forward product, or None for the heuristic's. Gradients take the heuristic's.
    """

    context: Context
    problem: Problem
    config: Config | None = None

    def gradients(self) -> tuple[Problem, Problem]:
        """The problems of input_gradient and weight_gradient; results have the type of what they are gradients of."""
        base = replace(self.problem, activation=None, in_place=False, out_dtype=None)
        return replace(base, role="input_gradient"), replace(base, role="weight_gradient")


def plan_of(
    lhs: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    context: Context,
    out_type: str,
    activation: Activation | None,
    in_place: bool,
    config: Config | None,
    backend: str,
) -> Plan:
    """The plan of a forward product of lhs [R, N_in] and weights [E, Z, N_in, N_out].

    Raises:
      ValueError: shapes, types or backend are not such as are known.
    """
    experts, num_matrices, n_in, n_out = weights.shape
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; known are {', '.join(BACKENDS)}")
    if lhs.ndim != 2 or lhs.shape[1] != n_in or lhs.dtype != weights.dtype:
        raise ValueError(f"lhs must be {weights.dtype}[R, {n_in}], got {lhs.dtype}{list(lhs.shape)}")
    if group_sizes.ndim != 1 or len(group_sizes) < experts:
        raise ValueError(f"group_sizes must be [E_all] with E_all at least {experts}, got {group_sizes.shape}")
    problem = Problem(
        len(lhs), experts, n_in, n_out, lhs.dtype.name, out_type, num_matrices, activation, in_place=in_place
    )
    return Plan(context, problem, config)


def refused(context: Context, *problems: Problem) -> str | None:
    """Why the kernel cannot be had for one of these problems, or None."""
    if not context.chip.is_tpu and context.interpret is False:
        return f"{context.chip.name} runs the kernel in simulation only"
    return next((reason for one in problems if (reason := supported(one, context.chip)) is not None), None)


@functools.cache
def log_fallback(reason: str) -> None:
    """Says so once for each reason."""
    logger.warning("Grouped products by XLA instead of the kernel: %s", reason)


def run_forward(
    plan: Plan,
    lhs: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing: jax.Array | None,
) -> jax.Array:
    """lhs [R, N_in] to [R, N_out], `existing` of the same shape and type as the result."""
    p = plan.problem
    config = plan.config or heuristic(p, plan.context.chip)
    before = None if existing is None else existing[None]
    return forward.multiply(p, config, plan.context, lhs[None], weights, group_sizes, group_offset, before)[0]


def pull_products(
    plan: Plan, lhs: jax.Array, weights: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, dout: jax.Array
) -> jax.Array:
    """From the gradient of the result [R, N_out] to those of the products [Z, R, N_out], in the type of lhs. Foreign rows: anything.

    The two products that an activation joined are made again: keeping them would hold twice the result for every layer of a model.
    """
    activation = plan.problem.activation
    if activation is None:
        return dout.astype(lhs.dtype)[None]
    problem = replace(plan.problem, activation=None, out_dtype="float32")
    config = heuristic(problem, plan.context.chip)
    both = forward.multiply(problem, config, plan.context, lhs[None], weights, group_sizes, group_offset)
    return pull_activation(both[0], both[1], activation, dout).astype(lhs.dtype)


def pull_activation(gate: jax.Array, up: jax.Array, activation: Activation, dout: jax.Array) -> jax.Array:
    """f32[2, R, I]: gradients of gate and up."""
    _, pull = jax.vjp(lambda gate, up: portable.activate(gate, up, activation), gate, up)
    return jnp.stack(pull(dout.astype(jnp.float32)))


def run_input_gradient(
    plan: Plan,
    weights: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    dproducts: jax.Array,
    existing: jax.Array | None = None,
) -> jax.Array:
    """dproducts [Z, R, N_out] to [R, N_in]; foreign rows are those of `existing`, or unspecified."""
    problem = replace(plan.gradients()[0], in_place=existing is not None)
    config = heuristic(problem, plan.context.chip)
    before = None if existing is None else existing[None]
    return forward.multiply(problem, config, plan.context, dproducts, weights, group_sizes, group_offset, before)[0]


def run_weight_gradient(
    plan: Plan, lhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, dproducts: jax.Array
) -> jax.Array:
    """lhs [R, N_in] and dproducts [Z, R, N_out] to [E, Z, N_in, N_out]."""
    problem = plan.gradients()[1]
    config = heuristic(problem, plan.context.chip)
    return weight_gradient.weight_gradient(problem, config, plan.context, lhs, dproducts, group_sizes, group_offset)
