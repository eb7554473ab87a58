"""Recurrent layers on the mesh of the model: each device mixes the channels of its own heads for the sequences of its data rank, and keeps
their state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from tpu_serve.device.batch import Batch, own_batch
from tpu_serve.device.chip import Chip
from tpu_serve.device.mesh import AxisRules, by_rank, data_axis
from tpu_serve.layers.convolution_on_pool import update_tails
from tpu_serve.layers.delta_rule_on_pool import update_states


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class MeshRecurrence:
    """What `PagedMixing` calls for recurrent layers, with whole arrays; it is the one that enters a `shard_map`.

    A pool is a `StateArray` of all sequences and snapshots, [rows, ...].

    Attributes:
      mesh: of the model.
      rules: "linear_heads" and "linear_key_heads" are split, together, or on every device.
      chip: each of the devices.
    """

    mesh: Mesh
    rules: AxisRules = field(hash=False)
    chip: Chip

    def convolve(self, x: jax.Array, weight: jax.Array, pool: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """See `Mixing.convolve`; the cache is a pool [rows, heads * (W - 1) * D]."""
        heads = self.rules.get("linear_heads")
        by_channel = PartitionSpec(data_axis(self.mesh), heads)
        inputs = by_channel, PartitionSpec(heads)
        return self._each(update_tails, inputs, by_channel, by_channel)(x, weight, pool, batch)

    def delta_rule(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        pool: jax.Array,
        batch: Batch,
    ) -> tuple[jax.Array, jax.Array]:
        """See `Mixing.delta_rule`; the cache is a pool f32[rows, Hv, Dk, Dv]."""

        by_head = PartitionSpec(data_axis(self.mesh), self.rules.get("linear_heads"))
        run = partial(update_states, self.chip)
        return self._each(run, (by_head,) * 5, by_head, by_head)(q, k, v, log_decay, beta, pool, batch)

    def _each(
        self,
        run: Callable[..., Any],
        inputs: tuple[PartitionSpec, ...],
        pool: PartitionSpec,
        out: PartitionSpec,
    ) -> Callable[..., Any]:
        """`run(*inputs, pool, batch)`, which gives something and the new pool, on each device with what it holds of them."""
        if self.mesh.size == 1:
            return run
        ranks = data_axis(self.mesh)
        return jax.shard_map(
            lambda *args: run(*args[:-1], own_batch(args[-1], ranks)),
            mesh=self.mesh,
            in_specs=(*inputs, pool, by_rank(self.mesh).spec),
            out_specs=(out, pool),
            check_vma=False,  # where no axis is split, every device computes the same, which no type can say
        )
