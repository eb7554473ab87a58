"""A benchmark of a running server from options to results: ready check, warm-up, and as many runs as asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tpu_serve.bench.serving.arrivals import Arrivals
from tpu_serve.bench.serving.datasets import make_prompts
from tpu_serve.bench.serving.figures import Figures, figures
from tpu_serve.bench.serving.load import Load, send_all
from tpu_serve.bench.serving.outcome import Outcome
from tpu_serve.bench.serving.prompts import DRAWN, DatasetOptions, Prompt
from tpu_serve.bench.serving.server_metrics import ServerSide, between
from tpu_serve.bench.serving.target import Target, wait_ready
from tpu_serve.config import ConfigError
from tpu_serve.text.tokenizer import Tokenizer

WARM_UP_SEED = 2**31
"""Added to the seed for warm-up prompts, so that the prefix cache knows none of those that are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is sent, and how often.

    Attributes:
      num_prompts: of one run.
      num_warmups: requests before the first run that are not measured, `max_concurrency` at a time.
      num_runs: each with prompts of another seed where the dataset is drawn.
      ready_seconds: how long the server may take to answer a first request; 0 sends none.
      percents, objectives: as for `figures`.
      profiles: the server takes a trace of the runs.
    """

    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    arrivals: Arrivals = field(default_factory=Arrivals)
    num_prompts: int = 1000
    seed: int = 0
    max_concurrency: int | None = None
    num_warmups: int = 0
    num_runs: int = 1
    ready_seconds: float = 600.0
    percents: Sequence[float] = (99.0,)
    objectives: Mapping[str, float] = field(default_factory=dict)
    profiles: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `server` is None when the server has no metrics; `num_warm_up_compiles` None when it does not tell."""

    seed: int
    prompts: Sequence[Prompt]
    load: Load
    figures: Figures
    server: ServerSide | None
    num_warm_up_compiles: int | None = None


@dataclass(frozen=True, slots=True)
class Watcher:
    """Told how the benchmark goes."""

    say: Callable[[str], None] = lambda text: None
    on_done: Callable[[], None] = lambda: None


async def bench(target: Target, tokenizer: Tokenizer, plan: Plan, watcher: Watcher) -> list[Result]:
    """Runs a benchmark; one result per run.

    Raises:
      ConfigError: prompts cannot be made, the server does not answer a first request or cannot take a trace, or a warm-up failed.
    """
    prompts = make_prompts(plan.dataset, plan.num_prompts, tokenizer, plan.seed)
    if plan.ready_seconds > 0:
        watcher.say(f"waiting for {target.client.url}")
        await wait_ready(target, Prompt("ready?", 1, prompts[0].output_len), plan.ready_seconds)
    num_compiles = await _warm_up(target, tokenizer, plan, watcher)
    if plan.profiles:
        await _profile(target, "/start_profile")
    results = []
    try:
        for number in range(plan.num_runs):
            seed = plan.seed + number
            if number:
                prompts = await _prompts_again(target, tokenizer, plan, seed, prompts, watcher)
            watcher.say(f"run {number + 1} of {plan.num_runs}: {plan.num_prompts} requests")
            result = await _run(target, tokenizer, plan, prompts, seed, watcher)
            results.append(dataclasses.replace(result, num_warm_up_compiles=None if number else num_compiles))
    finally:
        if plan.profiles:
            await _profile(target, "/stop_profile")
    return results


async def _run(
    target: Target, tokenizer: Tokenizer, plan: Plan, prompts: Sequence[Prompt], seed: int, watcher: Watcher
) -> Result:
    delays = plan.arrivals.delays(len(prompts), seed)
    if plan.dataset.is_self_timed:
        delays = [prompt.at or 0.0 for prompt in prompts]
    before = await target.metrics()
    load = await send_all(target, prompts, delays, plan.max_concurrency, watcher.on_done)
    after = await target.metrics()
    for outcome in load.outcomes:
        _count_tokens(outcome, tokenizer)
    server = None if before is None or after is None else between(before, after)
    return Result(seed, prompts, load, figures(load, plan.percents, plan.objectives), server)


async def _warm_up(target: Target, tokenizer: Tokenizer, plan: Plan, watcher: Watcher) -> int | None:
    """Sends the warm-up; the number of programs that were compiled for it."""
    if not plan.num_warmups:
        return None
    watcher.say(f"warming up with {plan.num_warmups} requests")
    drawn = dataclasses.replace(plan.dataset, is_self_timed=False)
    count = max(plan.num_warmups, plan.dataset.repetition_num_prefixes if drawn.name == "prefix_repetition" else 1)
    prompts = make_prompts(drawn, count, tokenizer, plan.seed + WARM_UP_SEED)[: plan.num_warmups]
    before = await target.metrics()
    load = await send_all(target, prompts, [0.0] * len(prompts), plan.max_concurrency)
    failed = next((outcome for outcome in load.outcomes if not outcome.is_success), None)
    if failed is not None:
        raise ConfigError(f"A warm-up request failed ({failed.cause}): {failed.error}")
    after = await target.metrics()
    return None if before is None or after is None else between(before, after).num_compiled


async def _prompts_again(
    target: Target, tokenizer: Tokenizer, plan: Plan, seed: int, prompts: list[Prompt], watcher: Watcher
) -> list[Prompt]:
    """Prompts of a further run: other ones, or those of the file with the server's prefix cache emptied, where it lets us."""
    if plan.dataset.name in DRAWN:
        return make_prompts(plan.dataset, plan.num_prompts, tokenizer, seed)
    status, _ = await target.post("/reset_prefix_cache")
    if status != 200:
        watcher.say("the server does not reset its prefix cache: further runs find the prompts of earlier ones in it")
    return prompts


async def _profile(target: Target, path: str) -> None:
    status, text = await target.post(path)
    if status != 200:
        raise ConfigError(f"--profile: {target.client.url}{path} answered {status or 'nothing'}: {text[:300]}")


def _count_tokens(outcome: Outcome, tokenizer: Tokenizer) -> None:
    """Counts the answer's tokens itself where the server did not say, which is nearly the same."""
    if outcome.output_tokens < 0:
        outcome.output_tokens = len(tokenizer.encode(outcome.text, add_special_tokens=False))
