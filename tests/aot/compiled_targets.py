"""Small kernels of which everything is known, to be compiled and read in another process."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_serve.bench.compiled.program import Program

ANY = pl.BlockSpec(memory_space=pl.ANY)


def _on_first(devices, shape, dtype):
    mesh = Mesh(np.array(devices[:1]), ("only",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def matmul(devices, m, k, n, bm, bk, bn):
    """[m, k] @ [k, n] in bfloat16, tiled, accumulated in float32."""

    def kernel(x, y, out, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == k // bk - 1)
        def _():
            out[...] = total[...].astype(out.dtype)

    function = pl.pallas_call(
        kernel,
        name="matmul",
        grid=(m // bm, n // bn, k // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, q: (i, q)), pl.BlockSpec((bk, bn), lambda i, j, q: (q, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, q: (i, j)),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )
    args = [_on_first(devices, (m, k), jnp.bfloat16), _on_first(devices, (k, n), jnp.bfloat16)]
    return Program(function, args, analytic={"flops": 2 * m * k * n, "hbm_bytes": 2 * (m * k + k * n + m * n)})


def gather(devices, trips, rows, known=True):
    """Sums `trips` blocks of [8, 128] float32, copied from HBM one after the other, as two scalar operands ask."""

    def kernel(count, index, x, out, block, arrived):
        out[...] = jnp.zeros_like(out)

        def body(i, carry):
            copy = pltpu.make_async_copy(x.at[index[i, 3]], block, arrived)
            copy.start()
            copy.wait()
            out[...] += block[...]
            return carry

        lax.fori_loop(0, count[0], body, 0)

    function = pl.pallas_call(
        kernel,
        name="gather",
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[ANY],
            out_specs=pl.BlockSpec((8, 128), lambda i, *_: (0, 0)),
            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA(())],
        ),
    )
    args = [
        _on_first(devices, (1,), jnp.int32),
        _on_first(devices, (rows, 8), jnp.int32),
        _on_first(devices, (16384, 8, 128), jnp.float32),
    ]
    index = np.full((rows, 8), 1 << 20)  # out of bounds, except where the kernel must look
    index[:, 3] = np.arange(rows)
    return Program(function, args, {"^gather": {0: [trips], 1: index.tolist()}} if known else {})


def push(devices, rows):
    """Every device sends [rows, 1024] bfloat16 to every other one, between a barrier and an exchange of signals."""
    n = len(devices)
    mesh = Mesh(np.array(devices), ("ring",))

    def others(step):
        return {"ring": lax.rem(lax.axis_index("ring") + step, n)}

    def kernel(x, out, staged, sent, arrived, credit):
        me = lax.axis_index("ring")
        ready = pltpu.get_barrier_semaphore()
        for step in range(1, n):
            pl.semaphore_signal(ready, device_id=others(step), device_id_type=pl.DeviceIdType.MESH)
        pl.semaphore_wait(ready, n - 1)
        for step in range(1, n):
            pltpu.make_async_remote_copy(
                x, staged.at[me], sent.at[step], arrived, device_id=others(step), device_id_type=pl.DeviceIdType.MESH
            ).start()
        for step in range(1, n):
            pltpu.make_async_copy(staged.at[0], staged.at[0], arrived).wait()
            pltpu.make_async_copy(staged.at[0], staged.at[0], sent.at[step]).wait()
        staged[me] = x[...]
        out[...] = staged[...]
        for step in range(1, n):
            pl.semaphore_signal(credit, device_id=others(step), device_id_type=pl.DeviceIdType.MESH)
        pl.semaphore_wait(credit, n - 1)

    call = pl.pallas_call(
        kernel,
        name="push",
        out_shape=jax.ShapeDtypeStruct((n, rows, 1024), jnp.bfloat16),
        scratch_shapes=[
            pltpu.VMEM((n, rows, 1024), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((n,)),
            pltpu.SemaphoreType.DMA(()),
            pltpu.SemaphoreType.REGULAR,
        ],
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
    )
    spec = PartitionSpec("ring")
    function = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    args = [jax.ShapeDtypeStruct((n * rows, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, spec))]
    return Program(function, args, analytic={"ici_bytes": (n - 1) * rows * 2048})


def too_large(devices):
    """A kernel that wants more VMEM than any chip has."""

    def kernel(x, out, scratch):
        scratch[0] = x[...]
        out[...] = scratch[0]

    function = pl.pallas_call(
        kernel,
        name="too_large",
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((1 << 16, 8, 128), jnp.float32)],
    )
    return Program(function, [_on_first(devices, (8, 128), jnp.float32)])


def scoped(devices):
    """A kernel with a named part, to be traced."""

    def kernel(x, out):
        with jax.named_scope("doubling"):
            out[...] = x[...] + x[...]

    function = pl.pallas_call(kernel, name="scoped", out_shape=jax.ShapeDtypeStruct((64, 128), jnp.float32))
    return Program(function, [_on_first(devices, (64, 128), jnp.float32)])


def not_a_program(devices):
    return functools.partial(len, devices)


def windows(devices, starts, rows, counts):
    """For each of `starts`, reads a row of a table in HBM into SMEM and copies as many blocks as the row's element 5 says.

    Args:
      rows: of the table.
      counts: element 5 by row; other rows say 1000.
    """

    def kernel(first, table, x, out, row, block, arrived):
        out[...] = jnp.zeros_like(out)

        def body(i, carry):
            copy = pltpu.make_async_copy(x, block, arrived)
            copy.start()
            copy.wait()
            out[...] += block[...]
            return carry

        def window(i, carry):
            copy = pltpu.make_async_copy(table.at[first[i]], row, arrived)
            copy.start()
            copy.wait()
            return lax.fori_loop(0, row[0, 5], body, carry)

        lax.fori_loop(0, len(starts), window, 0)

    function = pl.pallas_call(
        kernel,
        name="windows",
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[ANY, ANY],
            out_specs=pl.BlockSpec((8, 128), lambda i, *_: (0, 0)),
            scratch_shapes=[
                pltpu.SMEM((1, 128), jnp.int32),
                pltpu.VMEM((8, 128), jnp.float32),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
    )
    shape = (rows, 1, 128)
    args = [
        _on_first(devices, (len(starts),), jnp.int32),
        _on_first(devices, shape, jnp.int32),
        _on_first(devices, (8, 128), jnp.float32),
    ]
    table = np.full(shape, 1000)
    for row, count in counts.items():
        table[int(row), 0, 5] = count
    return Program(function, args, {"^windows": {0: starts, 1: table}})
