"""From host arrays to shares of device arrays, with little of them on the host at a time."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.device.quantised import num_bits

PIECE_BYTES = 128 * 2**20
"""A share of a weight that is larger goes to its device in pieces of this size. The next one is read while one is under way."""


class Transfers:
    """Host arrays on their way to devices.

    Args:
      limit_bytes: of host arrays that are under way; one that is larger by itself goes alone.
    """

    def __init__(self, limit_bytes: int = PIECE_BYTES):
        self._limit = limit_bytes
        self._under_way: deque[tuple[int, list[jax.Array]]] = deque()
        self._num_bytes = 0

    def put(self, host: np.ndarray, devices: list[jax.Device]) -> list[jax.Array]:
        """The array on each of the devices. Its memory is not written to again: on a CPU the device array may be that very memory."""
        self.wait(self._limit - host.nbytes)
        if num_bits(host.dtype) < 8:
            host = np.ascontiguousarray(host)  # packed on the way, which is not left to be done across strides
        arrays = [jax.device_put(host, device) for device in devices]
        self._under_way.append((host.nbytes, arrays))
        self._num_bytes += host.nbytes
        return arrays

    def wait(self, num_bytes: int = 0) -> None:
        """Until no more than this is under way."""
        while self._under_way and self._num_bytes > num_bytes:
            size, arrays = self._under_way.popleft()
            for array in arrays:
                array.block_until_ready()
            self._num_bytes -= size


class Share:
    """What one or more devices hold of an array, filled piece by piece along one axis."""

    def __init__(self, shape: tuple[int, ...], axis: int, devices: list[jax.Device], transfers: Transfers):
        self._shape, self._axis, self._devices, self._transfers = shape, axis, devices, transfers
        self.arrays: list[jax.Array] = []

    def put(self, host: np.ndarray, start: int) -> None:
        """Writes a piece that begins at `start` of the axis; the first one may be all there is."""
        pieces = self._transfers.put(host, self._devices)
        if host.shape == self._shape:
            self.arrays = pieces
            return
        if not self.arrays:
            self.arrays = [jnp.zeros(self._shape, host.dtype, device=device) for device in self._devices]
        self.arrays = [
            _write(whole, piece, np.int32(start), self._axis) for whole, piece in zip(self.arrays, pieces, strict=True)
        ]


# In the memory of the whole, of which there would be two for a moment otherwise.
@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write(whole: jax.Array, piece: jax.Array, start: Any, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, piece, start, axis)
