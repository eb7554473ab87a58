"""Facts about accelerator chips, as data: nothing below this file asks a device what it is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax

from tpu_serve.config import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    """One JAX device of a kind.

    Attributes:
      name: "cpu", "v5e", "v5p", "v6e" or "tpu7x".
      memory_bytes: device memory (host memory for "cpu").
      page_size: tokens per KV-cache page that suit it.
      max_num_seqs: default limit of sequences in a step.
      max_num_batched_tokens: default token budget of a step.
      bucket_growth: ratio between neighbouring token buckets. Programs are few where compiling is the larger cost.
    """

    name: str
    memory_bytes: int
    page_size: int = 128
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    bucket_growth: int = 2

    @property
    def is_tpu(self) -> bool:
        return self.name != "cpu"


# Memory per JAX device: https://docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm (a tpu7x chip is two devices).
TPU_CHIPS = {
    chip.name: chip
    for chip in (Chip("v5e", 16 * GIB), Chip("v5p", 95 * GIB), Chip("v6e", 32 * GIB), Chip("tpu7x", 96 * GIB))
}
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
    return Chip("cpu", memory, page_size=16, max_num_seqs=64, max_num_batched_tokens=256, bucket_growth=4)


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
