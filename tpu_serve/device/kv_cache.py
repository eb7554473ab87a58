"""Shape, size and creation of the paged KV cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_serve.device.chip import Chip
from tpu_serve.device.mesh import AxisRules, named_sharding


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One array per layer, `[num_pages, page_size, 2 * kv_heads, head_dim]`; keys at even heads, values at odd ones.

    Attributes:
      num_layers: attention layers.
      num_kv_heads, head_dim: of every layer.
      dtype: of keys and values.
      as_bits: store unsigned integers that hold the bits of the values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    as_bits: bool = False

    def for_chip(self, chip: Chip) -> CacheLayout:
        """The layout as this chip stores it. XLA's CPU backend gathers and scatters bfloat16 by converting the whole array to float32
        and back, but integers as they are."""
        return dataclasses.replace(self, as_bits=not chip.is_tpu)

    def on_one_device(self, mesh: Mesh, rules: AxisRules) -> CacheLayout:
        """The layout of what each device of the mesh holds."""
        num_shards = mesh.shape[rules["kv_heads"]] if "kv_heads" in rules else 1
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads // num_shards)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers."""
        return self.num_layers * page_size * 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    def abstract(self, num_pages: int, page_size: int, mesh: Mesh, rules: AxisRules) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of each layer's array."""
        shape = (num_pages, page_size, 2 * self.num_kv_heads, self.head_dim)
        sharding = named_sharding(mesh, rules, (None, None, "kv_heads", None), shape)
        dtype = jnp.dtype(f"uint{8 * jnp.dtype(self.dtype).itemsize}") if self.as_bits else self.dtype
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)] * self.num_layers

    def allocate(self, num_pages: int, page_size: int, mesh: Mesh, rules: AxisRules) -> list[jax.Array]:
        """Zeroed arrays, one per layer."""
        return [
            jnp.zeros(a.shape, a.dtype, device=a.sharding) for a in self.abstract(num_pages, page_size, mesh, rules)
        ]
