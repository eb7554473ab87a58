"""Facts about accelerator chips, as data: nothing below this file asks a device what it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tpu_serve.config import ConfigError

if TYPE_CHECKING:
    import jax

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Chip:
    """One JAX device of a kind.

    Attributes:
      name: "cpu", "v5e", "v5p", "v6e" or "tpu7x".
      memory_bytes: device memory (host memory for "cpu").
      page_size: tokens per KV-cache page that suit it.
      max_num_seqs: default limit of sequences in a step.
      max_num_batched_tokens: default token budget of a step.
      smallest_bucket: tokens of the smallest program; fewer are padded.
      bucket_growth: ratio between neighbouring token buckets. Programs are few where compiling is the larger cost.
      vmem_bytes: vector memory of one core, what a kernel's buffers must fit in.
      smem_bytes: scalar memory of one core.
      hbm_bytes_per_second: peak rate of device memory.
      peak_ops: multiply and add operations per second by the type that enters the matrix unit. A type that is absent has no
        arithmetic of its own on this chip.
      matrix_unit: rows and columns of the matrix unit.
      link_bytes_per_second: of one interconnect link, one way.
      num_links: interconnect links of a chip.
      devices_per_chip: JAX devices that share the chip's links.
    """

    name: str
    memory_bytes: int
    page_size: int = 128
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    smallest_bucket: int = 8
    bucket_growth: int = 2
    vmem_bytes: int = 128 * MIB
    smem_bytes: int = 1 * MIB
    hbm_bytes_per_second: float = 0.0
    peak_ops: Mapping[str, float] = field(default_factory=dict, hash=False)
    matrix_unit: int = 128
    link_bytes_per_second: float = 0.0
    num_links: int = 0
    devices_per_chip: int = 1

    @property
    def is_tpu(self) -> bool:
        return self.name != "cpu"


# Memory: https://docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm (a tpu7x chip is two devices). Memory rates, peak operations, VMEM
# and SMEM: `pltpu.get_tpu_info_for_chip` of JAX 0.10.2, times two cores for v5p; there is no figure for float32 products, which are taken at a
# quarter of bfloat16's. Links one way: https://jax-ml.github.io/scaling-book/tpus for v5e and v5p; for v6e and tpu7x what the pages of the
# versions give for a chip, over its links and both directions.
TPU_CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v5e",
            16 * GIB,
            hbm_bytes_per_second=8.2e11,
            peak_ops={"float32": 4.9e13, "bfloat16": 1.97e14, "int8": 3.94e14},
            link_bytes_per_second=5e10,
            num_links=4,
        ),
        Chip(
            "v5p",
            95 * GIB,
            vmem_bytes=64 * MIB,
            hbm_bytes_per_second=2.46e12,
            peak_ops={"float32": 1.15e14, "bfloat16": 4.59e14, "int8": 9.18e14},
            link_bytes_per_second=9e10,
            num_links=6,
        ),
        Chip(
            "v6e",
            32 * GIB,
            hbm_bytes_per_second=1.64e12,
            peak_ops={"float32": 2.3e14, "bfloat16": 9.2e14, "int8": 1.84e15},
            matrix_unit=256,
            link_bytes_per_second=1e11,
            num_links=4,
        ),
        Chip(
            "tpu7x",
            96 * GIB,
            vmem_bytes=64 * MIB,
            hbm_bytes_per_second=3.7e12,
            peak_ops={"float32": 2.9e14, "bfloat16": 1.155e15, "float8_e4m3fn": 2.3e15},
            matrix_unit=256,
            link_bytes_per_second=1e11,
            num_links=6,
            devices_per_chip=2,
        ),
    )
}
_FLAT_SLICES: dict[int, tuple[int, ...]] = {
    1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8),
}  # fmt: skip
_SOLID_SLICES: dict[int, tuple[int, ...]] = {
    1: (1, 1, 1), 2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4),
}  # fmt: skip


def slice_sizes(chip: Chip) -> list[int]:
    """Numbers of JAX devices of which there are slices."""
    slices = _SOLID_SLICES if chip.num_links == 6 else _FLAT_SLICES
    return sorted({1, *(chips * chip.devices_per_chip for chips in slices)})


def slice_grid(chip: Chip, num_devices: int) -> tuple[int, ...] | None:
    """Chips along each axis of the slice that holds so many JAX devices, None where there is none. One device may be part of a chip."""
    slices = _SOLID_SLICES if chip.num_links == 6 else _FLAT_SLICES
    return slices[max(1, num_devices // chip.devices_per_chip)] if num_devices in slice_sizes(chip) else None


# `device_kind` as JAX reports it.
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def cpu_chip() -> Chip:
    """This machine's processor as a chip."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Kernels run on it in simulation, where every type has arithmetic.
    any_type = dict.fromkeys(("float32", "bfloat16", "int8", "float8_e4m3fn"), 1e11)
    return Chip(
        "cpu", memory, page_size=16, max_num_seqs=64, max_num_batched_tokens=256, smallest_bucket=2, bucket_growth=8,
        hbm_bytes_per_second=2e10, peak_ops=any_type,
    )  # fmt: skip


def chip_of(device: jax.Device) -> Chip:
    """The chip that a JAX device is.

    Raises:
      ConfigError: neither a CPU nor a known TPU.
    """
    if device.platform == "cpu":
        return cpu_chip()
    name = _KINDS.get(device.device_kind)
    if name is None:
        raise ConfigError(
            f"{device.device_kind!r} is not a supported device; supported are cpu and {', '.join(TPU_CHIPS)}."
        )
    return TPU_CHIPS[name]
