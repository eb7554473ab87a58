"""How much an engine gets done when everything is there from the start, without a server in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.bench.driver import check_context
from tpu_serve.bench.report import Environment
from tpu_serve.bench.run import longest_context
from tpu_serve.bench.serving.datasets import make_prompts
from tpu_serve.bench.serving.prompts import DatasetOptions
from tpu_serve.bench.step_times import KINDS, StepTimes
from tpu_serve.checkpoint.folder import resolve
from tpu_serve.config import EngineConfig
from tpu_serve.device.devices import take_devices
from tpu_serve.engine.build import Phase, build_engine
from tpu_serve.engine.choice import Choice
from tpu_serve.engine.engine import Engine
from tpu_serve.engine.frontend import Frontend
from tpu_serve.request import FinishReason, Request, SamplingParams
from tpu_serve.runner.compile_counter import num_compiled
from tpu_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What was found.

    Attributes:
      elapsed: seconds from the first request to the last token.
      num_prompt_tokens, num_output_tokens: of all requests; a prompt counts once however many answers it has.
      steps: where the time went.
      num_compiles: programs compiled meanwhile; anything but 0 spoils the figures.
    """

    model_id: str
    environment: Environment
    num_requests: int
    elapsed: float
    num_prompt_tokens: int
    num_output_tokens: int
    steps: StepTimes
    num_compiles: int
    num_preemptions: int
    settings: dict[str, Any]

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.elapsed

    @property
    def tokens_per_second(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.elapsed

    def text(self) -> str:
        """The lines that people grep, then where the time went."""
        lines = [
            f"bench throughput: {self.model_id} on {self.environment}",
            f"Throughput: {self.requests_per_second:.2f} requests/s, {self.tokens_per_second:.2f} total tokens/s, "
            f"{self.num_output_tokens / self.elapsed:.2f} output tokens/s",
            f"Total num prompt tokens:  {self.num_prompt_tokens}",
            f"Total num output tokens:  {self.num_output_tokens}",
        ]
        for kind in KINDS:
            ms = self.steps.ms_per_step(kind)
            if ms is not None:
                count, seconds = self.steps.num_steps[kind], self.steps.seconds[kind]
                tokens = self.steps.num_tokens[kind] / count
                lines.append(
                    f"{kind.capitalize()} steps: {count}, {ms:.3f} ms/step, {tokens:.1f} tokens/step, {seconds:.3f} s in all"
                )
        if (padding := self.steps.padding) is not None:
            lines.append(f"Padding to token buckets: {padding:.1%} of {self.steps.num_places} tokens computed")
        if self.num_compiles:
            lines.append(f"WARNING: {self.num_compiles} programs were compiled while measuring.")
        if self.num_preemptions:
            lines.append(f"Sequences that lost their pages for a while: {self.num_preemptions}")
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "benchmark": "throughput",
            "model_id": self.model_id,
            "elapsed_time": self.elapsed,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second,
            "output_tokens_per_second": self.num_output_tokens / self.elapsed,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "steps": {
                kind: {
                    "num_steps": self.steps.num_steps[kind],
                    "seconds": self.steps.seconds[kind],
                    "num_tokens": self.steps.num_tokens[kind],
                }
                for kind in KINDS
            },
            "token_buckets": list(self.steps.buckets),
            "padded_tokens_ratio": self.steps.padding,
            "versions": dict(self.environment.versions),
            "device": dict(self.environment.device),
            "compiles_during": self.num_compiles,
            "num_preemptions": self.num_preemptions,
            "settings": self.settings,
        }


def bench_throughput(
    config: EngineConfig, dataset: DatasetOptions, num_prompts: int, num_choices: int, *, is_async: bool, detokenizes: bool,
    on_phase: Phase, on_done: Callable[[], None],
) -> Throughput:  # fmt: skip
    """Measures; `on_done` is called after every answer. Tokens are drawn with temperature 1, and answers go on to their full length.

    Args:
      num_choices: answers per prompt.
      is_async: through the engine's thread and an event loop, as a server does, instead of a plain loop.
      detokenizes: makes text of the answers, as users get it; always done with `is_async`.

    Raises:
      ConfigError: the engine cannot be built, or a prompt does not fit it.
    """
    tokenizer = _tokenizer(config)
    prompts = make_prompts(dataset, num_prompts, tokenizer, config.model.seed)
    ids = [tokenizer.encode(prompt.text) for prompt in prompts]
    num_tokens = max(len(one) + prompt.output_len for one, prompt in zip(ids, prompts, strict=True))
    check_context(num_tokens, longest_context(config))
    engine = build_engine(config, on_phase)
    check_context(num_tokens, engine.info.max_model_len)
    params = [
        SamplingParams(max_tokens=prompt.output_len, temperature=1.0, ignore_eos=True, n=num_choices)
        for prompt in prompts
    ]
    steps, before = StepTimes(buckets=engine.buckets), num_compiled()
    engine.core.on_step = steps.record
    started = time.perf_counter()
    if is_async:
        num_output = asyncio.run(_through_frontend(engine, ids, params, on_done))
    else:
        num_output = _through_core(engine, ids, params, detokenizes, on_done)
    elapsed = time.perf_counter() - started
    return Throughput(
        model_id=engine.info.name,
        environment=Environment.of(take_devices(engine.config.parallel)),
        num_requests=len(prompts),
        elapsed=elapsed,
        num_prompt_tokens=sum(map(len, ids)),
        num_output_tokens=num_output,
        steps=steps,
        num_compiles=num_compiled() - before,
        num_preemptions=engine.core.scheduler.stats.num_preemptions,
        settings={
            "dataset": dataset.name,
            "input_len": dataset.input_len,
            "output_len": dataset.output_len,
            "num_prompts": num_prompts,
            "n": num_choices,
            "async_engine": is_async,
            "detokenizes": is_async or detokenizes,
            "seed": config.model.seed,
        },
    )


def _tokenizer(config: EngineConfig) -> Tokenizer:
    """The engine's, before there is one."""
    if config.model.tokenizer is not None:
        return Tokenizer.load(resolve(config.model.tokenizer, weights=False))
    return Tokenizer.load(resolve(config.model.source, config.model.revision, weights=False))


def _through_core(
    engine: Engine,
    ids: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    detokenizes: bool,
    on_done: Callable[[], None],
) -> int:
    """Runs everything; the number of output tokens."""
    core, choices = engine.core, {}
    for number, (prompt_ids, one) in enumerate(zip(ids, params, strict=True)):
        for request in engine.intake.requests(f"bench-{number}", prompt_ids, one):
            choices[request.id] = _choice(engine, request) if detokenizes else None
            core.add(request)
    num_output = 0
    while core.has_work:
        for output in core.step():
            if output.finish_reason not in (None, FinishReason.LENGTH):
                raise RuntimeError(f"the engine ended a request: {output.error or output.finish_reason}")
            num_output += len(output.token_ids)
            if (choice := choices[output.request_id]) is not None:
                choice.feed(output)
            if output.finish_reason is not None:
                on_done()
    return num_output


def _choice(engine: Engine, request: Request) -> Choice:
    return Choice(request, engine.tokenizer)


async def _through_frontend(
    engine: Engine, ids: Sequence[Sequence[int]], params: Sequence[SamplingParams], on_done: Callable[[], None]
) -> int:
    frontend = Frontend(engine)

    async def one(number: int) -> int:
        async with frontend.start(f"bench-{number}", ids[number], params[number]) as generation:
            async for delta in generation:
                if delta.finish_reason is not None:
                    on_done()
            return generation.num_completion_tokens

    try:
        return sum(await asyncio.gather(*map(one, range(len(ids)))))
    finally:
        await asyncio.to_thread(frontend.close)
