"""How a kernel of this folder is called: over which mesh axis, for which chip, compiled or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.buffers import Buffer


def scratch_of(tree: dict[str, Any]) -> dict[str, Any]:
    """Pallas scratch for declared buffers."""
    return jax.tree.map(_scratch, tree, is_leaf=lambda one: isinstance(one, Buffer))


def _scratch(buffer: Buffer) -> Any:
    if buffer.space == "dma":
        return pltpu.SemaphoreType.DMA(buffer.shape)
    return (pltpu.SMEM if buffer.space == "smem" else pltpu.VMEM)(buffer.shape, jnp.dtype(buffer.dtype))


@dataclass(frozen=True)
class Call:
    """The surroundings of a call.

    Attributes:
      axis: name of the mesh axis over which the group of devices lies, inside `shard_map`.
      chip: what the devices are; a kernel never asks.
      interpret: False to compile for the TPU, or `pltpu.InterpretParams` to simulate on a CPU.
    """

    axis: str
    chip: Chip
    interpret: Any = False

    def compiler_params(self, collective_id: int | None, num_devices: int) -> pltpu.CompilerParams:
        """A kernel that enters a barrier has a collective id; the compiler's own default of VMEM is far below what a chip has."""
        return pltpu.CompilerParams(
            collective_id=None if collective_id is None or num_devices == 1 else int(collective_id),
            # Checks of every copy's bounds and semaphores more than double the bundles of moving a row; simulation makes them all.
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=self.chip.vmem_bytes * 31 // 32,
        )
