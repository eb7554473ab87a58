"""What a step takes on a device beside its arguments, calculated from sizes alone and rather too much than too little.

The compiler's own figures replace these where there are such, see `compiled_memory.py`; these are what a plan begins with, and what is said of
devices that are not here. Each term below names what it stands for; arrays that XLA lays over one another are all counted.

Letters: T tokens of a bucket, S sequence rows, H hidden, N query heads, K KV heads, D head size, I intermediate, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tpu_serve.device.chip import MIB
from tpu_serve.device.kv_cache import PagedCache, StateCache
from tpu_serve.device.mesh import num_data_ranks
from tpu_serve.device.params import ParamSpec, iterate
from tpu_serve.engine.attention_problems import is_kernel_everywhere
from tpu_serve.engine.memory import Demand, StepBytes
from tpu_serve.engine.placement import Placement
from tpu_serve.kernels.fused_moe_v2 import buffers
from tpu_serve.kernels.fused_moe_v2.problem import LANES, item_bytes
from tpu_serve.layers.attention import KV_BLOCK, QUERY_BLOCK
from tpu_serve.layers.logprobs import SMALLEST_PIECE
from tpu_serve.layers.moe.planned import Planned
from tpu_serve.moe_plan.plan import MoEPlan
from tpu_serve.scheduler.scheduler import num_slots

F32 = 4
LOGITS_AT_ONCE = 6
"""Arrays f32[S, V] that sampling holds together: logits, edited, scaled, noise, keys and weights of the filters."""
PIECE_AT_ONCE = 4
"""The same of a piece of a prompt whose log-probabilities are reported."""
COUNTS_AT_ONCE = 3
"""The same of u16 counts of tokens: read, copied, and while they loop through the edits of logits."""
STATES_AT_ONCE = 3
"""Recurrent states of S rows: read, updated, and on their way to be written."""
CACHES_COPIED = 2
"""XLA's attention on TPU copies the cache of a layer into the layout that its gathers want; that of the next layer is on its way meanwhile."""

PROGRAM_CODE_BYTES = 14 * MIB
"""Code of a program without its layers. Compiled for Qwen3-30B-A3B on eight v6e: 7 MiB for 64 tokens, 12 for 2048."""
LAYER_CODE_BYTES = {"fused D": 3 * MIB, "fused G": 7 * MIB}
"""Code of a layer by the way its experts run. Compiled for the same: 0.9 MiB in mode D, 5.6 in mode G; Gemma 4 takes more in mode D."""
OTHER_LAYER_CODE_BYTES = 4 * MIB
RECURRENT_CODE_BYTES = 4 * MIB
"""What a recurrent layer has more of it where experts run in mode G: prompts in chunks. Compiled for Qwen3-Next-80B-A3B: 3.4 MiB."""


@dataclass(frozen=True, eq=False)
class StepFormula:
    """What steps of a design take, for any demand and buckets.

    Attributes:
      placement: of the model.
      experts: how experts run; None for a dense model.
      dtype: of activations.
    """

    placement: Placement
    experts: Planned | None
    dtype: np.dtype[Any]

    def __call__(
        self, demand: Demand, buckets: Sequence[int], attention_backend: str = "auto", num_decode_steps: int = 1
    ) -> StepBytes:
        """See `StepBytes`; of the most demanding bucket.

        Args:
          attention_backend, num_decode_steps: as in the options.
        """
        has_kernel = is_kernel_everywhere(self.placement, self.dtype.name, demand, buckets, attention_backend)
        # Several decode steps in one launch have a program for each bucket up to the one in which all sequences fit.
        looped = [
            size for at, size in enumerate(buckets) if num_decode_steps > 1 and [0, *buckets][at] < demand.max_num_seqs
        ]
        return StepBytes(
            max(self._temporaries(size, demand, has_kernel) for size in buckets),
            self._copied_share if self.placement.chip.is_tpu and not has_kernel else 0.0,
            sum(map(self.code_bytes, buckets)) + sum(map(self.code_bytes, looped)),
        )

    def code_bytes(self, bucket: int) -> int:
        """Of the program of a bucket; nothing where it lies in the host's memory beside XLA itself."""
        if not self.placement.chip.is_tpu:
            return 0
        plan = self._moe_plan(bucket)
        of_layer = OTHER_LAYER_CODE_BYTES if plan is None else LAYER_CODE_BYTES.get(plan.way, OTHER_LAYER_CODE_BYTES)
        recurrent = sum(isinstance(one, StateCache) for one in self.placement.cache_layout.layers)
        if plan is not None and plan.way == "fused D":
            recurrent = 0
        return PROGRAM_CODE_BYTES + len(self._widths) * of_layer + recurrent * RECURRENT_CODE_BYTES

    def _moe_plan(self, bucket: int) -> MoEPlan | None:
        ranks = num_data_ranks(self.placement.mesh)  # experts see the tokens of all of them
        return None if self.experts is None else self.experts.planner.plan(ranks * bucket)

    def _temporaries(self, bucket: int, demand: Demand, has_kernel: bool) -> int:
        rows = min(bucket, demand.max_num_seqs)
        return math.ceil(
            self._inputs(bucket, rows, demand)
            + self._activations(bucket)
            + self._attention(bucket, demand.page_size, has_kernel)
            + self._state(rows)
            + self._experts(bucket)
            + self._copied_weight
            + self._logits(bucket, rows, demand.max_num_seqs)
        )

    def _inputs(self, bucket: int, rows: int, demand: Demand) -> float:
        """The packed batch, once as it came and once taken apart, the masks, a bit for each token and taken apart a word, which are not split as
        logits are, and what the host reads of the step."""
        tables = len(self.placement.cache_layout.windows)
        packed = bucket * (6 + tables) + rows * (32 + tables * -(-demand.max_model_len // demand.page_size))
        reported = (bucket + rows) * 2 * 21
        return F32 * (2 * packed + reported) + rows * max(spec.shape[0] for spec in self._tables) * (1 / 8 + F32)

    def _activations(self, bucket: int) -> float:
        """The residual stream before and after a sublayer and its update, two of them in float32 inside of norms, and all that the matrices of
        the widest layer make of it."""
        return bucket * (
            self._hidden * (3 * self.value_bytes + 2 * F32) + max(self._widths.values()) * self.value_bytes
        )

    def _attention(self, bucket: int, page_size: int, has_kernel: bool) -> float:
        """Queries and answers once more in the kernel's layout; for XLA's, blocks of keys that each query gathers, with scores and sums."""
        heads, heads_size = self._attention_sizes
        held = 2 * bucket * heads_size * self.value_bytes
        if has_kernel:
            return held
        queries = min(QUERY_BLOCK, bucket)
        largest = max((2 * one.num_kv_heads * one.head_dim for one in self._paged), default=0)
        gathered = queries * max(KV_BLOCK, page_size) * largest * (self.value_bytes + F32)
        return held + gathered + queries * F32 * (3 * heads * max(KV_BLOCK, page_size) + 2 * heads_size)

    def _state(self, rows: int) -> float:
        """States of all rows of the layer with the largest."""
        layout = self.placement.cache_on_one_device
        sizes = (
            sum(math.prod(array.shape) * F32 for _, array in layer.arrays)
            for layer in layout.layers
            if isinstance(layer, StateCache)
        )
        return STATES_AT_ONCE * rows * max(sizes, default=0)

    def _experts(self, bucket: int) -> float:
        plan = self._moe_plan(bucket)
        if plan is None:
            return 0.0
        p = plan.problem
        tokens, hidden = p.num_tokens, p.padded_hidden
        router = tokens * p.num_experts * 2 * F32 + tokens * p.top_k * 8 * F32
        if plan.config is not None:
            given = 3 * tokens * hidden * self.value_bytes  # padded, given, and gathered again at the end
            if plan.config.mode == "D":
                return router + given + F32 * math.prod(buffers.coefficients_shape(p, plan.config))
            delivered = buffers.delivered_rows(p, plan.config) * p.row_lanes * LANES * item_bytes(p.combine_type)
            return router + given + delivered + p.local_tokens * hidden * 2 * F32
        inner = p.padded_intermediate
        one_expert = 3 * hidden * inner * self.value_bytes
        on_tpu = self.placement.chip.is_tpu
        widened = (p.local_experts if on_tpu or plan.path == "dense" else 1) * one_expert if p.weights.scaled else 0
        if plan.path == "dense":
            per_row = inner * (3 * self.value_bytes + F32) + hidden * (self.value_bytes + F32)
            return router + widened + tokens * p.local_experts * per_row
        rows = tokens * p.top_k
        if plan.path == "ragged" and on_tpu:  # every row twice, for its gate and for its up projection
            per_row = hidden * (2 * self.value_bytes + 2 * F32) + inner * (4 * F32 + self.value_bytes)
            return router + widened + rows * per_row
        rows += 32 * p.local_experts  # whole blocks of rows
        return router + widened + rows * (hidden * (2 * self.value_bytes + 2 * F32) + 2 * inner * F32)

    def _logits(self, bucket: int, rows: int, max_num_seqs: int) -> float:
        """With the counts of tokens, of all slots, of which each device takes its part of the vocabulary."""
        piece = min(bucket, SMALLEST_PIECE)
        counts = COUNTS_AT_ONCE * num_slots(max_num_seqs) * 2
        return self._vocab_size * (F32 * (LOGITS_AT_ONCE * rows + PIECE_AT_ONCE * piece) + counts)

    @property
    def value_bytes(self) -> int:
        """Of an activation."""
        return self.dtype.itemsize

    @cached_property
    def _copied_weight(self) -> int:
        """The largest weight whose rows are not whole tiles, which XLA copies on a TPU to multiply by it; experts are padded where it matters."""
        if not self.placement.chip.is_tpu:
            return 0
        uneven = (
            math.prod(self._shape(spec)) * self.value_bytes
            for path, spec in iterate(self.placement.specs)
            if ".experts." not in path and len(spec.shape) > 1 and self._shape(spec)[-1] % LANES
        )
        return max(uneven, default=0)

    @cached_property
    def _vocab_size(self) -> int:
        """Of the logits that a device holds."""
        return max(self._shape(spec)[0] for spec in self._tables)

    @cached_property
    def _tables(self) -> list[ParamSpec]:
        """Of tokens: the embedding, and what logits are made with."""
        return [spec for path, spec in iterate(self.placement.specs) if path in ("lm_head", "embedding")]

    @cached_property
    def _hidden(self) -> int:
        return self._tables[0].shape[-1]

    @cached_property
    def _widths(self) -> dict[str, int]:
        """For each layer, values that the matrices outside of its experts make of a token on one device."""
        widths: dict[str, int] = defaultdict(int)
        for path, spec in iterate(self.placement.specs):
            found = re.match(r"layers\.(\d+)\.(?!experts\.)", path)
            if found and len(spec.shape) > 1:
                widths[found.group(1)] += self._shape(spec)[-1]
        return dict(widths)

    @cached_property
    def _attention_sizes(self) -> tuple[int, int]:
        """Query heads of a layer on one device, and the values that they hold of a token: the most of any layer."""
        values = [
            self._shape(spec)[-1] for path, spec in iterate(self.placement.specs) if path.endswith("attention.q_proj")
        ]
        smallest = min((one.head_dim for one in self._paged), default=1)
        most = max(values, default=0)
        return most // smallest, most

    @cached_property
    def _paged(self) -> tuple[PagedCache, ...]:
        return tuple(one for one in self.placement.cache_on_one_device.layers if isinstance(one, PagedCache))

    @cached_property
    def _copied_share(self) -> float:
        """How much of the caches the layers whose caches are copied at a time have at most, whatever share of the memory a window's pages get."""
        share = 0.0
        for window in self.placement.cache_layout.windows:
            sizes = [one.num_kv_heads * one.head_dim for one in self._paged if one.window == window]
            share = max(share, CACHES_COPIED * max(sizes) / sum(sizes))
        return share

    def _shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """Of the part that one device holds."""
        (sharding, *_) = spec.shardings(self.placement.mesh, self.placement.rules)
        return sharding.shard_shape(spec.arrays[0].shape)
