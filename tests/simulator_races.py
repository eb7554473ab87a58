"""Which accesses to simulated memory nothing orders.

Every access carries a vector clock: what its device, or its copy, knew of all the others when it happened. Two accesses
to overlapping parts of a buffer, one of them a write, race unless one's clock is at most the other's everywhere.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

MOST_DIMENSIONS = 8


class RaceDetector:
    """Checks each access against all earlier ones and reports what races.

    Args:
        report: called with the description of a race.
        place: the place in the source that a `source_info` stands for.
    """

    def __init__(self, report: Callable[[str], None], place: Callable[[Any], str]) -> None:
        self._report = report
        self._place = place
        self._reads: dict[Any, _Accesses] = collections.defaultdict(_Accesses)
        self._writes: dict[Any, _Accesses] = collections.defaultdict(_Accesses)
        self._lock = threading.Lock()
        self.races_found = False

    def check_read(self, *access: Any, source_info: Any = None) -> None:
        """Note a read: of whom (one value, or device and core), its clock, the key of the buffer, the indices."""
        self._check("read", access, source_info, against=[("write", self._writes)], note=self._reads)

    def check_write(self, *access: Any, source_info: Any = None) -> None:
        """Note a write; arguments as for a read."""
        against = [("write", self._writes), ("read", self._reads)]
        self._check("write", access, source_info, against=against, note=self._writes)

    def _check(self, kind: str, access: Sequence[Any], source_info: Any, against: Any, note: Any) -> None:
        *actor, clock, key, indices = access
        clock = getattr(clock, "clock", clock)  # an array, or in newer versions of jax an object that holds one
        box = _box(indices)
        with self._lock:
            for other_kind, accesses in against:
                other = accesses[key].unordered(box, clock)
                if other is not None:
                    self.races_found = True
                    self._report(
                        f"{kind} of {_buffer(key, indices)} by {self._actor(actor, source_info)}"
                        f" against {other_kind} by {self._actor(*other)}"
                    )
            note[key].add(box, clock, (actor, source_info))

    def _actor(self, actor: Sequence[Any], source_info: Any) -> str:
        device = actor[0][0] if isinstance(actor[0], tuple) else actor[0]
        # The interpreter gives copies numbers from 100 on and passes them as devices.
        name = f"the copy {device} started" if device >= 100 else f"device {device}"
        return f"{name} at {self._place(source_info)}"


class _Accesses:
    """All reads, or all writes, of one buffer."""

    def __init__(self) -> None:
        self._boxes = np.empty((0, 2, MOST_DIMENSIONS), np.int64)
        self._clocks = np.empty((0, 0), np.int32)
        self._labels: list[Any] = []

    def add(self, box: np.ndarray, clock: np.ndarray, label: Any) -> None:
        count = len(self._labels)
        if count == len(self._boxes):
            capacity = max(16, 2 * count)
            boxes = np.empty((capacity, *self._boxes.shape[1:]), np.int64)
            clocks = np.empty((capacity, len(clock)), np.int32)
            if count:
                boxes[:count], clocks[:count] = self._boxes, self._clocks
            self._boxes, self._clocks = boxes, clocks
        self._boxes[count], self._clocks[count] = box, clock
        self._labels.append(label)

    def unordered(self, box: np.ndarray, clock: np.ndarray) -> Any:
        """The label of an access that overlaps with `box` and is neither before nor after `clock`, or None."""
        boxes = self._boxes[: len(self._labels)]
        (overlapping,) = ((boxes[:, 0] < box[1]) & (box[0] < boxes[:, 1])).all(axis=1).nonzero()
        if not len(overlapping):
            return None
        clocks = self._clocks[overlapping]
        ordered = (clocks <= clock).all(axis=1) != (clocks >= clock).all(axis=1)
        return None if ordered.all() else self._labels[overlapping[ordered.argmin()]]


def _box(indices: Sequence[slice | int]) -> np.ndarray:
    """First and end of the indices in each dimension; a stride is taken to touch what it steps over."""
    box = np.empty((2, MOST_DIMENSIONS), np.int64)
    box[0], box[1] = 0, np.iinfo(np.int64).max
    for dimension, index in enumerate(indices):
        if not isinstance(index, slice):
            box[:, dimension] = index, index + 1
        elif index.stop is not None:
            box[:, dimension] = index.start or 0, index.stop
    return box


def _buffer(key: Sequence[Any], indices: Sequence[slice | int]) -> str:
    space, number, device, *_ = key
    parts = [f"{i.start or 0}:{i.stop}" if isinstance(i, slice) else str(i) for i in indices]
    return f"{space} buffer {number} [{', '.join(parts) or '...'}] of device {device}"
