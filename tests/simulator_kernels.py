"""Tiny kernels that the tests of the simulator harness make faulty, and how they look at a fault."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec
from simulator import KernelFault, Simulation

DEVICES = 4
BLOCK = (8, 128)
ANY, VMEM = pl.ANY, pltpu.VMEM
DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
BUFFER = pltpu.VMEM(BLOCK, jnp.float32)


def on_devices(
    body, scratch=(), *, in_space=ANY, out_space=ANY, out_rows=8, collective_id=0, around=lambda x, call: call(x)
):
    """A kernel for `simulate`: a device has its rows of `x`, and `body(x, o, *scratch)` writes `o` of `out_rows` rows.

    `around(x, call)` may do something before `call(x)`, or not call it.
    """

    def kernel(interpret, x):
        def one_device(x):
            call = pl.pallas_call(
                body,
                out_shape=jax.ShapeDtypeStruct((out_rows, *x.shape[1:]), x.dtype),
                in_specs=[pl.BlockSpec(memory_space=in_space)],
                out_specs=pl.BlockSpec(memory_space=out_space),
                scratch_shapes=list(scratch),
                compiler_params=pltpu.CompilerParams(collective_id=collective_id),
                interpret=interpret,
            )
            return around(x, call)

        mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
        spec = PartitionSpec("x")
        return jax.shard_map(one_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    return kernel


def rows(dtype=np.float32):
    """Eight rows for each device, all values different enough to tell devices apart."""
    return (np.arange(DEVICES * 8)[:, None] * np.ones((1, 128))).astype(dtype)


def me():
    return lax.axis_index("x")


def right():
    return lax.rem(me() + 1, DEVICES)


def push(source, target, send, receive, device):
    return pltpu.make_async_remote_copy(source, target, send, receive, device_id={"x": device})


def signal(semaphore, device, count=1):
    pl.semaphore_signal(semaphore, count, device_id={"x": device})


def barrier():
    semaphore = pltpu.get_barrier_semaphore()
    for device in range(DEVICES):
        signal(semaphore, device)
    pl.semaphore_wait(semaphore, DEVICES)


def exchange(x, o, buffer, send, receive):
    """Every device pushes its rows to the right."""
    barrier()
    copy = push(x, buffer, send, receive, right())
    copy.start()
    copy.wait()
    o[...] = buffer[...]


EXCHANGE_SCRATCH = (BUFFER, DMA, DMA)
CLEAN = Simulation(on_devices(exchange, EXCHANGE_SCRATCH, out_space=VMEM))


def assert_exchange_works():
    for output in CLEAN.run(rows(), modes=("eager",)):
        np.testing.assert_array_equal(output, np.roll(rows(), 8, axis=0))


def faults_of(kernel, x=None, *, modes=("on_wait", "eager"), **settings):
    """The faults that the modes find, each by itself; after each a correct kernel must run in the same process."""
    simulation = Simulation(kernel, **settings)
    faults = []
    for mode in modes:
        with pytest.raises(KernelFault) as caught:
            simulation.run(rows() if x is None else x, modes=(mode,))
        fault = caught.value
        assert_exchange_works()
        assert fault.mode == mode
        assert str(fault) == f"[{mode}] {fault.kind}: {fault.message}"
        faults.append(fault)
    return faults
