"""Attention on the mesh of the model: each device attends with its own heads for the sequences of its data rank, over its own share of the
cache. Whether the kernel does it or XLA is decided here, for each problem that a program has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from tpu_serve.config import ConfigError
from tpu_serve.device.batch import Batch, own_batch
from tpu_serve.device.chip import Chip
from tpu_serve.device.mesh import AxisRules, by_rank, data_axis
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.ragged_paged_attention.config import supports
from tpu_serve.kernels.ragged_paged_attention.op import problem_of, ragged_paged_attention
from tpu_serve.kernels.ragged_paged_attention.problem import Problem
from tpu_serve.layers.attention import is_by_head, paged_attention

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionPath:
    """What runs the attention of a layer in a program, and why.

    Attributes:
      problem: shapes of one device.
      is_kernel: `kernels/ragged_paged_attention` rather than XLA.
    """

    problem: Problem
    is_kernel: bool
    reason: str


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class MeshAttention:
    """What `PagedMixing` calls for attention, with whole arrays; it is the one that enters a `shard_map`.

    Attributes:
      mesh: of the model.
      rules: "heads" and "kv_heads" are split, together, or on every device.
      chip: each of the devices.
      backend: "kernel", "xla", or "auto" for the kernel wherever it runs on a TPU.
      taken: by problem, what the programs that have been traced take.
    """

    mesh: Mesh
    rules: AxisRules = field(hash=False)
    chip: Chip
    backend: str = "auto"
    taken: dict[Problem, AttentionPath] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def paths(self) -> tuple[AttentionPath, ...]:
        """What runs where, for every problem of the programs that have been traced so far."""
        return tuple(self.taken.values())

    def path(self, problem: Problem) -> AttentionPath:
        """What runs a problem over pages that lie by head. A choice is logged when it is first made.

        Raises:
          ConfigError: the kernel is asked for and cannot run it; the message has the reason.
        """
        path = self.taken.get(problem)
        if path is None:
            path = self.taken[problem] = self._choose(problem)
            if path.is_kernel:
                logger.info("Attention of %s runs in the kernel", _words(problem))
            elif self.chip.is_tpu:
                level = logging.INFO if self.backend == "xla" else logging.WARNING
                logger.log(level, "Attention of %s runs in XLA: %s", _words(problem), path.reason)
        return path

    def _choose(self, problem: Problem) -> AttentionPath:
        if self.backend == "xla":
            return AttentionPath(problem, False, "--attention-backend is xla")
        if self.backend == "auto" and not self.chip.is_tpu:
            return AttentionPath(
                problem, False, f"the kernel is for TPUs, and on {self.chip.name} it is only simulated"
            )
        reason = supports(problem, self.chip)
        if reason is None:
            return AttentionPath(problem, True, "the chip can run it")
        if self.backend == "kernel":
            raise ConfigError(
                f"--attention-backend kernel cannot run {_words(problem)}: {reason}. Use --attention-backend auto."
            )
        return AttentionPath(problem, False, reason)

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, batch: Batch, sinks: jax.Array | None,
        scale: float, window: int | None, table: int, soft_cap: float | None,
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """On one device."""
        attend: Callable[..., tuple[jax.Array, Any]] = paged_attention
        more: dict[str, Any] = {}
        if is_by_head(cache, k):
            problem = problem_of(q, k, cache, batch, window=window, soft_cap=soft_cap, has_sinks=sinks is not None)
            if self.path(problem).is_kernel:
                attend = ragged_paged_attention
                more["context"] = Context(self.chip, False if self.chip.is_tpu else pltpu.InterpretParams())
        return attend(q, k, v, cache, batch, scale, window=window, table=table, sinks=sinks, soft_cap=soft_cap, **more)

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
        soft_cap: float | None = None,
    ) -> tuple[jax.Array, Any]:
        """See `paged_attention`; where there are several data ranks, `batch` is that of each, see `PagedMixing`.

        Raises:
          ConfigError: see `path`.
        """
        rules = (scale, window, table, soft_cap)
        if self.mesh.size == 1:
            return self._attend(q, k, v, cache, batch, sinks, *rules)
        ranks = data_axis(self.mesh)
        heads = PartitionSpec(ranks, self.rules.get("heads"))
        kv_heads = PartitionSpec(ranks, self.rules.get("kv_heads"))
        # Keys and values of a head lie together.
        in_cache = kv_heads if is_by_head(cache, k) else PartitionSpec(ranks, None, self.rules.get("kv_heads"))
        by_head = PartitionSpec(self.rules.get("heads"))
        run = jax.shard_map(
            lambda q, k, v, cache, batch, sinks: self._attend(q, k, v, cache, own_batch(batch, ranks), sinks, *rules),
            mesh=self.mesh,
            in_specs=(heads, kv_heads, kv_heads, in_cache, by_rank(self.mesh).spec, None if sinks is None else by_head),
            out_specs=(heads, in_cache),
            check_vma=False,  # where no axis is split, every device computes the same, which no type can say
        )
        return run(q, k, v, cache, batch, sinks)


def _words(problem: Problem) -> str:
    """A problem for messages."""
    p = problem
    rules = [f"window {p.window}"] if p.window is not None else []
    rules += ["sinks"] if p.has_sinks else []
    rules += [f"soft cap {p.soft_cap:g}"] if p.soft_cap is not None else []
    return (
        f"{p.num_tokens} tokens, {p.num_heads} heads of size {p.head_dim} over {p.num_kv_heads} KV heads in {p.cache_dtype}"
        f"{''.join(f', {rule}' for rule in rules)}"
    )
