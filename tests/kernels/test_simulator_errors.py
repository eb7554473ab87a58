"""What raises in a simulated kernel is an error, the process is clean afterwards, and correct kernels do not raise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from simulator import FaultKind, KernelFault, delayed, simulate
from simulator_interpreter import Watch
from simulator_kernels import (
    ANY,
    DEVICES,
    DMA,
    EXCHANGE_SCRATCH,
    REGULAR,
    VMEM,
    assert_exchange_works,
    barrier,
    faults_of,
    me,
    on_devices,
    push,
    right,
    rows,
)


def outside_vmem(x, o, buffer, send, receive):
    o[...] = buffer[pl.ds(x[0, 0].astype(jnp.int32) + 4, 8), :]


def outside_local_copy(x, o, buffer, send, receive):
    copy = pltpu.make_async_copy(x, o.at[pl.ds(4 + me(), 8)], send)
    copy.start()
    copy.wait()


def outside_remote_copy(x, o, buffer, send, receive):
    barrier()
    copy = push(x, o.at[pl.ds(4 + me(), 8)], send, receive, right())
    copy.start()
    copy.wait()


def no_such_device(x, o, buffer, send, receive):
    barrier()
    copy = push(x, o, send, receive, me() + 1)
    copy.start()
    copy.wait()


def empty_copy(x, o, buffer, send, receive):
    pltpu.sync_copy(x, o)
    rows = jnp.minimum(me(), 0)
    copy = pltpu.make_async_copy(x.at[pl.ds(0, rows)], o.at[pl.ds(0, rows)], send)
    copy.start()
    copy.wait()


def empty_wait(x, o, buffer, send, receive):
    copy = pltpu.make_async_copy(x, o, send)
    copy.start()
    copy.wait()
    rows = jnp.minimum(me(), 0)
    pltpu.make_async_copy(x.at[pl.ds(0, rows)], o.at[pl.ds(0, rows)], send).wait()


@pytest.mark.parametrize(
    ("body", "space", "words"),
    [
        (outside_vmem, VMEM, "Out-of-bounds read"),
        (outside_local_copy, ANY, "Out-of-bounds write"),
        (outside_remote_copy, ANY, "Out-of-bounds write"),
        (no_such_device, ANY, "device 4 does not exist, there are 4"),
        (empty_copy, ANY, "a copy of no bytes"),
        (empty_wait, ANY, "a wait for no bytes"),
    ],
)
def test_an_impossible_access_is_an_error(body, space, words):
    for fault in faults_of(on_devices(body, EXCHANGE_SCRATCH, in_space=space, out_space=space)):
        assert fault.kind is FaultKind.ERROR
        assert words in fault.message
        assert f"({body.__name__})" in fault.message


@pytest.mark.parametrize(("late", "grace"), [(0.0, 5.0), (0.5, 5.0), (0.5, 0.1)])
def test_an_error_on_one_device_ends_them_all(late, grace, monkeypatch):
    """Also where a device comes so late that the others have given up on it."""
    monkeypatch.setattr(Watch, "GRACE_SECONDS", grace)

    def body(x, o, buffer, send, receive):
        pltpu.sync_copy(x.at[pl.ds(jnp.where(me() == 1, 100, 0), 8)], buffer)
        barrier()
        copy = push(buffer, o, send, receive, right())
        copy.start()
        copy.wait()

    def around(x, call):
        return call(delayed(x, "x", [0.0, 0.0, 0.0, late]))

    kernel = on_devices(body, EXCHANGE_SCRATCH, around=around)
    for fault in faults_of(kernel):
        assert fault.kind is FaultKind.ERROR
        assert "Out-of-bounds read" in fault.message


def test_what_raises_while_it_is_traced_is_an_error_with_its_cause():
    def body(x, o):
        raise NotImplementedError("three columns")

    for fault in faults_of(on_devices(body)):
        assert fault.kind is FaultKind.ERROR
        assert fault.message == "NotImplementedError: three columns"
        assert isinstance(fault.__cause__, NotImplementedError)


def test_a_wait_for_zero_of_a_regular_semaphore_goes_on():
    def body(x, o, semaphore):
        pl.semaphore_wait(semaphore, jnp.minimum(me(), 0))
        pltpu.sync_copy(x, o)

    for output in simulate(on_devices(body, [REGULAR]), rows()):
        np.testing.assert_array_equal(output, rows())


def test_a_masked_store_to_a_tall_array_stores_its_lanes():
    """The interpreter alone takes it for an access out of bounds."""

    def body(x, o):
        o[...] = x[...]
        lanes = lax.broadcasted_iota(jnp.int32, o.shape, 1)
        pltpu.store(o, -x[...], mask=lanes % 2 == 0)

    x = np.arange(DEVICES * 256 * 128, dtype=np.float32).reshape(-1, 128)
    expected = np.where(np.arange(128) % 2 == 0, -x, x)
    for output in simulate(on_devices(body, in_space=VMEM, out_space=VMEM, out_rows=256), x):
        np.testing.assert_array_equal(output, expected)


def test_a_kernel_under_a_jit_of_its_own_still_runs_in_either_mode():
    def body(x, o, semaphore):
        pltpu.make_async_copy(x, o, semaphore).start()

    kernel = jax.jit(on_devices(body, [DMA]), static_argnums=0)
    for modes, kind in [("eager", FaultKind.RACE), ("on_wait", FaultKind.SEMAPHORE), ("eager", FaultKind.RACE)]:
        (fault,) = faults_of(kernel, modes=(modes,))
        assert fault.kind is kind


def test_a_simulation_inside_a_simulation_is_refused():
    def kernel(interpret, x):
        assert_exchange_works()
        return x

    with pytest.raises(KernelFault, match="already running"):
        simulate(kernel, rows())
    assert_exchange_works()
