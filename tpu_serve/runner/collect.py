"""Reads what a step sampled, as far as a row asked for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_serve.layers.logprobs import Logprobs
from tpu_serve.layers.sampler import Sampled
from tpu_serve.request import TokenLogprobs
from tpu_serve.runner.pack import prompt_targets
from tpu_serve.scheduler.step import SampledToken, Scheduled


def collect(scheduled: tuple[Scheduled, ...], sampled: Sampled, prompt: Logprobs) -> list[SampledToken | None]:
    """Waits for the device.

    Args:
      prompt: a row per token of the step.

    Returns:
      One entry per scheduled row; None where it neither sampled nor brings log-probabilities of its prompt.
    """
    token_ids = np.asarray(sampled.token_ids).tolist()
    wanted = [item.sequence.request.params.logprobs if item.samples else None for item in scheduled]
    if any(count is not None for count in wanted):
        own, top_ids, top = _host(sampled.logprobs)
    results: list[SampledToken | None] = []
    for row, (item, count) in enumerate(zip(scheduled, wanted, strict=True)):
        if not item.samples:
            results.append(None)
        elif count is None:
            results.append(SampledToken(token_ids[row]))
        else:
            results.append(
                SampledToken(token_ids[row], _entry(token_ids[row], own[row], top_ids[row], top[row], count))
            )
    if any(item.sequence.request.params.prompt_logprobs is not None for item in scheduled):
        _add_prompts(results, scheduled, prompt)
    return results


def _add_prompts(results: list[SampledToken | None], scheduled: tuple[Scheduled, ...], prompt: Logprobs) -> None:
    own, top_ids, top = _host(prompt)
    at = 0
    for row, item in enumerate(scheduled):
        count = item.sequence.request.params.prompt_logprobs
        targets = () if count is None else prompt_targets(item)
        if count is not None and targets:
            entries = tuple(
                _entry(token_id, own[place], top_ids[place], top[place], count)
                for place, token_id in enumerate(targets, at)
            )
            result = results[row] or SampledToken(None)
            result.prompt_logprobs, results[row] = entries, result
        at += item.length


def _host(logprobs: Logprobs) -> tuple[Any, Any, Any]:
    own, top_ids, top = (np.asarray(part).tolist() for part in (logprobs.own, logprobs.top_ids, logprobs.top))
    return own, top_ids, top


def _entry(token_id: int, own: float, top_ids: list[int], top: list[float], count: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, own, tuple(zip(top_ids[:count], top[:count], strict=True)))
