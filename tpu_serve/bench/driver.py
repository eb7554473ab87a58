"""Drives an engine core step by step with random prompts, no server and no thread in between."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.engine.core import EngineCore
from tpu_serve.request import FinishReason, Request, SamplingParams
from tpu_serve.scheduler.step import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Step:
    """One call of `EngineCore.step` that brought tokens.

    Attributes:
      at: when it returned, in seconds since the first request was added.
      request_ids: which requests got tokens.
      launched: it launched another step meanwhile, as all but the last do.
      num_tokens: tokens of all of them; several for each request where a launch has several steps.
    """

    at: float
    request_ids: tuple[str, ...]
    launched: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One batch from its first request to its last token.

    Attributes:
      steps: those that brought tokens, in order.
      launches: the rows of each launch that was collected, as (position of the first token, how many tokens); of several data ranks those of
        the one with most tokens.
      num_launched: steps launched.
      num_preemptions: sequences that lost their pages for a while: the figures are not of a steady state then.
    """

    steps: list[Step] = field(default_factory=list)
    launches: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    num_launched: int = 0
    num_preemptions: int = 0

    @property
    def seconds(self) -> float:
        return self.steps[-1].at


class Driver:
    """Runs batches of equal requests to their end.

    Args:
      core: idle, with prefix caching off, and nobody else's.
      vocab_size: prompts are drawn uniformly from all ids.
      seed: equal seeds give equal prompts.
    """

    def __init__(self, core: EngineCore, vocab_size: int, seed: int = 0):
        self.core, self._vocab_size = core, vocab_size
        self._random = np.random.default_rng(seed)
        self._ids = itertools.count()

    def check(self, batch_sizes: Sequence[int], num_tokens: int) -> None:
        """Checks that batches of sequences up to `num_tokens` long run as a whole.

        Raises:
          ConfigError: they are longer than the context, wider than a step or larger than the KV cache.
        """
        scheduler, largest = self.core.scheduler, max(batch_sizes)
        check_context(num_tokens, scheduler.max_model_len)
        check_batch(largest, scheduler.max_num_seqs)
        for pool in scheduler.cache.pools:
            num_pages = largest * pool.most_pages(num_tokens, scheduler.max_num_batched_tokens)
            if num_pages > pool.num_usable:
                raise ConfigError(
                    f"A batch of {largest} with {num_tokens} tokens each needs {num_pages} pages of the KV cache; "
                    f"{pool.num_usable} are there. Raise --num-pages or --kv-cache-memory-bytes, or take a smaller --batch-size."
                )

    def check_chunks(self, chunks: Sequence[int], batch_sizes: Sequence[int]) -> None:
        """Raises `ConfigError` where steps of so many tokens are not the engine's, or are narrower than a batch."""
        limit = self.core.scheduler.max_num_batched_tokens
        for chunk in chunks:
            if chunk > limit:
                raise ConfigError(f"--chunk {chunk} needs --max-num-batched-tokens {chunk}; it is {limit}.")
            if chunk < max(batch_sizes):
                raise ConfigError(f"--chunk {chunk} is less than a token for each of a batch of {max(batch_sizes)}.")

    def run(self, batch_size: int, input_len: int, output_len: int) -> Run:
        """Adds `batch_size` random prompts at once and steps until each has `output_len` tokens.

        Raises:
          RuntimeError: the engine ended a request early.
        """
        requests = [self._request(input_len, output_len) for _ in range(batch_size)]
        core, run = self.core, Run()
        outputs_seen: list[SchedulerOutput] = []
        core.on_step = lambda output, seconds: outputs_seen.append(output)
        num_steps, num_preemptions = core.num_steps, core.scheduler.stats.num_preemptions
        gc.collect()
        started = time.perf_counter()
        for request in requests:
            core.add(request)
        while core.has_work:
            num_before = core.num_steps
            outputs = core.step()
            if outputs:
                at = time.perf_counter() - started
                request_ids = tuple(output.request_id for output in outputs)
                num_tokens = sum(len(output.token_ids) for output in outputs)
                run.steps.append(Step(at, request_ids, core.num_steps > num_before, num_tokens))
            for output in outputs:
                if output.finish_reason not in (None, FinishReason.LENGTH):
                    raise RuntimeError(f"the engine ended a request: {output.error or output.finish_reason}")
        launches = [_rows(output) for output in outputs_seen]
        return Run(
            run.steps, launches, core.num_steps - num_steps, core.scheduler.stats.num_preemptions - num_preemptions
        )

    def _request(self, input_len: int, output_len: int) -> Request:
        return Request(
            id=f"bench-{next(self._ids)}",
            prompt_token_ids=tuple(self._random.integers(0, self._vocab_size, input_len).tolist()),
            params=SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True),
        )


def _rows(output: SchedulerOutput) -> tuple[tuple[int, int], ...]:
    largest = max(output.by_rank, key=lambda rows: sum(row.length for row in rows))
    return tuple((row.start, row.length) for row in largest)


def check_batch(batch_size: int, max_num_seqs: int) -> None:
    """Raises `ConfigError` when a batch is wider than a step."""
    if batch_size > max_num_seqs:
        raise ConfigError(f"A batch of {batch_size} needs --max-num-seqs {batch_size}; it is {max_num_seqs}.")


def check_context(num_tokens: int, max_model_len: int) -> None:
    """Raises `ConfigError` when prompt and answer together are longer than the context."""
    if num_tokens > max_model_len:
        raise ConfigError(
            f"A prompt and answer of {num_tokens} tokens do not fit the context of {max_model_len} tokens (--max-model-len)."
        )
