"""Experts in two arrays: two products into one result, on a simulated device and by XLA, and the rows that a clearing product would lose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_reference import ERROR, error, forward, input_gradient, normal, weight_gradient
from simulator import simulate

from tpu_serve.checkpoint.layouts import FUSED, SPLIT, convert_wi
from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.grouped_matmul.split import grouped_matmul_split, keep_boundary

CPU = cpu_chip()
ROWS, EXPERTS, HIDDEN, COLUMNS = 60, 4, 128, 256
SIZES = np.array(
    [7, 6, 13, 8, 0, 16], np.int32
)  # of 6 groups, experts are groups 1 to 4: rows 7 to 34, the halves meet at row 26
OWN = slice(7, 34)


def inputs():
    wi = normal(0, (EXPERTS, HIDDEN, COLUMNS))
    lhs, dout = normal(1, (ROWS, HIDDEN)), normal(2, (ROWS, COLUMNS))
    lhs[: OWN.start] = lhs[OWN.stop :] = np.nan
    dout[: OWN.start] = dout[OWN.stop :] = np.nan
    return wi, convert_wi(wi, FUSED, SPLIT), lhs, dout


def check(out, pulled, wi, lhs, dout):
    wanted = forward(lhs, wi[:, None], SIZES, 1)[0]
    assert error(out[OWN], wanted[OWN]) < ERROR["float32"]
    dlhs, dhalves = pulled
    assert error(dlhs, input_gradient(dout[None], wi[:, None], SIZES, 1)) < ERROR["float32"]
    dwi = weight_gradient(lhs, dout[None], SIZES, 1, EXPERTS)[:, 0]
    for got, half in zip(dhalves, convert_wi(dwi, FUSED, SPLIT), strict=True):
        assert error(got, half) < ERROR["float32"]


def run(interpret, lhs, low, high, dout, backend="tc"):
    def product(lhs, halves):
        context = Context(CPU, interpret)
        return grouped_matmul_split(lhs, halves, SIZES, context, group_offset=jnp.int32(1), backend=backend)

    out, pull = jax.vjp(product, lhs, (low, high))
    return out, pull(dout)


def test_the_kernel_with_halves_of_the_split_layout():
    wi, halves, lhs, dout = inputs()
    for out, pulled in simulate(run, lhs, *halves, dout, allow_nan=True):
        check(out, pulled, wi, lhs, dout)


def test_xla_with_halves_of_the_split_layout():
    wi, halves, lhs, dout = inputs()
    out, pulled = jax.jit(lambda *arrays: run(False, *arrays, backend="xla"))(lhs, *halves, dout)
    check(out, pulled, wi, lhs, dout)
    assert not np.asarray(out)[np.r_[0 : OWN.start, OWN.stop : ROWS]].any()


def clearing(lhs, rhs, sizes, offset, existing, tile):
    """A grouped product that clears foreign rows in every tile that it writes."""
    out, product = existing.copy(), forward(lhs, rhs[:, None], sizes, offset)[0]
    own = np.flatnonzero(~np.isnan(product[:, 0]))
    if len(own):
        written = slice(own[0] // tile * tile, -(-(own[-1] + 1) // tile) * tile)
        out[written] = np.nan_to_num(product[written])
    return out


@pytest.mark.parametrize("tile", [8, 32])
@pytest.mark.parametrize(
    "sizes", [[7, 6, 13, 8, 0, 16], [0, 3, 2, 50, 5, 0], [4, 0, 0, 20, 3, 0], [5, 20, 30, 0, 0, 0]]
)
def test_a_clearing_product_loses_rows_and_kept_ones_are_put_back(sizes, tile):
    sizes = np.array(sizes, np.int32)
    rhs, lhs = normal(0, (4, HIDDEN, COLUMNS)), normal(1, (ROWS, HIDDEN))
    start, boundary, end = np.cumsum(sizes)[[0, 2, 4]]
    wanted = forward(lhs, rhs[:, None], sizes, 1)[0][start:end]
    first = clearing(lhs, rhs[:2], sizes, 1, np.zeros((ROWS, COLUMNS)), tile).astype(np.float32)

    def second(existing):
        return clearing(lhs, rhs[2:], sizes, 3, existing, tile).astype(np.float32)

    naive = second(first)[start:end]
    loses = boundary % tile != 0 and boundary > start and end > boundary
    assert (error(naive, wanted) > 0.1) == loses

    def on_device(existing):
        return jax.pure_callback(lambda one: second(np.asarray(one)), jax.typeof(existing), existing)

    repaired = jax.jit(lambda first: keep_boundary(first, jnp.int32(boundary), tile, on_device))(first)
    assert error(repaired[start:end], wanted) < ERROR["float32"]


def test_what_is_refused_at_the_door():
    lhs, half, context = np.zeros((4, 128), np.float32), np.zeros((4, 64, 128), np.float32), Context(CPU)
    with pytest.raises(ValueError, match=r"two arrays \[E, H/2, N\] with an even E, got \(3, 64, 128\)"):
        grouped_matmul_split(lhs, (half[:3], half[:3]), np.zeros(3, np.int32), context)
    with pytest.raises(ValueError, match="group_sizes at least 4 numbers; got float32, float32 and 3"):
        grouped_matmul_split(lhs, (half, half), np.zeros(3, np.int32), context)
    with pytest.raises(ValueError, match="both halves must be float32"):
        grouped_matmul_split(lhs, (half, half.astype(np.float64)), np.zeros(4, np.int32), context)
