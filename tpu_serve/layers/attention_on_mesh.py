"""Attention on the mesh of the model: each device attends with its own heads, over its own share of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from tpu_serve.device.batch import Batch
from tpu_serve.device.chip import Chip
from tpu_serve.device.mesh import AxisRules
from tpu_serve.layers.attention import paged_attention


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class MeshAttention:
    """What `PagedMixing` calls for attention, with whole arrays; it is the one that enters a `shard_map`.

    Attributes:
      mesh: of the model.
      rules: "heads" and "kv_heads" are split, together, or on every device.
      chip: each of the devices.
    """

    mesh: Mesh
    rules: AxisRules = field(hash=False)
    chip: Chip

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        batch: Batch,
        scale: float,
        *,
        window: int | None = None,
        table: int = 0,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """See `paged_attention`."""
        attend = partial(paged_attention, scale=scale, window=window, table=table)
        if self.mesh.size == 1:
            return attend(q, k, v, cache, batch, sinks=sinks)
        heads = PartitionSpec(None, self.rules.get("heads"))
        kv_heads = PartitionSpec(None, self.rules.get("kv_heads"))
        in_cache = PartitionSpec(None, None, self.rules.get("kv_heads"))  # keys and values of a head lie together
        by_head = PartitionSpec(self.rules.get("heads"))
        run = jax.shard_map(
            lambda q, k, v, cache, batch, sinks: attend(q, k, v, cache, batch, sinks=sinks),
            mesh=self.mesh,
            in_specs=(heads, kv_heads, kv_heads, in_cache, PartitionSpec(), None if sinks is None else by_head),
            out_specs=(heads, in_cache),
            check_vma=False,  # where no axis is split, every device computes the same, which no type can say
        )
        return run(q, k, v, cache, batch, sinks)
