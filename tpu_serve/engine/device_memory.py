"""What the memory of a device is used for, in bytes."""

from __future__ import annotations

from typing import Any

import jax

from tpu_serve.engine.placement import Placement
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.scheduler.scheduler import num_slots

_TOLD = {"bytes_in_use": "in_use", "peak_bytes_in_use": "peak", "bytes_limit": "limit"}


class DeviceMemory:
    """Planned sizes on each device, and what the first device says of itself when it is asked; a CPU says nothing.

    Args:
      placement: of the model.
      plan: sizes of the engine.
      device: is asked.
    """

    def __init__(self, placement: Placement, plan: EnginePlan, device: jax.Device):
        layout, self._device = placement.cache_on_one_device, device
        pages = zip(plan.num_pages, layout.windows, strict=True)
        num_rows = num_slots(plan.max_num_seqs) + (plan.num_snapshots or 0)
        self._planned = {
            "weights": placement.param_bytes,
            "kv_cache": sum(count * layout.page_bytes(plan.page_size, window) for count, window in pages),
            "recurrent_state": num_rows * layout.state_bytes,
            "sampler": plan.sampler_bytes,
            "temporaries": plan.temporary_bytes,
            "programs": plan.code_bytes,
        }

    def __call__(self) -> dict[str, int]:
        told: dict[str, Any] = self._device.memory_stats() or {}
        return self._planned | {name: int(told[key]) for key, name in _TOLD.items() if key in told}
