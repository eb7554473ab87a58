"""Reads what a step sampled, as far as a row asked for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tpu_serve.layers.logprobs import Logprobs
from tpu_serve.layers.sampler import Sampled
from tpu_serve.request import TokenLogprobs
from tpu_serve.runner.pack import prompt_targets
from tpu_serve.scheduler.step import SampledToken, Scheduled

Rows = Sequence[tuple[Scheduled, ...]]


def collect(by_rank: Rows, sampled: Sampled, prompt: Logprobs) -> list[SampledToken | None]:
    """Waits for the device.

    Args:
      by_rank: the rows of each data rank. What follows has as many rows for each of them, one rank after another.
      prompt: a row per token of the step.

    Returns:
      One entry per scheduled row; None where it neither sampled nor brings log-probabilities of its prompt.
    """
    token_ids = np.asarray(sampled.token_ids).tolist()
    size = len(token_ids) // len(by_rank)
    results: list[SampledToken | None] = []
    for rank, rows in enumerate(by_rank):
        first = rank * size
        results += [
            SampledToken(token_id) if item.samples else None
            for item, token_id in zip(rows, token_ids[first : first + len(rows)], strict=True)
        ]
    params = [item.sequence.request.params for rows in by_rank for item in rows]
    if any([one.logprobs is not None for one in params]):
        _add_logprobs(results, by_rank, sampled.logprobs)
    if any([one.prompt_logprobs is not None for one in params]):
        _add_prompts(results, by_rank, prompt)
    return results


def _add_logprobs(results: list[SampledToken | None], by_rank: Rows, logprobs: Logprobs) -> None:
    own, top_ids, top = _host(logprobs)
    size = len(own) // len(by_rank)
    places = [(item, rank * size + row) for rank, rows in enumerate(by_rank) for row, item in enumerate(rows)]
    for result, (item, place) in zip(results, places, strict=True):
        count = item.sequence.request.params.logprobs
        if result is not None and result.token_id is not None and count is not None:
            result.logprobs = _entry(result.token_id, own[place], top_ids[place], top[place], count)


def collect_steps(scheduled: tuple[Scheduled, ...], sampled: Sampled) -> list[SampledToken | None]:
    """Waits for a launch of several steps.

    Args:
      sampled: with a leading axis for steps.

    Returns:
      One entry per scheduled row, all of which sample: its first token, with the later ones in it.
    """
    wanted = [item.sequence.request.params.logprobs for item in scheduled]
    token_ids = np.asarray(sampled.token_ids).T.tolist()
    if any(count is not None for count in wanted):
        own, top_ids, top = _host(sampled.logprobs)
    results: list[SampledToken | None] = []
    for row, (item, count) in enumerate(zip(scheduled, wanted, strict=True)):
        ids = token_ids[row][: item.num_steps]
        if count is None:
            tokens = [SampledToken(token_id) for token_id in ids]
        else:
            tokens = [
                SampledToken(token_id, _entry(token_id, own[step][row], top_ids[step][row], top[step][row], count))
                for step, token_id in enumerate(ids)
            ]
        tokens[0].later = tuple(tokens[1:])
        results.append(tokens[0])
    return results


def _add_prompts(results: list[SampledToken | None], by_rank: Rows, prompt: Logprobs) -> None:
    own, top_ids, top = _host(prompt)
    size = len(own) // len(by_rank)
    starts = [(item, at) for rank, rows in enumerate(by_rank) for item, at in _starts(rows, rank * size)]
    for row, (item, at) in enumerate(starts):
        count = item.sequence.request.params.prompt_logprobs
        targets = () if count is None else prompt_targets(item)
        if count is not None and targets:
            entries = tuple(
                _entry(token_id, own[place], top_ids[place], top[place], count)
                for place, token_id in enumerate(targets, at)
            )
            result = results[row] or SampledToken(None)
            result.prompt_logprobs, results[row] = entries, result


def _starts(rows: tuple[Scheduled, ...], first: int) -> Iterator[tuple[Scheduled, int]]:
    """Each row with the place of its first token."""
    for item in rows:
        yield item, first
        first += item.length


def _host(logprobs: Logprobs) -> tuple[Any, Any, Any]:
    own, top_ids, top = (np.asarray(part).tolist() for part in (logprobs.own, logprobs.top_ids, logprobs.top))
    return own, top_ids, top


def _entry(token_id: int, own: float, top_ids: list[int], top: list[float], count: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, own, tuple(zip(top_ids[:count], top[:count], strict=True)))
