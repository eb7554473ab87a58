"""The last step of mode G without kernels of its own, which would take most of the time of a test that is about something else."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tpu_serve.kernels.fused_moe_v2 import op, tile
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Problem


def plain_combine(
    problem: Problem, config: Config, call: Call, arrived: jax.Array, scale: jax.Array | None, places: jax.Array, weights: jax.Array,
    dtype: Any,
) -> jax.Array:  # fmt: skip
    rows = arrived[jnp.maximum(places, 0)].astype(jnp.float32)
    if scale is not None:
        rows = rows * scale[jnp.maximum(places, 0)]
    rows = jnp.where((places >= 0)[:, :, None, None], rows * weights[:, :, None, None], 0.0)
    return tile.flatten(rows.sum(axis=1), problem.padded_hidden).astype(dtype)


def plain_own_sums(
    problem: Problem, config: Config, call: Call, arrived: jax.Array, scale: jax.Array | None, expert_ids: jax.Array, places: jax.Array,
    weights: jax.Array, dtype: Any,
) -> jax.Array:  # fmt: skip
    return plain_combine(problem, config, call, arrived, scale, jnp.where(expert_ids < 0, -1, places), weights, dtype)


def sum_plainly(patch: pytest.MonkeyPatch) -> None:
    """Replaces the kernels; their tests and faults are in test_fused_moe_combine.py and test_moe_combine_*.py."""
    patch.setattr(op, "combine", plain_combine)
    patch.setattr(op, "own_sums", plain_own_sums)
