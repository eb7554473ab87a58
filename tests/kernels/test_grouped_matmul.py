"""The grouped product on a simulated device against loops in float64, with NaN in every row that belongs to no group."""

import inspect

import jax
import numpy as np
import pytest
from grouped_matmul_reference import ERROR, error, forward, normal
from simulator import FaultKind, KernelFault, Simulation, simulate

from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.grouped_matmul import forward as kernel
from tpu_serve.kernels.grouped_matmul import visits as tables
from tpu_serve.kernels.grouped_matmul.config import MAX_PANEL, Config
from tpu_serve.kernels.grouped_matmul.op import grouped_gate_up, grouped_matmul
from tpu_serve.kernels.grouped_matmul.problem import Problem

CPU = cpu_chip()
ROWS, EXPERTS, N_IN, N_OUT = 70, 6, 128, 384
SIZES = {
    "skewed": [3, 0, 20, 1, 30, 2],
    "one tile holds all": [1, 2, 3, 4, 5, 0],
    "all rows in one group": [0, 0, 0, 70, 0, 0],
    "tiles end where groups do": [16, 32, 0, 0, 16, 6],
    "every row has its group": [11, 12, 13, 14, 15, 5],
    "the last row only": [0, 0, 0, 0, 0, 70],
    "no rows": [0, 0, 0, 0, 0, 0],
}


def spoiled(lhs, sizes, offset=0, experts=EXPERTS):
    """NaN in the rows of none of the groups with matrices."""
    ends = np.cumsum(sizes)
    own = slice(ends[offset] - sizes[offset], ends[offset + experts - 1])
    out = np.full_like(lhs, np.nan)
    out[own] = lhs[own]
    return out, own


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("float32", Config(16, 128, 2)),
        ("bfloat16", Config(32, 128, 3)),
        ("bfloat16", Config(80, 384, 2)),
    ],
)
def test_rows_times_the_matrices_of_their_groups(dtype, config):
    lhs, rhs = normal(0, (ROWS, N_IN), dtype), normal(1, (EXPERTS, N_IN, N_OUT), dtype)

    def run(interpret, lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes, Context(CPU, interpret), config=config)

    simulation = Simulation(run)
    for name, sizes in SIZES.items():
        rows, own = spoiled(lhs, sizes)
        wanted = forward(lhs, rhs[:, None], sizes)[0]
        for out in simulation.run(rows, rhs, np.array(sizes, np.int32), allow_nan=True):
            assert out.dtype == lhs.dtype
            if sizes != SIZES["no rows"]:
                assert error(out[own], wanted[own]) < ERROR[dtype], name


def test_a_wide_tile_is_multiplied_in_panels(monkeypatch):
    monkeypatch.setitem(MAX_PANEL, "float32", 256)
    lhs, rhs, sizes = normal(0, (40, N_IN)), normal(1, (3, N_IN, 640)), [10, 0, 30]

    def run(interpret, lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes, Context(CPU, interpret), config=Config(32, 640, 2))

    for out in simulate(run, lhs, rhs, np.array(sizes, np.int32)):
        assert error(out, forward(lhs, rhs[:, None], sizes)[0]) < ERROR["float32"]


@pytest.mark.parametrize(
    ("activation", "dtype", "out_dtype"),
    [
        (Activation("silu"), "bfloat16", "bfloat16"),
        (Activation("swigluoai", limit=2.0), "float32", "float32"),
        (Activation("silu"), "bfloat16", "float32"),
    ],
)
def test_gate_and_up_in_one_pass(activation, dtype, out_dtype):
    lhs, gate_up = normal(0, (ROWS, N_IN), dtype, 0.5), normal(1, (EXPERTS, 2, N_IN, N_OUT), dtype, 0.5)
    sizes = SIZES["skewed"]
    rows, own = spoiled(lhs, sizes)

    def run(interpret, lhs, gate_up, sizes):
        context = Context(CPU, interpret)
        return grouped_gate_up(lhs, gate_up, sizes, activation, context, out_dtype=out_dtype, config=Config(32, 128, 2))

    wanted = forward(lhs, gate_up, sizes, activation=activation)
    for out in simulate(run, rows, gate_up, np.array(sizes, np.int32), allow_nan=True):
        assert out.dtype.name == out_dtype
        # Sums are float32: only a rounding of the result may be seen.
        assert error(out[own], wanted[own]) < (ERROR["float32"] if out_dtype == "float32" else 5e-3)


def test_matrices_of_some_groups_only_and_into_an_existing_array():
    """Offset 2 of 6 groups: three groups have matrices; every other row of the existing array, NaN among them, stays bit for bit."""
    sizes, experts = [9, 10, 11, 0, 12, 13], 3
    lhs, rhs = normal(0, (ROWS, N_IN)), normal(1, (experts, N_IN, N_OUT))
    existing = normal(2, (ROWS, N_OUT))
    existing[0] = np.nan
    rows, own = spoiled(lhs, sizes, 2, experts)

    def run(interpret, lhs, rhs, sizes, offset, existing):
        return grouped_matmul(
            lhs,
            rhs,
            sizes,
            Context(CPU, interpret),
            group_offset=offset,
            existing=existing,
            config=Config(16, 128, 2),
        )

    wanted = forward(lhs, rhs[:, None], sizes, 2)[0]
    simulation = Simulation(run)
    for out in simulation.run(rows, rhs, np.array(sizes, np.int32), np.int32(2), existing, allow_nan=True):
        out = np.asarray(out)
        assert error(out[own], wanted[own]) < ERROR["float32"]
        foreign = np.r_[0 : own.start, own.stop : ROWS]
        np.testing.assert_array_equal(out[foreign], existing[foreign])
    # The same program with no rows for its groups changes nothing.
    nothing = np.array([30, 0, 0, 0, 0, 20], np.int32)
    for out in simulation.run(lhs, rhs, nothing, np.int32(2), existing, allow_nan=True):
        np.testing.assert_array_equal(out, existing)


def test_the_tables_list_exactly_the_tiles_and_groups_that_meet():
    rng, rows, experts, offset, tile_rows, length = np.random.default_rng(0), 100, 5, 2, 16, 12
    for with_empty in (False, True):
        listed = jax.jit(
            lambda sizes, with_empty=with_empty: tables.list_visits(
                sizes,
                offset,
                experts=experts,
                rows=rows,
                tile_rows=tile_rows,
                length=length,
                with_empty=with_empty,
            )
        )
        for _ in range(40):
            sizes = rng.multinomial(rng.integers(rows + 1), rng.dirichlet(np.full(8, 0.3))).astype(np.int32)
            starts = np.cumsum(sizes) - sizes
            wanted = []
            for group in range(experts):
                first, end = int(starts[offset + group]), int(starts[offset + group] + sizes[offset + group])
                met = [
                    tile
                    for tile in range(-(-rows // tile_rows))
                    if tile * tile_rows < end and (tile + 1) * tile_rows > first
                ]
                if first == end:
                    wanted += [(group, None, 0)] * with_empty
                    continue
                for tile in met:
                    base = tile * tile_rows
                    wanted.append((group, (tile, max(first - base, 0), min(end - base, tile_rows)), 0))
            got = jax.tree.map(np.asarray, listed(sizes))
            assert got.counts[0] == max(len(wanted), 1)
            assert len(wanted) <= -(-rows // tile_rows) + experts - 1 <= length
            for visit, (group, met, _) in enumerate(wanted):
                assert got.group[visit] == group
                if met is None:
                    assert got.begin[visit] >= got.end[visit]
                    assert 0 <= got.tile[visit] * tile_rows < rows
                else:
                    assert (got.tile[visit], got.begin[visit], got.end[visit]) == met
                    assert got.active[got.ordinal[visit]] == group
            if not wanted:
                assert got.begin[0] >= got.end[0]
            active = [group for group in range(experts) if sizes[offset + group]]
            assert got.counts[1] == len(active)
            assert got.active[: len(active)].tolist() == active


def test_what_is_refused_at_the_door():
    lhs, rhs, sizes, context = np.zeros((4, 128)), np.zeros((2, 128, 128)), np.zeros(2, np.int32), Context(CPU)
    with pytest.raises(ValueError, match=r"rhs must be \[E, N_in, N_out\]"):
        grouped_matmul(lhs, rhs[0], sizes, context)
    with pytest.raises(ValueError, match=r"lhs must be float64\[R, 128\], got float64\[4, 64\]"):
        grouped_matmul(lhs[:, :64], rhs, sizes, context)
    with pytest.raises(ValueError, match=r"group_sizes must be \[E_all\] with E_all at least 2"):
        grouped_matmul(lhs, rhs, sizes[:1], context)
    with pytest.raises(ValueError, match=r"existing must be float64\[4, 128\], got float64\[3, 128\]"):
        grouped_matmul(lhs, rhs, sizes, context, existing=np.zeros((3, 128)))
    with pytest.raises(ValueError, match=r"gate_up must be \[E, 2, H, I\]"):
        grouped_gate_up(lhs, rhs, sizes, Activation(), context)
    with pytest.raises(ValueError, match="backend 'gpu' is unknown; known are tc, xla"):
        grouped_matmul(lhs, rhs, sizes, context, backend="gpu")
    problem = Problem(4, 2, 128, 128)
    with pytest.raises(ValueError, match="tile_rows 8 must be a multiple of 16"):
        kernel.multiply(problem, Config(8, 128), context, lhs[None], rhs[:, None], sizes, 0)


MUTANTS = {
    "a slot is filled while it is read": (
        "c.ring_slots - 1)",
        "c.ring_slots)",
        FaultKind.RACE,
    ),
    "weights are not waited for": (
        "weight_copy(number).wait()",
        "pl.when(number != 1)(weight_copy(number).wait)",
        FaultKind.SEMAPHORE,
    ),
    "the rows of other groups are overwritten": (
        "jnp.where(own, result, others_rows)",
        "jnp.where(own | (begin[visit] > 0), result, others_rows)",
        None,
    ),
    "foreign rows are multiplied by zero": (
        "jnp.where(own, result, others_rows)",
        "own.astype(F32) * result + (~own).astype(F32) * others_rows",
        None,
    ),
    "what is there is not taken over": ("out[...] = existing[0][...]", "pass", None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fault_is_found(name, monkeypatch):
    """These tests can fail: a small change of the kernel's text is noticed, and for what it is."""
    before, after, kind = MUTANTS[name]
    source = inspect.getsource(kernel._body)
    assert before in source
    scope = dict(vars(kernel))
    exec("from __future__ import annotations\n" + source.replace(before, after), scope)
    monkeypatch.setattr(kernel, "_body", scope["_body"])
    lhs, rhs, sizes = normal(0, (56, N_IN)), normal(1, (3, N_IN, 128)), [20, 16, 7]
    lhs[43:] = np.nan
    existing = normal(2, (56, 128))

    def run(interpret, lhs, rhs, sizes, existing):
        context, config = Context(CPU, interpret), Config(16, 128, 2)
        return grouped_matmul(lhs, rhs, sizes, context, existing=existing, config=config)

    arguments = lhs, rhs, np.array(sizes, np.int32), existing
    if kind is not None:
        with pytest.raises(KernelFault) as caught:
            simulate(run, *arguments, allow_nan=True)
        assert caught.value.kind is kind
        return
    wanted = forward(lhs, rhs[:, None], sizes, existing=existing)[0]
    for out in simulate(run, *arguments, allow_nan=True):
        assert not np.allclose(np.asarray(out), wanted, rtol=1e-4, atol=1e-4)
