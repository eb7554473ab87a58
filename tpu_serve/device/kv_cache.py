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
from tpu_serve.device.mesh import AxisRules, named_sharding, num_data_ranks, num_repeats, num_shares
from tpu_serve.device.quantised import QuantisedArray

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest magnitude of the types in which keys and values may be stored with a scale."""


def narrowed(values: jax.Array, stored: str) -> tuple[jax.Array, jax.Array]:
    """Values [..., D] in an 8-bit type, and f32[...] that restores them by multiplication. The scale of a row that is not finite is not either."""
    limit = LARGEST[stored]
    wide = values.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / limit
    wide *= jnp.where(scale > 0, 1 / scale, 0.0)[..., None]
    narrow = jnp.round(wide) if stored == "int8" else jnp.clip(wide, -limit, limit)
    return narrow.astype(stored), scale


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Of an attention layer: keys and values of tokens in pages; `CacheLayout` says how they lie there.

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
      unit: values along a named axis that are never parted, such as those of a head.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any = None
    unit: int = 1


@dataclass(frozen=True, slots=True)
class StateCache:
    """Of a recurrent layer: by name what it carries from token to token. A new sequence starts from zeros."""

    arrays: tuple[tuple[str, StateArray], ...]


LayerCache = PagedCache | StateCache


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What each layer of a model keeps.

    Pages of keys and values are by token, `[num_pages, page_size, 2 * kv_heads, head_dim]` with keys at even heads and values at odd ones and
    scales `[num_pages, page_size, 2 * kv_heads]`; or by head, `[num_pages, kv_heads, page_size, 2 * head_dim]` with a token's key before its
    value and scales `[num_pages, kv_heads, 2, page_size]`. The first is what a CPU gathers fast. The second is what a TPU's kernel reads
    without moving anything: a head's tokens are rows, a row fills registers also where the head size is 64, and with a single head no tile is
    half empty.

    Attributes:
      layers: in the order of the model.
      dtype: of keys and values, and of state that names no other.
      as_bits: store keys and values as unsigned integers that hold their bits.
      by_head: which of the two ways.
      stored: "int8" or "float8_e4m3fn" if keys and values are stored so, with a float32 scale for each token and head; else None.
    """

    layers: tuple[LayerCache, ...]
    dtype: Any
    as_bits: bool = False
    stored: str | None = None
    by_head: bool = False

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

    def _paged(self) -> Iterable[PagedCache]:
        return (layer for layer in self.layers if isinstance(layer, PagedCache))

    def for_chip(self, chip: Chip) -> CacheLayout:
        """The layout as this chip stores it. XLA's CPU backend gathers and scatters bfloat16 by converting the whole array to float32
        and back, but integers as they are. A layout that is by head, as the kernel wants it, stays so."""
        by_head = self.by_head or chip.is_tpu
        return dataclasses.replace(self, as_bits=not by_head, by_head=by_head)

    def for_kernel(self) -> CacheLayout:
        """The layout that the kernel takes, on whichever chip."""
        return dataclasses.replace(self, as_bits=False, by_head=True)

    def stored_as(self, stored: str | None) -> CacheLayout:
        """The layout with another type in which keys and values are stored."""
        return dataclasses.replace(self, stored=stored)

    def repeated(self, axis: str, shares: int) -> CacheLayout:
        """The layout with each unit of one logical axis as often as it takes for so many devices to have equally many, as
        `device.params.repeated` does it with weights. Of attention layers the axis is "kv_heads"."""

        def grown(name: str | None, size: int, unit: int) -> int:
            return size * num_repeats(size // unit, shares) if name == axis else size

        def grow(layer: LayerCache) -> LayerCache:
            if isinstance(layer, PagedCache):
                return dataclasses.replace(layer, num_kv_heads=grown("kv_heads", layer.num_kv_heads, 1))
            return StateCache(
                tuple(
                    (
                        name,
                        dataclasses.replace(
                            array,
                            shape=tuple(
                                grown(one, size, array.unit) for one, size in zip(array.axes, array.shape, strict=True)
                            ),
                        ),
                    )
                    for name, array in layer.arrays
                )
            )

        return dataclasses.replace(self, layers=tuple(map(grow, self.layers)))

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
        """Bytes of one page over all layers with this window; by head, with what its tiles in a TPU's memory are filled up with."""
        return sum(
            _tiled_bytes(shape, dtype) if self.by_head else math.prod(shape) * jnp.dtype(dtype).itemsize
            for layer in self._paged()
            if layer.window == window
            for shape, dtype in self._page(layer, page_size)
        )

    def _page(self, layer: PagedCache, page_size: int) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and type of a layer's page: of its values, and of its scales where there are any."""
        heads, size, dtype = layer.num_kv_heads, layer.head_dim, jnp.dtype(self.stored or self.dtype)
        if self.as_bits and jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.dtype(f"uint{8 * dtype.itemsize}")
        values = (heads, page_size, 2 * size) if self.by_head else (page_size, 2 * heads, size)
        scale = (heads, 2, page_size) if self.by_head else (page_size, 2 * heads)
        return [(values, dtype)] + ([(scale, jnp.float32)] if self.stored else [])

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
          num_pages: of each data rank, for each of `windows`.
          num_rows: rows of state of each data rank.
        """
        ranks = num_data_ranks(mesh)
        pages = {window: ranks * count for window, count in zip(self.windows, num_pages, strict=True)}
        num_rows *= ranks
        first = "ranks" if ranks > 1 else None

        def paged(shape: tuple[int, ...], dtype: Any) -> Any:
            axes = (first, "kv_heads", None, None) if self.by_head else (first, None, "kv_heads", None)[: len(shape)]
            return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, rules, axes, shape))

        def of(layer: LayerCache) -> Any:
            if isinstance(layer, PagedCache):
                values, *scale = (
                    paged((pages[layer.window], *shape), dtype) for shape, dtype in self._page(layer, page_size)
                )
                return QuantisedArray(values, *scale) if scale else values
            return {
                name: jax.ShapeDtypeStruct(
                    (num_rows, *array.shape),
                    self._state_dtype(array),
                    sharding=named_sharding(mesh, rules, (first, *array.axes), (num_rows, *array.shape)),
                )
                for name, array in layer.arrays
            }

        return [of(layer) for layer in self.layers]

    def allocate(self, num_pages: tuple[int, ...], page_size: int, num_rows: int, mesh: Mesh, rules: AxisRules) -> Any:
        """Zeroed arrays, arranged as `abstract` says."""
        return zeros(self.abstract(num_pages, page_size, num_rows, mesh, rules))


def _tiled_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array in a TPU's memory, where the last dimension is filled up to 128 and the one before it to whole 32-bit words."""
    *outer, rows, lanes = shape
    itemsize = jnp.dtype(dtype).itemsize
    rows += -rows % (4 // itemsize)
    rows += -rows % 8 if rows > 8 else 0
    return math.prod(outer) * rows * (lanes + -lanes % 128) * itemsize
