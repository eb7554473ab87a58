"""What would only fail in the compiler or on the device, asked before anything is compiled: on-chip memory of kernels, and what 32 bits count."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import MIB
from tpu_serve.engine.attention_problems import attention_problems
from tpu_serve.engine.design import Design
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.kernels.fused_moe_v2 import legality
from tpu_serve.kernels.ragged_paged_attention import config as attention
from tpu_serve.layers.attention import pages_per_block
from tpu_serve.scheduler.scheduler import num_slots

logger = logging.getLogger(__name__)

MOST_PLACES = 2**31
"""Places of a cache, and numbers of a packed batch, are counted with 32 bits and a sign."""


@dataclass(frozen=True, slots=True)
class KernelNeed:
    """What a kernel takes of a core's own memories in the step of a bucket.

    Attributes:
      kernel: with what it is for.
      vmem_bytes, smem_bytes: what it takes.
    """

    kernel: str
    bucket: int
    vmem_bytes: int
    smem_bytes: int


def check_limits(config: EngineConfig, design: Design, plan: EnginePlan) -> list[KernelNeed]:
    """What all kernels of all buckets take.

    Raises:
      ConfigError: more than there is; the message has the kernel, the bucket and the bytes.
    """
    for count, window in zip(plan.num_pages, design.placement.cache_layout.windows, strict=True):
        if count * plan.page_size >= MOST_PLACES:
            seeing = "" if window is None else f" of layers that see {window} tokens"
            raise ConfigError(
                f"A KV cache of {count} pages of {plan.page_size} tokens{seeing} has {count * plan.page_size} places, more than the "
                f"{MOST_PLACES - 1} that can be numbered. Lower --num-pages or --kv-cache-memory-bytes."
            )
    largest = plan.layouts(num_slots(plan.max_num_seqs), pages_per_block(plan.page_size))[-1]
    if largest.size >= MOST_PLACES:
        raise ConfigError(
            f"The batch of a step of {largest.num_tokens} tokens, with page tables of {largest.num_rows} sequences of {largest.max_pages} pages, has "
            f"{largest.size} numbers, more than {MOST_PLACES - 1}. Lower --max-num-seqs or --max-model-len, or raise --page-size."
        )
    chip = design.placement.chip
    needs = [*_experts(design, plan), *_attention(config, design, plan)]
    for need in needs:
        for name, needed, had in (
            ("VMEM", need.vmem_bytes, chip.vmem_bytes),
            ("SMEM", need.smem_bytes, chip.smem_bytes),
        ):
            if needed > had:
                raise ConfigError(
                    f"{need.kernel} needs {needed / MIB:.1f} MiB of {name} for steps of {need.bucket} tokens; {chip.name} has {had / MIB:.1f} MiB. "
                    "Lower --max-num-batched-tokens, or choose smaller --token-buckets."
                )
    return needs


def _experts(design: Design, plan: EnginePlan) -> Iterator[KernelNeed]:
    """Of the fused kernel, whatever table or option its config comes from; it is asked for its legality once more.

    Raises:
      ConfigError: it is not legal.
    """
    if design.experts is None:
        return
    for bucket, tokens in zip(plan.buckets, plan.expert_tokens, strict=True):
        chosen = design.experts.planner.plan(tokens)
        if chosen.config is None:
            continue
        if (reason := legality.check(chosen.problem, chosen.config, design.placement.chip)) is not None:
            raise ConfigError(f"The fused kernel cannot run {tokens} tokens as planned ({chosen.origin}): {reason}.")
        yield KernelNeed(f"fused_moe_v2, mode {chosen.config.mode},", bucket, chosen.vmem_bytes, chosen.smem_bytes)


def _attention(config: EngineConfig, design: Design, plan: EnginePlan) -> Iterator[KernelNeed]:
    """Of the attention kernel where it runs; the log says where it cannot and XLA's attention does instead.

    Raises:
      ConfigError: it cannot run and is asked for.
    """
    chip, backend = design.placement.chip, config.attention.attention_backend
    if backend == "xla" or (backend == "auto" and not chip.is_tpu):
        return
    refused: dict[str, list[int]] = defaultdict(list)
    for bucket, problem in attention_problems(design.placement, design.dtype.name, plan.demand, plan.buckets):
        if (reason := attention.supports(problem, chip)) is not None:
            refused[reason].append(bucket)
            continue
        cut = attention.heuristic(problem, chip)
        yield KernelNeed(
            f"ragged_paged_attention, heads of {problem.head_dim},", bucket, attention.vmem_bytes(problem, cut),
            attention.smem_bytes(problem),
        )  # fmt: skip
    for reason, buckets in refused.items():
        listed = ", ".join(map(str, buckets))
        if backend == "kernel":
            raise ConfigError(
                f"--attention-backend kernel cannot run steps of {listed} tokens: {reason}. Use --attention-backend auto."
            )
        logger.warning(
            "Steps of %s tokens attend without the kernel, which costs copies of the caches: %s", listed, reason
        )
