"""The devices that an engine runs on: those of this host, or as many simulated ones as a CPU is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import jax

from tpu_serve.config import ConfigError, ParallelOptions


def take_devices(options: ParallelOptions) -> list[jax.Device]:
    """The first devices of this host, as many as are asked for.

    Where more than one is wanted and jax has not been used in this process, a CPU is made to show itself as that many devices.

    Raises:
      ConfigError: there are fewer devices; the message has both numbers.
    """
    _skip_absent_tpu()
    if options.num_devices > 1:
        _prepare_simulation(options)
    return first_devices(jax.local_devices(), options)


def _skip_absent_tpu() -> None:
    """On a machine where libtpu is installed for its compiler alone, it would look for a TPU and print lines of complaints."""
    has_tpu = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    only_libtpu = find_spec("libtpu") is not None and not entry_points(group="jax_plugins")
    if only_libtpu and not has_tpu and not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")


def _prepare_simulation(options: ParallelOptions) -> None:
    """Asks for CPU devices and for threads enough to run them. Changes nothing on a TPU host, whose CPU is not asked for its devices."""
    if jax.config.values["jax_num_cpu_devices"] < options.num_devices:
        with suppress(RuntimeError):  # jax has been used: what devices there are is settled
            jax.config.update("jax_num_cpu_devices", options.num_devices)
    os.environ["NPROC"] = str(options.num_host_threads)


def first_devices(devices: Sequence[jax.Device], options: ParallelOptions) -> list[jax.Device]:
    """The first of some devices, as many as are asked for.

    Raises:
      ConfigError: there are fewer; the message has both numbers.
    """
    wanted, platform = options.num_devices, devices[0].platform
    if wanted <= len(devices):
        return list(devices[:wanted])
    product = f", {wanted} devices in all," if options.data_parallel_size > 1 else ""
    message = (
        f"{options.devices_asked}{product} is more than the {len(devices)} {platform} devices that this process has."
    )
    if platform == "cpu":
        message += (
            f" More could be simulated, but jax was used here before: set JAX_NUM_CPU_DEVICES={wanted} and "
            f"NPROC={options.num_host_threads} in the environment before the process starts."
        )
    raise ConfigError(message)
