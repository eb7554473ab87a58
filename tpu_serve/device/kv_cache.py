"""What a model keeps of the tokens it has seen: pages of keys and values, and recurrent state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_serve.device.batch import zeros
from tpu_serve.device.chip import Chip
from tpu_serve.device.mesh import AxisRules, named_sharding, num_shares
from tpu_serve.device.quantised import QuantisedArray

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Of an attention layer: `[num_pages, page_size, 2 * kv_heads, head_dim]`; keys at even heads, values at odd ones.

    Attributes:
      window: a query sees so many keys, its own included; None for all before it.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a recurrent layer: `[num_rows, *shape]`, a row for each sequence and for each snapshot.

    Attributes:
      axes: logical axis of each dimension of `shape`.
      dtype: None for the type of the model.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any = None


@dataclass(frozen=True, slots=True)
class StateCache:
    """Of a recurrent layer: by name what it carries from token to token. A new sequence starts from zeros."""

    arrays: tuple[tuple[str, StateArray], ...]


LayerCache = PagedCache | StateCache


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What each layer of a model keeps.

    Attributes:
      layers: in the order of the model.
      dtype: of keys and values, and of state that names no other.
      as_bits: store keys and values as unsigned integers that hold their bits.
      stored: "int8" or "float8_e4m3fn" if keys and values are stored so, with a float32 scale for each token and head; else None.
    """

    layers: tuple[LayerCache, ...]
    dtype: Any
    as_bits: bool = False
    stored: str | None = None

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: Any) -> CacheLayout:
        """Attention layers that are all alike and see everything."""
        return cls((PagedCache(num_kv_heads, head_dim),) * num_layers, dtype)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows that there are, those without first: layers of one window share their page tables."""
        return tuple(sorted({one.window for one in self._paged()}, key=lambda window: (window is not None, window)))

    @property
    def has_state(self) -> bool:
        return any(isinstance(layer, StateCache) for layer in self.layers)

    @property
    def kv_head_counts(self) -> tuple[int, ...]:
        """Different numbers of KV heads."""
        return tuple(sorted({layer.num_kv_heads for layer in self._paged()}))

    def _paged(self) -> Iterable[PagedCache]:
        return (layer for layer in self.layers if isinstance(layer, PagedCache))

    def for_chip(self, chip: Chip) -> CacheLayout:
        """The layout as this chip stores it. XLA's CPU backend gathers and scatters bfloat16 by converting the whole array to float32
        and back, but integers as they are."""
        return dataclasses.replace(self, as_bits=not chip.is_tpu)

    def stored_as(self, stored: str | None) -> CacheLayout:
        """The layout with another type in which keys and values are stored."""
        return dataclasses.replace(self, stored=stored)

    def on_one_device(self, mesh: Mesh, rules: AxisRules) -> CacheLayout:
        """The layout of what each device of the mesh holds."""

        def share(axis: str | None, size: int) -> int:
            return size // num_shares(mesh, rules[axis]) if axis is not None and axis in rules else size

        def cut(layer: LayerCache) -> LayerCache:
            if isinstance(layer, PagedCache):
                return dataclasses.replace(layer, num_kv_heads=share("kv_heads", layer.num_kv_heads))
            return StateCache(
                tuple(
                    (name, dataclasses.replace(array, shape=tuple(map(share, array.axes, array.shape))))
                    for name, array in layer.arrays
                )
            )

        return dataclasses.replace(self, layers=tuple(map(cut, self.layers)))

    def page_bytes(self, page_size: int, window: int | None = None) -> int:
        """Bytes of one page over all layers with this window."""
        token_bytes = 0
        for layer in self._paged():
            if layer.window == window:
                head_bytes = layer.head_dim * jnp.dtype(self.stored or self.dtype).itemsize
                token_bytes += 2 * layer.num_kv_heads * (head_bytes + (SCALE_BYTES if self.stored else 0))
        return page_size * token_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one row of state over all layers."""
        arrays = (array for layer in self.layers if isinstance(layer, StateCache) for _, array in layer.arrays)
        return sum(math.prod(array.shape) * self._state_dtype(array).itemsize for array in arrays)

    def _state_dtype(self, array: StateArray) -> Any:
        return jnp.dtype(self.dtype if array.dtype is None else array.dtype)

    def abstract(self, num_pages: tuple[int, ...], page_size: int, num_rows: int, mesh: Mesh, rules: AxisRules) -> Any:
        """Shape, dtype and sharding of each layer's arrays: one array for attention, with its scales where it is stored in 8 bits; a
        dictionary for recurrent layers.

        Args:
          num_pages: for each of `windows`.
          num_rows: rows of state.
        """
        pages = dict(zip(self.windows, num_pages, strict=True))

        def paged(shape: tuple[int, ...], dtype: Any) -> Any:
            axes = (None, None, "kv_heads", None)[: len(shape)]
            return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, rules, axes, shape))

        def of(layer: LayerCache) -> Any:
            if isinstance(layer, PagedCache):
                shape = (pages[layer.window], page_size, 2 * layer.num_kv_heads, layer.head_dim)
                dtype = jnp.dtype(self.stored or self.dtype)
                if self.as_bits and jnp.issubdtype(dtype, jnp.floating):
                    dtype = jnp.dtype(f"uint{8 * dtype.itemsize}")
                values = paged(shape, dtype)
                if not self.stored:
                    return values
                scale: Any = paged(shape[:-1], jnp.float32)
                return QuantisedArray(values, scale)
            return {
                name: jax.ShapeDtypeStruct(
                    (num_rows, *array.shape),
                    self._state_dtype(array),
                    sharding=named_sharding(mesh, rules, (None, *array.axes), (num_rows, *array.shape)),
                )
                for name, array in layer.arrays
            }

        return [of(layer) for layer in self.layers]

    def allocate(self, num_pages: tuple[int, ...], page_size: int, num_rows: int, mesh: Mesh, rules: AxisRules) -> Any:
        """Zeroed arrays, arranged as `abstract` says."""
        return zeros(self.abstract(num_pages, page_size, num_rows, mesh, rules))
