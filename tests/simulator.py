"""Runs Pallas TPU kernels on simulated devices of the CPU and turns whatever is wrong with them into an exception.

How to use it. Write the kernel's caller as a function of the `interpret` parameters and the arrays, and hand it over::

    def exchange(interpret, x):
        call = pl.pallas_call(body, ..., interpret=interpret)
        return jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)

    for output in simulate(exchange, x):
        np.testing.assert_array_equal(output, expected)

    with pytest.raises(KernelFault) as caught:
        simulate(exchange_without_a_wait, x)
    assert caught.value.kind is FaultKind.RACE

The function is traced and compiled once and run once in each mode. `Simulation` keeps the compiled program for more
inputs of the same shapes. Keep arrays tiny; the time goes into compiling (half a second) and into the number of
operations (0.2 to 0.4 ms each and device), hardly into their size. The process needs NPROC well above the number of
devices before jax starts.

What each mode catches. `on_wait` moves a copy when somebody waits for it, the last one started first: it shows data
used too early. `eager` moves a copy at its start: it shows memory overwritten too early. In both modes a fault is

- `race`: two accesses to the same memory that nothing orders, one of them a write, be it by a device or by a copy.
  Also a copy or a signal to a device from which nothing has been heard in this kernel: an entry barrier is missing,
  and the other may not have entered. A race often leaves the *values* right, so the test of a fault asserts the kind.
  A run with races that also ends badly is a race.
- `semaphore`: when all devices have finished, a semaphore is not zero or a copy has not been waited for.
- `nan`: an output holds NaN, which is what floating-point memory holds before it is written. Integers hold their
  maximum.
- `deadlock`: every device waits, which is seen at once, or nothing has happened for `timeout_seconds`.
- `error`: anything raised, such as an access out of bounds, a device that does not exist, or a copy or a wait of no
  bytes (not every TPU program may issue those, so kernels guard them).

What it cannot see. Whether the compiler accepts the kernel (tiling, memory sizes, operations), and anything about
speed. The two modes are two extreme orders of copies, not all orders. A wait takes over everything that was ever
signalled on its semaphore, so when two copies share one, waiting for one looks like waiting for both. From some 500
copies in a kernel on, copies share clocks and a race between two of them may be missed. A strided access counts as
one to everything it steps over. Copies that add do not add, random bits are zeros, and `pltpu.get_tpu_info()` fails:
pass the facts of the chip in.

After any fault the process is clean: the next call works. Private names of jax are used in `simulator_interpreter.py`
only.
"""

import dataclasses
import enum
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from simulator_interpreter import PLACE_NOTE, clean_process, instrumented, shared_memory
from simulator_watch import Deadlock, Watch

Mode = Literal["on_wait", "eager"]


class FaultKind(enum.StrEnum):
    """What is wrong with a kernel."""

    RACE = "race"
    SEMAPHORE = "semaphore"
    NAN = "nan"
    DEADLOCK = "deadlock"
    ERROR = "error"


class KernelFault(AssertionError):
    """A simulated kernel did something wrong: `kind` says what, `mode` how copies moved, `message` the details."""

    def __init__(self, kind: FaultKind, message: str, mode: str) -> None:
        super().__init__(f"[{mode}] {kind}: {message}")
        self.kind = kind
        self.message = message
        self.mode = mode


def _fault(watch: Watch, error: Exception | None, output: Any) -> tuple[FaultKind, str] | None:
    """What was wrong with a run, if anything; a race comes first, because the rest may follow from it."""
    ending = None
    if error is not None:
        failure = error if watch.failure is None else watch.failure
        if isinstance(failure, Deadlock):
            ending = (FaultKind.DEADLOCK, str(failure))
        else:
            places = [note for note in getattr(failure, "__notes__", []) if note.startswith(PLACE_NOTE)]
            ending = (FaultKind.ERROR, "\n  ".join([f"{type(failure).__name__}: {failure}", *places]))
    if watch.races:
        after = [f"and then {ending[0]}: {ending[1]}"] if ending is not None else []
        return FaultKind.RACE, "\n  ".join([f"{len(watch.races)} found, the first:", *watch.races[:5], *after])
    if ending is not None:
        return ending
    if watch.leftovers:
        return FaultKind.SEMAPHORE, "\n  ".join(["left behind:", *watch.leftovers])
    nan = _nan(output)
    return None if nan is None else (FaultKind.NAN, nan)


def _nan(output: Any) -> str | None:
    for path, leaf in jax.tree.leaves_with_path(output):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            with np.errstate(all="ignore"):
                count = int(np.isnan(np.asarray(leaf).astype(np.float32)).sum())
            if count:
                return f"output{jax.tree_util.keystr(path)} holds {count} NaN of {leaf.size} values"
    return None


class Simulation:
    """A kernel that is compiled once and may be run on several inputs of the same shapes.

    Args:
        kernel: `kernel(interpret, *args)` traces pallas_calls with `interpret=interpret`, usually inside shard_map.
        detect_races: find races, and pushes and signals to devices that may not have entered the kernel.
        timeout_seconds: how long nothing may happen. Only needed where a deadlock is not seen at once, as with a device
            that never enters the kernel. Must be longer than `delayed` holds devices back.
        options: further fields of `pltpu.InterpretParams`.
    """

    def __init__(
        self, kernel: Callable[..., Any], *, detect_races: bool = True, timeout_seconds: float = 60.0, **options: Any
    ) -> None:
        fields = {
            "detect_races": detect_races,
            "vector_clock_size": 512,  # the default makes overlapping copies share clocks, which hides their races
            "uninitialized_memory": "nan",
            "out_of_bounds_reads": "raise",
            **options,
        }
        if any(field.name == "on_race" for field in dataclasses.fields(pltpu.InterpretParams)):
            fields["on_race"] = "warn"
        interpret = pltpu.InterpretParams(**fields)
        self._program = jax.jit(lambda *args: kernel(interpret, *args))
        self._watch = Watch(timeout_seconds, shared_memory)

    def run(self, *args: Any, modes: Sequence[Mode] = ("on_wait", "eager"), allow_nan: bool = False) -> list[Any]:
        """Run once per mode and return the outputs, one per mode; raises KernelFault at the first mode with a fault.

        Args:
            modes: when a copy moves: at the last moment ("on_wait") or at its start ("eager").
            allow_nan: do not look for NaN in the outputs.
        """
        outputs = []
        with instrumented(self._watch):
            for mode in modes:
                output, error = None, None
                with self._watch.running(mode):
                    try:
                        output = jax.block_until_ready(self._program(*args))
                    except Exception as caught:
                        error = caught
                        clean_process()
                fault = _fault(self._watch, error, None if allow_nan else output)
                if fault is not None:
                    raise KernelFault(*fault, mode) from error
                outputs.append(output)
        return outputs


def simulate(
    kernel: Callable[..., Any],
    *args: Any,
    modes: Sequence[Mode] = ("on_wait", "eager"),
    detect_races: bool = True,
    timeout_seconds: float = 60.0,
    allow_nan: bool = False,
    **options: Any,
) -> list[Any]:
    """Run `kernel(interpret, *args)` once per mode and return its outputs, one per mode; see `Simulation`."""
    simulation = Simulation(kernel, detect_races=detect_races, timeout_seconds=timeout_seconds, **options)
    return simulation.run(*args, modes=modes, allow_nan=allow_nan)


def delayed(x: jax.Array, axis_name: str | tuple[str, ...], seconds_by_device: Sequence[float]) -> jax.Array:
    """Inside shard_map, pass `x` on after this device's own time, so that the kernel that reads it starts late.

    Args:
        x: an input of the kernel, of any type; the first one, to hold the device back before it allocates anything.
        axis_name: the axis, or the axes, of all devices in the order of `seconds_by_device`.
    """

    def sleep(index: Any) -> np.ndarray:
        time.sleep(seconds_by_device[int(index)])
        return np.asarray(True)

    ready = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.bool_), jax.lax.axis_index(axis_name))
    # A choice rather than a barrier for the optimiser: a barrier is dropped before the program runs.
    return jax.lax.select(jnp.broadcast_to(ready, x.shape), x, jnp.zeros_like(x))
