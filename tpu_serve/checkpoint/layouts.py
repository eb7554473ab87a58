"""The layouts in which checkpoints hold the weights of routed experts, and the ways from one to another. Values are moved, never computed.

Letters: E experts, H hidden, I intermediate, S any number of leading dimensions (none, or scanned layers).

- per-expert: `gate` and `up` `[I, H]` and `down` `[H, I]` for each expert of each layer, as Hugging Face checkpoints are published.
- fused: `wi` `[S, E, H, 2I]`, gate columns first, and `wo` `[S, E, I, H]`.
- split: `wi` `[2, S, E, H/2, 2I]`: half h holds the experts from hE/2 to (h+1)E/2, two consecutive rows of E for each, its upper half of H
  before its lower. Without S this is the memory of the fused `wi` under another shape. `wo` is that of the fused layout.

Hugging Face's own fused tensors, `gate_up_proj` `[E, 2I, H]` and `down_proj` `[E, H, I]`, are the fused layout with each matrix transposed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_serve.config import ConfigError

LAYOUTS = PER_EXPERT, FUSED, SPLIT = ("per-expert", "fused", "split")
STACKED = (FUSED, SPLIT)
"""Layouts with all experts in one `wi` and one `wo`."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the routed experts behind one `wi`.

    Attributes:
      stack: the leading dimensions S.
      num_experts, hidden, inner: E, H and I.
    """

    stack: tuple[int, ...]
    num_experts: int
    hidden: int
    inner: int

    @property
    def num_layers(self) -> int:
        """Layers that the leading dimensions hold."""
        return math.prod(self.stack)

    def wi(self, layout: str) -> tuple[int, ...]:
        """Shape of `wi` in a stacked layout.

        Raises:
          ConfigError: the split layout cannot hold these sizes.
        """
        if layout == FUSED:
            return (*self.stack, self.num_experts, self.hidden, 2 * self.inner)
        if self.num_experts % 2:
            raise ConfigError(f"The split layout halves the experts, and {self.num_experts} is an odd number of them.")
        if self.hidden % 2:
            raise ConfigError(f"The split layout halves the input of an expert, and its size {self.hidden} is odd.")
        return (2, *self.stack, self.num_experts, self.hidden // 2, 2 * self.inner)

    @property
    def wo(self) -> tuple[int, ...]:
        """Shape of `wo` in either stacked layout."""
        return (*self.stack, self.num_experts, self.inner, self.hidden)


def read_sizes(layout: str, wi: Sequence[int]) -> Sizes:
    """Sizes from the shape of a `wi` in a stacked layout.

    Raises:
      ConfigError: no `wi` of this layout has such a shape.
    """
    shape = tuple(wi)
    if layout == FUSED and len(shape) >= 3 and shape[-1] % 2 == 0:
        return Sizes(shape[:-3], shape[-3], shape[-2], shape[-1] // 2)
    if layout == SPLIT and len(shape) >= 4 and shape[0] == 2 and shape[-3] % 2 == 0 and shape[-1] % 2 == 0:
        return Sizes(shape[1:-3], shape[-3], 2 * shape[-2], shape[-1] // 2)
    form = "[…, E, H, 2I]" if layout == FUSED else "[2, …, E, H/2, 2I] with an even E"
    raise ConfigError(f"A wi of the {layout} layout is {form}, not {list(shape)}.")


def find_layout(wi: Sequence[int], wo: Sequence[int]) -> str:
    """The stacked layout of a `wi`, which its `wo` gives away.

    Raises:
      ConfigError: the two shapes do not belong together in either layout.
    """
    layout = SPLIT if len(wi) == len(wo) + 1 else FUSED
    if read_sizes(layout, wi).wo != tuple(wo):
        raise ConfigError(f"wi {list(wi)} and wo {list(wo)} are not of the same experts, in no layout.")
    return layout


def convert_wi(wi: np.ndarray, source: str, target: str) -> np.ndarray:
    """A `wi` from one stacked layout to the other.

    A view of a contiguous array, unless stacked layers are joined: the halves of a layer lie apart there, and are copied together.

    Raises:
      ConfigError: it is not of the source layout, or the target layout cannot hold its sizes.
    """
    if target not in STACKED:
        raise ConfigError(f"A wi is of the layouts {' and '.join(STACKED)}, not {target}.")
    sizes = read_sizes(source, wi.shape)
    shape, half = sizes.wi(target), sizes.num_experts // 2
    if source == target:
        return wi
    if target == SPLIT:
        halves = wi.reshape(*sizes.stack, 2, half, sizes.hidden, 2 * sizes.inner)
        return np.moveaxis(halves, -4, 0).reshape(shape)
    halves = wi.reshape(2, *sizes.stack, half, sizes.hidden, 2 * sizes.inner)
    return np.moveaxis(halves, 0, -4).reshape(shape)


def places(layout: str, num_layers: int, num_experts: int) -> np.ndarray:
    """i64[layers, E]: where the matrix `[H, 2I]` of an expert lies in a `wi`, counted in such matrices. It is contiguous in both layouts.

    The number of experts is even where the layout is split.
    """
    order = np.arange(num_layers * num_experts)
    if layout == SPLIT:
        return order.reshape(2, num_layers, num_experts // 2).swapaxes(0, 1).reshape(num_layers, num_experts)
    return order.reshape(num_layers, num_experts)


def fuse(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """`[.., H, 2I]` from gate and up `[.., I, H]`."""
    return np.concatenate([gate.swapaxes(-1, -2), up.swapaxes(-1, -2)], axis=-1)


def unfuse(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gate and up `[.., I, H]` from `[.., H, 2I]`, as views."""
    gate, up = np.split(matrix.swapaxes(-1, -2), 2, axis=-2)
    return gate, up


def stack_experts(experts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Fused `wi` `[E, H, 2I]` and `wo` `[E, I, H]` from gate, up and down of each expert of a layer."""
    wi = np.stack([fuse(gate, up) for gate, up, _ in experts])
    return wi, np.stack([down.T for _, _, down in experts])


def unstack_experts(wi: np.ndarray, wo: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Gate, up and down of each expert, as views, from the fused arrays of one layer."""
    return [(*unfuse(matrix), down.T) for matrix, down in zip(wi, wo, strict=True)]


def split_path(name: str) -> list[str]:
    """The parts of a tensor's name between its dots and slashes."""
    return re.split(r"[./]", name)


def is_routed(path: Sequence[str]) -> bool:
    """Whether what lies under this path belongs to routed experts: some name in it says so, and none says that they are shared."""
    names = [name.lower() for name in path]
    return any("expert" in name or "moe" in name for name in names) and not any("shared" in name for name in names)


def convert_tree(tree: Any, source: str, target: str, path: tuple[str, ...] = ()) -> Any:
    """A tree of parameters or of an optimiser's state with the `wi` of routed experts in another stacked layout.

    Momenta have the shapes of what they belong to, so a leaf is known by its path alone: it is called `wi` and `is_routed`. All other leaves
    are handed on as they are.

    Args:
      tree: nested dicts, lists and (named) tuples of arrays. A key may itself be a path, with dots or slashes.

    Raises:
      ConfigError: a leaf with such a path is not of the source layout or cannot be converted; the message names it.
    """
    if isinstance(tree, Mapping):
        return {key: convert_tree(value, source, target, (*path, *split_path(str(key)))) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        values = [
            convert_tree(value, source, target, (*path, str(name))) for name, value in zip(names, tree, strict=True)
        ]
        if isinstance(tree, list):
            return values
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if tree is None or not path or path[-1] != "wi" or not is_routed(path[:-1]):
        return tree
    try:
        return convert_wi(tree, source, target)
    except ConfigError as error:
        raise ConfigError(f"{'.'.join(path)} cannot be converted: {error}") from None
