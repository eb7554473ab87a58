"""Drives a scheduler by hand: names for requests, (name, start, length) for rows."""

from __future__ import annotations

from collections.abc import Iterable

from tpu_serve.request import Constraint, Request, SamplingParams, TokenOutput
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput

EOS, STOP, WORD = 1, 2, 7


def make(
    *, pages: int = 64, page_size: int = 4, seqs: int = 4, budget: int = 16, length: int = 12, caching: bool = True
) -> Scheduler:
    return Scheduler(
        Cache([PagePool(1 + pages, page_size)]),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=length,
        enable_prefix_caching=caching,
    )


def add(
    scheduler: Scheduler,
    name: str,
    prompt: int | list[int],
    max_tokens: int = 20,
    *,
    stop: int = STOP,
    ignore_eos: bool = False,
    salt: str = "",
    priority: int = 0,
    constraint: Constraint | None = None,
    prompt_logprobs: int | None = None,
) -> None:
    """A prompt given as a number has so many tokens, like those of no request with another initial."""
    tokens = [1000 * ord(name[0]) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=(stop,), ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs
    )
    scheduler.add(
        Request(
            id=name,
            prompt_token_ids=tuple(tokens),
            params=params,
            eos_token_ids=frozenset({EOS}),
            cache_salt=salt,
            priority=priority,
            constraint=constraint,
        )
    )


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    scheduler.check()
    return output


def rows(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(item.sequence.request.id, item.start, item.length) for item in output.scheduled]


def commit(scheduler: Scheduler, output: SchedulerOutput, **tokens: int) -> dict[str, TokenOutput]:
    """Every row samples a plain word unless a token is given for its request."""
    results = [
        SampledToken(tokens.get(item.sequence.request.id, WORD)) if item.samples else None for item in output.scheduled
    ]
    outputs = {item.request_id: item for item in scheduler.commit(output, results)}
    scheduler.check()
    return outputs


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step without overlap."""
    output = schedule(scheduler)
    commit(scheduler, output)
    return rows(output)


def drain(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.cache.usage == 0


def names(sequences: Iterable[Sequence]) -> str:
    return "".join(sequence.request.id for sequence in sequences)
