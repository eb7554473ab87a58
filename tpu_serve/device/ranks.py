"""Data ranks inside of a step: the parts of arrays that belong to one of them, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from tpu_serve.device.mesh import DATA_AXIS, by_rank, num_data_ranks, replicated


@dataclass(frozen=True)
class Ranks:
    """The data ranks of a mesh. With a single one every function here leaves things as they are.

    What ranks have of their own lies in one array, rank after rank along its first axis, split over the mesh's data axis.
    """

    mesh: Mesh

    @property
    def num(self) -> int:
        return num_data_ranks(self.mesh)

    def apart(self, tree: Any) -> Any:
        """Arrays [ranks * n, ...] as [ranks, n, ...]."""
        return self._reshaped(tree, lambda shape: (self.num, -1, *shape[1:]))

    def together(self, tree: Any) -> Any:
        """Arrays [ranks, n, ...] as [ranks * n, ...], each rank's part on its devices."""
        return self._reshaped(tree, lambda shape: (-1, *shape[2:]))

    def _reshaped(self, tree: Any, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
        if self.num == 1:
            return tree
        # Said, as the compiler would otherwise split them further wherever that suits a neighbour, and gather them again afterwards.
        sharding = by_rank(self.mesh)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x.reshape(shape(x.shape)), sharding), tree)

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function on each rank's part, of arguments and results that have a leading axis for ranks.

        Devices decide together what a `jax.lax.cond` in it skips, so what it asks must not be an argument: it is closed over.
        """
        return function if self.num == 1 else jax.vmap(function, spmd_axis_name=DATA_AXIS)

    def whole(self, array: jax.Array) -> jax.Array:
        """An array on each device of its rank whole. To be called within `each`."""
        return array if self.mesh.size == 1 else jax.lax.with_sharding_constraint(array, replicated(self.mesh))
