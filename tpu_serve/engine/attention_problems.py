"""What the attention kernel is asked on each device of a placement, before anything is traced."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tpu_serve.device.kv_cache import PagedCache
from tpu_serve.device.params import iterate
from tpu_serve.engine.memory import Demand
from tpu_serve.engine.placement import Placement
from tpu_serve.kernels.ragged_paged_attention.config import supports
from tpu_serve.kernels.ragged_paged_attention.problem import Problem


def attention_problems(
    placement: Placement, dtype: str, demand: Demand, buckets: Sequence[int]
) -> Iterator[tuple[int, Problem]]:
    """(bucket, problem), each distinct one once. Soft caps and sinks, which take nothing that counts, are left out.

    Args:
      dtype: of activations.
    """
    layout = placement.cache_on_one_device
    outputs: dict[int, int] = {}
    for path, spec in iterate(placement.specs):
        if (found := re.fullmatch(r"layers\.(\d+)\.attention\.o_proj", path)) is not None:
            (sharding, *_) = spec.shardings(placement.mesh, placement.rules)
            outputs[int(found.group(1))] = sharding.shard_shape(spec.shape)[0]
    kinds = dict.fromkeys(
        (outputs[at] // layer.head_dim, layer)
        for at, layer in enumerate(layout.layers)
        if isinstance(layer, PagedCache) and at in outputs
    )
    max_pages = -(-demand.max_model_len // demand.page_size)
    for bucket in buckets:
        for heads, layer in kinds:
            yield bucket, Problem(
                bucket, min(bucket, demand.max_num_seqs), max_pages, heads, layer.num_kv_heads, layer.head_dim,
                demand.page_size, layer.window, None, False, dtype, layout.stored,
            )  # fmt: skip


def is_kernel_everywhere(
    placement: Placement, dtype: str, demand: Demand, buckets: Sequence[int], backend: str
) -> bool:
    """Whether the kernel runs in every layer of every bucket, so that no cache is copied.

    Args:
      backend: as in --attention-backend.
    """
    chip = placement.chip
    return (
        (chip.is_tpu or backend == "kernel")
        and backend != "xla"
        and all(supports(problem, chip) is None for _, problem in attention_problems(placement, dtype, demand, buckets))
    )
