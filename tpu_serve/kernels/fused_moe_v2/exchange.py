"""Moving rows between the devices of a group: entry, pushes, and counting what arrived.

All copies are pushes (the sender writes into the receiver's buffer) and are counted in bytes on the receiver's semaphore. A device that pushes
to itself uses the same call.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def device_id(axis: str, index: Any) -> dict[str | tuple[str, ...], Any]:
    """How Pallas names a device along one mesh axis, the other axes being the caller's own."""
    return {axis: index}


def enter(axis: str, num_devices: int) -> None:
    """Returns once every device of the group is inside the kernel: only then may its buffers be written from outside.

    Calls one after the other need nothing at their end, although signals carry no call number. Of D devices, the first that passes its n-th entry
    has received D * n signals, and nobody has sent it more than n, because sending the next takes having passed; so all have entered n times.
    """
    if num_devices == 1:
        return
    barrier = pltpu.get_barrier_semaphore()
    for index in range(num_devices):
        pl.semaphore_signal(barrier, 1, device_id=device_id(axis, index))
    pl.semaphore_wait(barrier, num_devices)


def peer(axis: str, num_devices: int, distance: Any) -> Any:
    """The device `distance` steps ahead in the ring: everyone starts with another receiver."""
    return jax.lax.rem(jax.lax.axis_index(axis) + distance, num_devices)


def push(source: Any, target: Any, sent: Any, arrived: Any, axis: str, device: Any) -> None:
    """Starts writing `source` into `target` on that device; `sent` counts here, `arrived` there."""
    pltpu.make_async_remote_copy(
        source, target, send_sem=sent, recv_sem=arrived, device_id=device_id(axis, device)
    ).start()


def wait_bytes_of(reference: Any, semaphore: Any) -> None:
    """Waits for as many bytes as the reference holds."""
    pltpu.make_async_copy(reference, reference, semaphore).wait()


MAX_WAIT_BYTES = 64 * 2**20


def wait_rows(buffer: Any, num_rows: Any, semaphore: Any) -> None:
    """Waits for the bytes of so many rows of the buffer, in pieces: a semaphore counts up to a limit."""
    row_bytes = buffer.dtype.itemsize * buffer.shape[1] * buffer.shape[2]
    piece = max(1, min(buffer.shape[0], MAX_WAIT_BYTES // row_bytes))

    def one(_: Any, carry: None) -> None:
        wait_bytes_of(buffer.at[pl.ds(0, piece)], semaphore)

    jax.lax.fori_loop(0, num_rows // piece, one, None)
    rest = jax.lax.rem(num_rows, piece)

    @pl.when(rest > 0)
    def _() -> None:
        wait_bytes_of(buffer.at[pl.ds(0, rest)], semaphore)
