"""How simulated kernels end: with something left behind, never, or late."""

import time

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from simulator import FaultKind, Simulation, delayed, simulate
from simulator_interpreter import Watch
from simulator_kernels import (
    BLOCK,
    BUFFER,
    DEVICES,
    DMA,
    EXCHANGE_SCRATCH,
    REGULAR,
    VMEM,
    barrier,
    exchange,
    faults_of,
    me,
    on_devices,
    push,
    right,
    rows,
    signal,
)


def test_a_copy_nobody_waits_for_is_found_even_where_no_value_can_be_nan():
    def body(x, o, semaphore):
        pltpu.make_async_copy(x, o, semaphore).start()

    late, early = faults_of(on_devices(body, [DMA]), rows(np.int32))
    assert late.kind is FaultKind.SEMAPHORE
    assert early.kind is FaultKind.RACE, "the copy is made, and the output is read while it may still be going on"
    assert "test_simulator_endings.py" in late.message
    assert "test_simulator_endings.py" in early.message


def test_a_send_nobody_waits_for_leaves_its_semaphore():
    def body(x, o, buffer, send, receive):
        barrier()
        copy = push(x, buffer, send, receive, right())
        copy.start()
        copy.wait_recv()
        o[...] = buffer[...]

    for fault in faults_of(on_devices(body, EXCHANGE_SCRATCH, out_space=VMEM)):
        assert fault.kind is FaultKind.SEMAPHORE
        assert "semaphore 0 of device 3 is 4096" in fault.message


def test_a_signal_after_its_target_has_finished_is_found():
    def body(x, o, buffer, done):
        barrier()
        pltpu.sync_copy(x, o)

        @pl.when(me() == 1)
        def _():
            buffer[...] = jnp.zeros(BLOCK)
            lax.fori_loop(0, 200, lambda _, carry: carry + buffer[0, 0].astype(jnp.int32), jnp.int32(0))
            signal(done, 0, 2)

    for fault in faults_of(on_devices(body, [BUFFER, REGULAR])):
        assert fault.kind is FaultKind.SEMAPHORE
        assert "semaphore 0 of device 0 is 2" in fault.message
        assert fault.message.count("device") == 1


def test_a_barrier_semaphore_that_is_not_used_up_is_found():
    def body(x, o):
        barrier()
        signal(pltpu.get_barrier_semaphore(), me())
        pltpu.sync_copy(x, o)

    for fault in faults_of(on_devices(body)):
        assert fault.kind is FaultKind.SEMAPHORE
        assert "the barrier semaphore 0 of device 2 is 1" in fault.message


def test_memory_nobody_wrote_is_nan():
    def body(x, o, buffer):
        o[...] = buffer[...]

    kernel = on_devices(body, [BUFFER], out_space=VMEM)
    for fault in faults_of(kernel):
        assert fault.kind is FaultKind.NAN
        assert "holds 4096 NaN of 4096" in fault.message
    assert np.isnan(simulate(kernel, rows(), allow_nan=True)[0]).all()


def test_a_wait_nobody_signals_is_a_deadlock_that_is_seen_at_once():
    def body(x, o, never):
        barrier()

        @pl.when(me() == 2)
        def _():
            pl.semaphore_wait(never, 3)

        pltpu.sync_copy(x, o)

    start = time.monotonic()
    for fault in faults_of(on_devices(body, [REGULAR])):
        assert fault.kind is FaultKind.DEADLOCK
        assert "device 2 waits at" in fault.message
        assert "until semaphore 0, now 0, is 3" in fault.message
        assert "test_simulator_endings.py" in fault.message
        assert "3 of 4 devices are at the exit" in fault.message
    assert time.monotonic() - start < 60, "one timeout is 60 s"


def test_a_wait_for_more_bytes_than_were_sent_is_a_deadlock():
    def body(x, o, semaphore):
        pltpu.make_async_copy(x.at[pl.ds(0, 4)], o.at[pl.ds(0, 4)], semaphore).start()
        pltpu.make_async_copy(x, o, semaphore).wait()

    for fault in faults_of(on_devices(body, [DMA])):
        assert fault.kind is FaultKind.DEADLOCK
        assert "now 2048, is 4096" in fault.message
        assert "semaphore 0 of device 3 is 2048" in fault.message


def test_a_missing_send_on_one_device_is_a_deadlock():
    def body(x, o, buffer, send, receive):
        barrier()
        copy = push(x, buffer, send, receive, right())

        @pl.when(me() != 1)
        def _():
            copy.start()
            copy.wait_send()

        copy.wait_recv()
        o[...] = buffer[...]

    for fault in faults_of(on_devices(body, EXCHANGE_SCRATCH, out_space=VMEM)):
        assert fault.kind is FaultKind.DEADLOCK
        assert "device 2 waits at" in fault.message
        assert "device 3 waits at" not in fault.message


def test_a_device_that_never_enters_is_a_deadlock_after_the_timeout(monkeypatch):
    monkeypatch.setattr(Watch, "GRACE_SECONDS", 0.3)

    def skipping(x, call):
        return lax.cond(me() == 0, lambda x: x, call, x)

    kernel = on_devices(exchange, EXCHANGE_SCRATCH, out_space=VMEM, around=skipping)
    for fault in faults_of(kernel, timeout_seconds=0.5):
        assert fault.kind is FaultKind.DEADLOCK
        assert "nothing happened for 0.5 s" in fault.message


def test_a_slow_device_is_not_a_deadlock():
    def late(x, call):
        return call(delayed(x, "x", [0.0, 0.0, 0.5, 0.0]))

    simulation = Simulation(on_devices(exchange, EXCHANGE_SCRATCH, out_space=VMEM, around=late))
    simulation.run(rows())
    start = time.monotonic()  # the compiled program takes a tenth of a second by itself
    for output in simulation.run(rows()):
        np.testing.assert_array_equal(output, np.roll(rows(), 8, axis=0))
    assert time.monotonic() - start >= 2 * 0.5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4])
def test_a_delay_changes_no_value(dtype):
    def copy(x, o):
        pltpu.sync_copy(x, o)

    x = jnp.asarray(np.random.default_rng(0).integers(-7, 8, (DEVICES * 8, 128)), dtype)
    kernel = on_devices(copy, around=lambda x, call: call(delayed(x, "x", [0.0] * DEVICES)))
    for output in simulate(kernel, x):
        np.testing.assert_array_equal(np.asarray(output, np.float32), np.asarray(x, np.float32))


def test_a_delayed_device_is_not_there_yet():
    def body(x, o, buffer, send, receive):
        copy = push(x, buffer, send, receive, 2)

        @pl.when(me() == 1)
        def _():
            copy.start()
            copy.wait_send()

        @pl.when(me() == 2)
        def _():
            copy.wait_recv()

        o[...] = jnp.zeros(BLOCK)

    def late(x, call):
        return call(delayed(x, "x", [0.0, 0.0, 1.5, 0.0]))

    kernel = on_devices(body, EXCHANGE_SCRATCH, out_space=VMEM, around=late)
    (fault,) = faults_of(kernel, modes=("eager",), detect_races=False)
    assert fault.kind is FaultKind.ERROR
    assert "KeyError: ('vmem'" in fault.message
