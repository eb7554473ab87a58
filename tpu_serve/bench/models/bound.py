"""What no program of a step can beat on a device: bytes that must be read, products that must be made. Calculated, for uniform routing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpu_serve.bench.compiled.machine import CORES
from tpu_serve.bench.models.step import Step
from tpu_serve.device.chip import slice_grid
from tpu_serve.device.kv_cache import PagedCache
from tpu_serve.device.mesh import num_shares
from tpu_serve.device.params import iterate, num_bytes_per_device
from tpu_serve.engine.design import Design
from tpu_serve.engine.report import kind_of
from tpu_serve.kernels.fused_moe_v2.bound import fewest_links


@dataclass(frozen=True, slots=True)
class Least:
    """Of one device.

    Attributes:
      weight_bytes: of the weights that the step's tokens meet, each read once: of experts the share that uniform routing is expected to meet,
        of the embedding the rows of the tokens.
      cache_bytes: keys and values that are read, and those that are written; recurrent state, read and written.
      seconds: by "hbm", "mxu" and "ici".
    """

    weight_bytes: float
    cache_bytes: float
    seconds: dict[str, float]

    @property
    def limit(self) -> str:
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def us(self) -> float:
        return max(self.seconds.values()) * 1e6


def least(design: Design, step: Step, page_size: int, ici_bytes: float, expert_type: str = "bfloat16") -> Least:
    """Of all layers of a design, as they are placed.

    Args:
      page_size: tokens of a page of the caches.
      expert_type: in which rows enter the experts' products.
      ici_bytes: that leave a chip, a device's share of them; what must be sent depends on the program, so it is said by that. Every chip
        sends as much, and the one with the fewest links decides.
    """
    placement, chip = design.placement, design.placement.chip
    mesh, rules, moe = placement.mesh, placement.rules, design.model.moe
    peak = chip.peak_ops["bfloat16"]
    tokens, weight_bytes, seconds = step.num_tokens, 0.0, 0.0
    for path, spec in iterate(placement.specs):
        kind = kind_of(path)
        size = num_bytes_per_device({path: spec}, mesh, rules)
        held = math.prod(spec.shardings(mesh, rules)[0].shard_shape(spec.shape))
        if kind == "experts" and moe is not None:
            weight_bytes += size * (1.0 - (1.0 - moe.top_k / moe.num_experts) ** tokens)
            if path.endswith((".gate_up", ".down")):
                rate = chip.peak_ops.get(expert_type, peak)
                seconds += 2 * tokens * moe.top_k / moe.num_experts * math.prod(spec.given) / mesh.size / rate
        elif kind == "embedding and head":
            is_head = path != "embedding" or not any(other == "lm_head" for other, _ in iterate(placement.specs))
            if is_head:
                weight_bytes += size
                seconds += 2 * step.num_sequences * held / peak
            else:
                weight_bytes += size * min(1.0, tokens / spec.shape[0])
        else:
            weight_bytes += size
            if len(spec.given) == 2:
                seconds += 2 * tokens * held / peak
    cache_bytes = 0.0
    num_heads = design.hf_config.positive("num_attention_heads")
    heads = num_heads // (num_shares(mesh, rules["heads"]) if "heads" in rules else 1)
    here = placement.cache_on_one_device
    for window in here.windows:
        token_bytes = here.page_bytes(page_size, window) / page_size
        cache_bytes += token_bytes * (step.num_keys(window) + tokens)
    for layer in here.layers:
        if isinstance(layer, PagedCache):
            seconds += 4 * heads * layer.head_dim * step.num_seen(layer.window) / peak
    if here.has_state:
        cache_bytes += 2 * here.state_bytes * step.num_sequences
    links = fewest_links(slice_grid(chip, mesh.size) or (1,)) * CORES[chip.name].mesh_links if chip.is_tpu else 0
    device_rate = links * chip.link_bytes_per_second / chip.devices_per_chip
    rates = {
        "hbm": (weight_bytes + cache_bytes) / chip.hbm_bytes_per_second,
        "mxu": seconds,
        "ici": ici_bytes / device_rate if links else 0.0,
    }
    return Least(weight_bytes, cache_bytes, rates)
