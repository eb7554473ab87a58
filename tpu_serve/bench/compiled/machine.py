"""Facts about the core of a chip that only the execution of a schedule needs, beside those in `device/chip.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpu_serve.device.chip import TPU_CHIPS, Chip

# Share of the peak rate of HBM that long streams of DMAs reach, and the time from the last byte to the semaphore. The latency
# was fitted once, on JAX's documented 128x128x128-tiled matrix multiplication on v5e, and is taken to hold for the others.
HBM_EFFICIENCY = 0.93
DMA_LATENCY_SECONDS = 0.44e-6
# Copies that stay inside the core (VMEM to VMEM and to SMEM) complete sooner; no published figure, an assumption.
INNER_DMA_LATENCY_SECONDS = 0.26e-6
INNER_DMA_RATE = 4.0  # times the peak rate of HBM; no published figure, an assumption.
# From the start of a remote write or signal to its semaphore on the neighbour; an assumption of the right order.
LINK_LATENCY_SECONDS = 1.5e-6
# A DMA keeps its engine at least this long however small it is: about 20 ns a row of a gather on v6e, as published in the notes of
# MaxText's `moe_combine_tc.py`; taken to hold for all.
DMA_OCCUPANCY_SECONDS = 20e-9
# The two devices of a tpu7x chip talk at about six times the rate of a link: https://docs.cloud.google.com/tpu/docs/tpu7x
SIBLING_LINKS = 6.0


@dataclass(frozen=True, slots=True)
class Core:
    """One TensorCore, as its schedule sees it.

    Attributes:
      chip: the device it belongs to.
      clock_hz: cycles a second. Derived: peak bfloat16 operations / (matrix units * operations of one a cycle), which for the
        published peaks gives 1.5 GHz (v5e), 1.75 GHz (v5p, v6e) and 2.2 GHz (tpu7x).
      cores: TensorCores of a JAX device; a kernel that is not split runs on one of them with its share of HBM's rate.
      matrix_units: of the core.
      matmul_cycles: how long one matrix-multiply instruction keeps its unit busy, by the type in the instruction's name; "" is the
        default. It takes a vector register of rows: 8 of float32, 16 of bfloat16, 32 of an 8-bit type, whose rows pass at twice the rate.
      hbm_address_bytes: the unit of its addresses in HBM, as seen in the compiler's output. Where it is 512, as for VMEM everywhere, an
        address is shifted left by 4 to become an operand of a DMA.
      branch_delay: bundles that are still executed after a taken branch, as seen in the compiler's output.
      mesh_links: links between neighbouring chips in one direction of the slices served here. Two where an axis of length two
        wraps around to the same neighbour.
    """

    chip: Chip
    clock_hz: float
    cores: int
    matrix_units: int
    matmul_cycles: Mapping[str, int]
    hbm_address_bytes: int = 32
    branch_delay: int = 4
    mesh_links: int = 1

    def cycles(self, seconds: float) -> float:
        return seconds * self.clock_hz

    @property
    def hbm_bytes_per_cycle(self) -> float:
        return self.chip.hbm_bytes_per_second / self.cores * HBM_EFFICIENCY / self.clock_hz

    @property
    def inner_bytes_per_cycle(self) -> float:
        return self.chip.hbm_bytes_per_second / self.cores * INNER_DMA_RATE / self.clock_hz

    @property
    def sibling_bytes_per_cycle(self) -> float:
        return self.chip.link_bytes_per_second * SIBLING_LINKS / self.clock_hz

    def link_bytes_per_cycle(self, grid: tuple[int, ...]) -> float:
        """What a device sends to other chips in a cycle when all devices send equal shares to all, over a mesh of chips.

        The narrowest cut through the middle of an axis limits it: the devices on one side send to those on the other what
        (devices there) / (devices on other chips) says, over (links of the cut) * (rate of a link). Slices this small are meshes:
        they do not wrap around. tpu7x in a slice of 8: 150 GB/s a device, the value that a published fused MoE kernel's time at
        4096 tokens gave when it was fitted; the other chips' have not been compared with hardware.

        Args:
          grid: chips along each axis.
        """
        chips = 1
        for length in grid:
            chips *= length
        devices = chips * self.chip.devices_per_chip
        rates = []
        for length in grid:
            if length == 1:
                continue
            left = length // 2 * devices // length
            across = left * (devices - left) / (devices - self.chip.devices_per_chip)
            cut = chips // length * self.mesh_links * self.chip.link_bytes_per_second
            rates.append(cut / across)
        slowest = min(rates, default=self.chip.link_bytes_per_second)
        return slowest / self.clock_hz


CORES = {
    "v5e": Core(TPU_CHIPS["v5e"], 1.5e9, 1, 4, {"": 16, "f32": 8}, hbm_address_bytes=512),
    "v5p": Core(TPU_CHIPS["v5p"], 1.75e9, 2, 4, {"": 16, "f32": 8}),
    "v6e": Core(TPU_CHIPS["v6e"], 1.75e9, 1, 2, {"": 8, "f32": 4}),
    "tpu7x": Core(
        TPU_CHIPS["tpu7x"], 2.2e9, 1, 2, {"": 8, "f32": 4}, branch_delay=6, mesh_links=2
    ),
}  # fmt: skip
