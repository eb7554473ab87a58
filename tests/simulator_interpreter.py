"""What the simulator harness changes in the interpreter of Pallas TPU kernels, all of it while `simulate` runs.

This is the one file of the tests that uses private names of jax. It lets the interpreter tell a `Watch` what happens,
runs one compiled program in both modes, refuses what no kernel should do, stores under masks as it should, and makes it
all faster.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src import dispatch, source_info_util
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import shared_memory as memory
from jax._src.pallas.mosaic.interpret import utils as interpreter_utils
from jax.experimental.pallas import tpu as pltpu
from simulator_races import RaceDetector
from simulator_watch import Wait, Watch

PLACE_NOTE = "in the kernel at "  # begins the note with which an error of the interpreter says where it happened


def _check_private_names() -> None:
    """Raise ImportError when this jax lacks a private name that the harness relies on."""
    needed = {
        callbacks: ["io_callback", "io_callback_impl"],
        dispatch: ["runtime_tokens"],
        source_info_util: ["current", "summarize"],
        interpreter: [
            "DMA",
            "DmaState",
            "RaceDetectionState",
            "_clear_shared_memory",
            "_get_shared_memory",
            "_initialize_shared_memory",
            "_shared_memory",
            "_validate",
            "semaphore_wait",
        ],
        interpreter_utils: ["to_range"],
        memory: ["Semaphore", "SharedMemory"],
        memory.Semaphore: ["enqueue_task", "signal", "wait"],
        memory.SharedMemory: ["get_buffer_content", "get_random_virtual_device_id", "swap_buffer_content"],
    }
    for owner, names in needed.items():
        for name in names:
            if not hasattr(owner, name):
                raise ImportError(f"jax {jax.__version__} has no {owner.__name__}.{name}, which {__name__}.py needs")


_check_private_names()


def _place(source_info: Any) -> str:
    """File, line and function, for a message."""
    if source_info is None:
        return "an unknown place"
    return source_info_util.summarize(source_info) or "a place inside jax, such as sync_copy"


class _Copy(interpreter.DMA):
    """A copy that refuses to be empty, and one that tells the watch when its target may not be there yet."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for transforms in (self.src_transforms, self.dst_transforms):
            for part in interpreter_utils.to_range(transforms):
                if isinstance(part, slice) and part.stop <= part.start:
                    # The interpreter lets some empty copies pass and fails on others.
                    raise ValueError("a copy of no bytes: guard it")
        shared = self.dst_sem.shared_memory
        _check_device(shared, self.dst_device_id)
        if self.dst_device_id != self.src_device_id and not _has_heard(shared, self.clock, self.dst_device_id):
            _current_watch().note_race(
                f"the copy started at {_place(self.source_info)} by device {self.src_device_id} goes to device"
                f" {self.dst_device_id}, from which it has not heard: no barrier since entry"
            )


def _check_device(shared: Any, device: int) -> None:
    if not 0 <= device < shared.num_devices:
        raise IndexError(f"device {device} does not exist, there are {shared.num_devices}")


def _has_heard(shared: Any, clock: Any, device: int) -> bool:
    """Whether anything that `device` did in this kernel happened before `clock`; True without race detection."""
    if clock is None:
        return True
    clock = getattr(clock, "clock", clock)
    return any(clock[core] for core in shared.get_global_core_ids(device))


class _Semaphore(memory.Semaphore):
    """A semaphore that tells the watch who waits for it, and who signals a device that may not be there yet."""

    FIRST_ALLOCATED = 2000  # the interpreter numbers semaphores from here; smaller numbers are collective ids

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.unfinished = [0] * self.num_cores  # per core: copies queued or being moved that will signal it
        self.signalled = [0] * self.num_cores  # per core: all that ever came, of which
        self.consumed = [0] * self.num_cores  # so much was taken by waits that have returned

    def enqueue_task(self, task: Callable[[], None], global_core_id: int) -> None:
        def counted() -> None:
            try:
                task()
            finally:
                with self.cv:
                    self.unfinished[global_core_id] -= 1

        copy = task.__self__
        counted.has_moved = lambda: copy.state is interpreter.DmaState.COMPLETED
        counted.place = lambda: _place(copy.source_info)
        with self.cv:
            self.unfinished[global_core_id] += 1
        super().enqueue_task(counted, global_core_id)

    def signal(self, inc: int, global_core_id: int, clock: Any, logging_info: Any = None) -> None:
        shared = self.shared_memory
        device = int(global_core_id) // shared.num_cores_per_device
        _check_device(shared, device)
        signaller = getattr(logging_info, "device_id", device)
        if self.id >= self.FIRST_ALLOCATED and signaller != device and not _has_heard(shared, clock, device):
            _current_watch().note_race(
                f"the signal at {_place(logging_info.source_info)} by device {signaller} goes to device {device}, from"
                " which it has not heard: no barrier since entry"
            )
        with self.cv:
            self.signalled[int(global_core_id)] += int(inc)
            super().signal(inc, global_core_id, clock, logging_info=logging_info)

    def wait(self, value: int, global_core_id: int, *, has_tasks: bool = False, logging_info: Any = None) -> None:
        source_info = getattr(logging_info, "source_info", None)
        if value == 0:
            # The interpreter asserts here that somebody has signalled before, which nobody needs to have done.
            if has_tasks:
                raise ValueError("a wait for no bytes: guard it")
            return
        watch, core = _current_watch(), int(global_core_id)
        watch.progress += 1
        needed = self.consumed[core] + int(value)
        watch.waits[core] = Wait(self, core, int(value), needed, lambda: _place(source_info))
        try:
            super().wait(value, core, has_tasks=has_tasks, logging_info=logging_info)
            self.consumed[core] = needed
        finally:
            watch.progress += 1
            watch.waits.pop(core, None)

    def name(self) -> str:
        number = self.id - self.FIRST_ALLOCATED
        return f"semaphore {number}" if number >= 0 else f"the barrier semaphore {self.id}"


_watch: Watch | None = None


def _current_watch() -> Watch:
    if _watch is None:
        raise RuntimeError("a simulation outlived its call of simulate()")
    return _watch


@contextlib.contextmanager
def instrumented(watch: Watch) -> Iterator[None]:
    """Let the interpreter report to `watch`, take the mode from it, and store under masks as it should."""
    global _watch
    if _watch is not None:
        raise RuntimeError("simulate() is already running in this process")

    original_initialize = interpreter._initialize_shared_memory
    original_get, original_clear = interpreter._get_shared_memory, interpreter._clear_shared_memory
    original_stage_out, original_call_back = callbacks.io_callback, callbacks.io_callback_impl
    original_swap = memory.SharedMemory.swap_buffer_content

    def initialize(*arguments: Any, interpret_params: Any) -> Any:
        # Read when it runs, not when it is traced: one compiled program serves all modes.
        params = dataclasses.replace(interpret_params, dma_execution_mode=_current_watch().mode)
        return original_initialize(*arguments, interpret_params=params)

    def get() -> Any:
        _current_watch().progress += 1
        return original_get()

    def clear() -> None:
        if interpreter._shared_memory is not None:
            _current_watch().all_finished(interpreter._shared_memory)
        original_clear()

    def swap(self: Any, key: Any, index: Any, value: Any, mask: Any, core: Any, *rest: Any, **named: Any) -> Any:
        # The interpreter marks lanes of a masked store as out of bounds along the wrong axis. A store that fits is
        # the same as an unmasked one of the merged values.
        if mask is not None:
            old = self.get_buffer_content(key, index, core, increment_clock=False)[0]
            if old is not None and old.shape == value.shape:
                merged = np.where(mask, value, old)
                _, *others = original_swap(self, key, index, merged, None, core, *rest, **named)
                return np.where(mask, old, value), *others
        return original_swap(self, key, index, value, mask, core, *rest, **named)

    numbers = itertools.count()

    def next_clock(self: Any) -> int:
        # Each copy has a clock of its own as long as there are enough; the interpreter draws one at random.
        return self.num_cores + next(numbers) % (self.vector_clock_size - self.num_cores)

    def stage_out(function: Any, *arguments: Any, **named: Any) -> Any:
        if function is interpreter.semaphore_wait:
            # The interpreter leaves it out, and the message of a deadlock lives by it.
            function = functools.partial(function, source_info=source_info_util.current())
        return original_stage_out(function, *arguments, **named)

    def call_back(*arrays: Any, callback: Any, **named: Any) -> Any:
        # The interpreter's own callbacks need no jax arrays. Making them would take half of the time, and a thread.
        function, source_info = callback.callback_func, None
        while isinstance(function, functools.partial):
            source_info = function.keywords.get("source_info", source_info)
            function = function.func
        if function.__module__ not in (interpreter.__name__, __name__):
            return original_call_back(*arrays, callback=callback, **named)
        try:
            return [np.asarray(result) for result in callback(*arrays)]
        except Exception as error:
            if source_info is not None:
                error.add_note(f"{PLACE_NOTE}{_place(source_info)}")
            raise

    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        replace(interpreter, "_initialize_shared_memory", initialize)
        replace(interpreter, "_get_shared_memory", get)
        replace(interpreter, "_clear_shared_memory", clear)
        # What is left behind is noted when all devices have finished: a late signal is not missed, nothing is printed.
        replace(interpreter, "_validate", lambda token, device: token)
        replace(interpreter, "RaceDetectionState", lambda **_: RaceDetector(_current_watch().note_race, _place))
        replace(interpreter, "DMA", _Copy)
        replace(memory, "Semaphore", _Semaphore)
        replace(memory.SharedMemory, "swap_buffer_content", swap)
        replace(memory.SharedMemory, "get_random_virtual_device_id", next_clock)
        replace(callbacks, "io_callback", stage_out)
        replace(callbacks, "io_callback_impl", call_back)
        _watch = watch
        try:
            yield
        finally:
            _watch = None


def shared_memory() -> Any:
    """The interpreter's state of the kernel that runs, or None."""
    return interpreter._shared_memory


def clean_process() -> None:
    """Forget a failed simulation, once every device has ended it: jax hands errors on through its effect tokens."""
    tokens = dispatch.runtime_tokens
    for token in [*tokens.output_runtime_tokens.values(), *tokens.current_tokens.values()]:
        with contextlib.suppress(Exception):
            token.block_until_ready()
    tokens.clear()
    pltpu.reset_tpu_interpret_mode_state()
