"""Where a kernel of one device runs: for which chip, compiled or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from tpu_serve.device.chip import Chip


@dataclass(frozen=True)  # hashable: it is a static argument of differentiable functions
class Context:
    """The surroundings of a call.

    Attributes:
      chip: what the device is; a kernel never asks.
      interpret: False to compile for the TPU, or `pltpu.InterpretParams` to simulate on a CPU.
    """

    chip: Chip
    interpret: Any = False

    def compiler_params(self) -> pltpu.CompilerParams:
        """The compiler's own default of VMEM is far below what a chip has; bounds and semaphores are what simulation checks."""
        return pltpu.CompilerParams(
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=self.chip.vmem_bytes * 31 // 32,
        )
