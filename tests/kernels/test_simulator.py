"""The simulator harness finds races: correct kernels pass and each planted fault is named, in both modes."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from simulator import FaultKind, simulate
from simulator_kernels import (
    BLOCK,
    BUFFER,
    CLEAN,
    DEVICES,
    DMA,
    EXCHANGE_SCRATCH,
    REGULAR,
    VMEM,
    barrier,
    faults_of,
    me,
    on_devices,
    push,
    right,
    rows,
    signal,
)


def test_a_correct_exchange_passes_in_both_modes():
    outputs = CLEAN.run(rows())
    assert len(outputs) == 2
    for shift, x in enumerate([rows(), rows() + 1, -rows()]):
        for output in CLEAN.run(x):
            np.testing.assert_array_equal(output, np.roll(x, 8, axis=0), err_msg=f"input {shift}")


def test_a_read_before_the_copy_arrived_is_a_race():
    def body(x, o, buffer, send, receive):
        barrier()
        copy = push(x, buffer, send, receive, right())
        copy.start()
        copy.wait_send()
        o[...] = buffer[...]
        copy.wait_recv()

    for fault in faults_of(on_devices(body, EXCHANGE_SCRATCH, out_space=VMEM)):
        assert fault.kind is FaultKind.RACE
        assert "vmem" in fault.message
        assert "test_simulator.py" in fault.message


def test_a_source_overwritten_before_it_was_sent_is_a_race():
    def body(x, o, buffer, send, receive):
        buffer[...] = x[...]
        barrier()
        copy = push(buffer, o, send, receive, right())
        copy.start()
        copy.wait_recv()
        buffer[...] = jnp.zeros(BLOCK)
        copy.wait_send()

    for fault in faults_of(on_devices(body, EXCHANGE_SCRATCH, in_space=VMEM)):
        assert fault.kind is FaultKind.RACE


@pytest.mark.parametrize("own_rows", [True, False])
def test_two_devices_that_write_one_row_of_a_third_race(own_rows):
    def body(x, o, buffer, send, receive):
        barrier()
        row = me() if own_rows else 0
        copy = push(x.at[pl.ds(row, 1)], o.at[pl.ds(row, 1)], send, receive, 0)
        copy.start()
        copy.wait_send()

        @pl.when(me() == 0)
        def _():
            for _ in range(DEVICES):
                copy.wait_recv()

    kernel = on_devices(body, EXCHANGE_SCRATCH)
    if own_rows:
        simulate(kernel, rows(), allow_nan=True)
    else:
        for fault in faults_of(kernel):
            assert fault.kind is FaultKind.RACE


def test_a_push_into_memory_that_its_owner_uses_is_a_race():
    def body(x, o, buffer, send, receive):
        barrier()
        buffer[...] = jnp.zeros(BLOCK)
        copy = push(x, buffer, send, receive, right())
        copy.start()
        copy.wait()
        o[...] = buffer[...]

    for fault in faults_of(on_devices(body, EXCHANGE_SCRATCH, out_space=VMEM)):
        assert fault.kind is FaultKind.RACE


@pytest.mark.parametrize("second_at", [8, 4])
def test_two_copies_to_overlapping_rows_race(second_at):
    def body(x, o, semaphores):
        first = pltpu.make_async_copy(x, o.at[pl.ds(0, 8)], semaphores.at[0])
        second = pltpu.make_async_copy(x, o.at[pl.ds(second_at, 8)], semaphores.at[1])
        first.start()
        second.start()
        first.wait()
        second.wait()

    kernel = on_devices(body, [DMA((2,))], out_rows=16)
    if second_at == 8:
        for output in simulate(kernel, rows()):
            np.testing.assert_array_equal(output.reshape(DEVICES, 2, *BLOCK)[:, 1], rows().reshape(DEVICES, *BLOCK))
    else:
        for fault in faults_of(kernel):
            assert fault.kind is FaultKind.RACE


def test_a_race_in_an_earlier_kernel_of_a_program_is_found():
    def racing(x, o, buffer, semaphore):
        copy = pltpu.make_async_copy(x, buffer, semaphore)
        copy.start()
        o[...] = buffer[...]
        copy.wait()

    def clean(x, o, buffer, semaphore):
        pltpu.sync_copy(x, buffer)
        o[...] = jnp.zeros(BLOCK)

    def both(interpret, x):
        scratch = (BUFFER, DMA)
        first = on_devices(racing, scratch, out_space=VMEM)(interpret, x)
        return on_devices(clean, scratch, out_space=VMEM)(interpret, first)

    for fault in faults_of(both):
        assert fault.kind is FaultKind.RACE


@pytest.mark.parametrize("collective_id", [0, None])
def test_a_push_without_an_entry_barrier_is_a_race(collective_id):
    def body(x, o, buffer, send, receive):
        copy = push(x, buffer, send, receive, right())
        copy.start()
        copy.wait()
        o[...] = buffer[...]

    kernel = on_devices(body, EXCHANGE_SCRATCH, out_space=VMEM, collective_id=collective_id)
    for fault in faults_of(kernel):
        assert fault.kind is FaultKind.RACE
        assert "no barrier since entry" in fault.message


def test_a_signal_without_an_entry_barrier_is_a_race():
    def body(x, o, ready):
        signal(ready, right())
        pl.semaphore_wait(ready, 1)
        pltpu.sync_copy(x, o)

    for fault in faults_of(on_devices(body, [REGULAR])):
        assert fault.kind is FaultKind.RACE
        assert "no barrier since entry" in fault.message


def test_a_barrier_among_neighbours_is_enough_for_pushes_among_neighbours():
    def body(x, o, buffer, send, receive):
        semaphore = pltpu.get_barrier_semaphore()
        left = lax.rem(me() + DEVICES - 1, DEVICES)
        signal(semaphore, left)
        signal(semaphore, right())
        pl.semaphore_wait(semaphore, 2)
        copy = push(x, buffer, send, receive, right())
        copy.start()
        copy.wait()
        o[...] = buffer[...]

    for output in simulate(on_devices(body, EXCHANGE_SCRATCH, out_space=VMEM), rows()):
        np.testing.assert_array_equal(output, np.roll(rows(), 8, axis=0))
