"""Grouped products by XLA, and when they take the place of the kernel."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_reference import ERROR, error, forward, normal, weight_gradient

from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.grouped_matmul import op, products
from tpu_serve.kernels.grouped_matmul.op import grouped_gate_up, grouped_matmul

CPU = Context(cpu_chip())
ROWS, EXPERTS = 30, 4
SIZES = np.array([4, 3, 0, 9, 1, 6], np.int32)  # of the 6 groups, matrices are those of 1 to 4
OWN, FOREIGN = slice(4, 17), np.r_[0:4, 17:ROWS]


def test_a_ragged_product_clears_rows_of_no_group_on_a_cpu():
    """What this package does not rely on, because other backends may leave them unwritten."""
    lhs, rhs = np.full((5, 8), np.nan, np.float32), np.ones((2, 8, 3), np.float32)
    lhs[:3] = 1
    out = np.asarray(jax.lax.ragged_dot(lhs, rhs, np.array([1, 2], np.int32)))
    np.testing.assert_array_equal(out, np.repeat([[8.0] * 3, [0.0] * 3], [3, 2], axis=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [None, Activation("silu"), Activation("swigluoai", limit=2.0)])
def test_values_and_gradients(dtype, activation):
    """Sizes that no kernel takes, an offset that is not known when compiled, NaN in foreign rows of everything."""
    lhs = normal(0, (ROWS, 24), dtype)
    lhs[FOREIGN] = np.nan
    weights = normal(1, (EXPERTS, 2, 24, 20), dtype, 0.4)
    dout = normal(2, (ROWS, 20))
    dout[FOREIGN] = np.nan

    @jax.jit
    def run(lhs, weights, sizes, offset, dout):
        def product(lhs, weights):
            options = {"group_offset": offset, "out_dtype": "float32", "backend": "xla"}
            if activation is None:
                return grouped_matmul(lhs, weights[:, 0], sizes, CPU, **options)
            return grouped_gate_up(lhs, weights, sizes, activation, CPU, **options)

        out, pull = jax.vjp(product, lhs, weights)
        return out, *pull(dout)

    out, dlhs, dweights = run(lhs, weights, SIZES, np.int32(1), dout)
    wanted = forward(lhs, weights, SIZES, 1, activation)
    wanted = wanted[0] if activation is None else wanted
    assert error(out[OWN], wanted[OWN]) < 1e-5  # sums are float32 for both types
    assert not np.asarray(out)[FOREIGN].any()
    assert not np.asarray(dlhs)[FOREIGN].any()
    assert dlhs.dtype == dweights.dtype == lhs.dtype
    if activation is None:
        assert error(dweights[:, 0], weight_gradient(lhs, dout[None], SIZES, 1, EXPERTS)[:, 0]) < ERROR[dtype]
        assert not np.asarray(dweights)[:, 1].any()
    else:
        assert np.isfinite(np.asarray(dweights).astype(np.float32)).all()
        assert np.asarray(dweights)[3].any()
        assert not np.asarray(dweights)[1].any()  # no rows


def test_rows_of_other_groups_stay_in_an_existing_array():
    lhs, rhs, existing = normal(0, (ROWS, 24)), normal(1, (EXPERTS, 24, 20)), normal(2, (ROWS, 20))
    out = grouped_matmul(lhs, rhs, SIZES, CPU, group_offset=1, existing=existing, backend="xla")
    assert error(out, forward(lhs, rhs[:, None], SIZES, 1, existing=existing)[0]) < ERROR["float32"]
    np.testing.assert_array_equal(np.asarray(out)[FOREIGN], existing[FOREIGN])


def test_the_log_says_once_why_the_kernel_is_not_taken(caplog):
    products.log_fallback.cache_clear()
    lhs, rhs = normal(0, (ROWS, 24)), normal(1, (EXPERTS, 24, 20))
    with caplog.at_level(logging.WARNING, logger=products.__name__):
        for context in (CPU, CPU, Context(TPU_CHIPS["v6e"])):
            out = grouped_matmul(lhs, rhs, SIZES, context, group_offset=1)
            assert error(out[OWN], forward(lhs, rhs[:, None], SIZES, 1)[0][OWN]) < ERROR["float32"]
    reasons = [record.getMessage().split(": ", 1)[1] for record in caplog.records]
    assert reasons == [
        "cpu runs the kernel in simulation only",
        "n_in 24 is not a multiple of 128; fill the weights up with zeros when they are loaded",
    ]


def test_gradients_by_xla_where_only_they_do_not_fit(monkeypatch):
    """The forward product is the kernel's; a backward one that is refused is XLA's, with the same result."""
    context = Context(cpu_chip(), True)
    lhs, gate_up = normal(0, (32, 128)), normal(1, (2, 2, 128, 128), scale=0.2)
    sizes = np.array([9, 20], np.int32)
    share = np.where(np.arange(32)[:, None] < 29, normal(2, (32, 128)), 0)

    def gradient():
        def product(lhs, gate_up):
            return grouped_gate_up(lhs, gate_up, sizes, Activation(), context)

        return jax.jit(lambda *arrays: jax.vjp(product, *arrays)[1](jnp.asarray(share)))(lhs, gate_up)

    by_kernel = gradient()
    calls = []
    real = op.refused
    monkeypatch.setattr(
        op, "refused", lambda context, *problems: "made up" if len(problems) == 2 else real(context, *problems)
    )
    for name in ("run_input_gradient", "run_weight_gradient"):
        monkeypatch.setattr(op, name, functools.partial(calls.append, name))
    for one, other in zip(gradient(), by_kernel, strict=True):
        assert error(one, other) < 1e-5
    assert not calls
