"""How long one batch takes from its prompts to its last token, with the part up to the first tokens and the decode steps told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tpu_serve.bench.decode import full_steps
from tpu_serve.bench.driver import Run
from tpu_serve.bench.report import Environment, percentile, summary
from tpu_serve.bench.run import prepare
from tpu_serve.bench.sweep import Sweep
from tpu_serve.config import EngineConfig
from tpu_serve.device.devices import take_devices
from tpu_serve.engine.build import Phase
from tpu_serve.runner.compile_counter import num_compiled

PERCENTS = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPlan:
    """One batch, again and again.

    Attributes:
      input_len, output_len: tokens of each prompt and answer.
      batch_size: prompts at once; `num_choices` sequences for each, which compute their prompts by themselves without a prefix cache.
      num_warmup, num_iters: batches that are not measured, and those that are.
      trace_dir: takes a trace of one further batch there instead of measuring.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_choices: int = 1
    num_warmup: int = 10
    num_iters: int = 30
    trace_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """What was found.

    Attributes:
      latencies: seconds of each measured batch.
      prefill_ms: of each: until every sequence had its first token.
      step_ms: of each step in which every sequence got a token after its first; empty when no answer has several.
      num_compiles: programs compiled while measuring; anything but 0 spoils the figures.
      num_preemptions: sequences that lost their pages; likewise.
    """

    model_id: str
    plan: LatencyPlan
    environment: Environment
    latencies: Sequence[float]
    prefill_ms: Sequence[float]
    step_ms: Sequence[float]
    num_compiles: int
    num_preemptions: int

    def text(self) -> str:
        """The lines that people grep, then the parts."""
        if not self.latencies:
            return f"A trace of one batch is in {self.plan.trace_dir}."
        average = sum(self.latencies) / len(self.latencies)
        lines = [f"bench latency: {self.model_id} on {self.environment}", f"Avg latency: {average} seconds"]
        lines += [
            f"{percent}% percentile latency: {percentile(self.latencies, percent)} seconds" for percent in PERCENTS
        ]
        lines.append(_part("Prefill", "ms to the first token of all", self.prefill_ms))
        if self.step_ms:
            lines.append(_part("Decode", "ms per step", self.step_ms))
        if self.num_compiles:
            lines.append(f"WARNING: {self.num_compiles} programs were compiled while measuring.")
        if self.num_preemptions:
            lines.append(f"WARNING: {self.num_preemptions} sequences lost their pages while measuring.")
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        plan = self.plan
        return {
            "benchmark": "latency",
            "model_id": self.model_id,
            "avg_latency": sum(self.latencies) / len(self.latencies),
            "latencies": list(self.latencies),
            "percentiles": {str(percent): percentile(self.latencies, percent) for percent in PERCENTS},
            "prefill_ms": summary(self.prefill_ms),
            "step_ms": summary(self.step_ms) if self.step_ms else None,
            "versions": dict(self.environment.versions),
            "device": dict(self.environment.device),
            "compiles_during": self.num_compiles,
            "num_preemptions": self.num_preemptions,
            "settings": {
                "input_len": plan.input_len,
                "output_len": plan.output_len,
                "batch_size": plan.batch_size,
                "n": plan.num_choices,
                "num_iters": plan.num_iters,
                "num_iters_warmup": plan.num_warmup,
            },
        }


def bench_latency(config: EngineConfig, plan: LatencyPlan, on_phase: Phase, on_run: Callable[[], None]) -> Latency:
    """Measures; `on_run` is called after every batch. Prompts are random, decoding is greedy and goes on to the full length.

    Raises:
      ConfigError: the engine cannot be built, or the batch does not fit it.
    """
    num_sequences = plan.batch_size * plan.num_choices
    sweep = Sweep(
        input_lens=(plan.input_len,),
        batch_sizes=(num_sequences,),
        num_iters=plan.num_iters,
        num_warmup=plan.num_warmup,
    )
    engine, driver = prepare(config, sweep, plan.input_len + plan.output_len, on_phase)

    def once() -> Run:
        return driver.run(num_sequences, plan.input_len, plan.output_len)

    for _ in range(plan.num_warmup):
        once()
        on_run()
    before = num_compiled()
    runs = _measured(once, plan, on_run)
    return Latency(
        model_id=engine.info.name,
        plan=plan,
        environment=Environment.of(take_devices(engine.config.parallel)),
        latencies=[run.seconds for run in runs],
        prefill_ms=[first_tokens(run, num_sequences) * 1e3 for run in runs],
        step_ms=[seconds * 1e3 for run in runs for seconds in full_steps(run, num_sequences)],
        num_compiles=num_compiled() - before,
        num_preemptions=sum(run.num_preemptions for run in runs),
    )


def first_tokens(run: Run, num_sequences: int) -> float:
    """Seconds until every sequence of a batch had its first token."""
    seen: set[str] = set()
    for step in run.steps:
        seen.update(step.request_ids)
        if len(seen) == num_sequences:
            return step.at
    raise ValueError("some sequence got no token")


def _measured(once: Callable[[], Run], plan: LatencyPlan, on_run: Callable[[], None]) -> list[Run]:
    """The measured batches; none when a trace is taken, which would be part of their times."""
    if plan.trace_dir is None:
        runs = []
        for _ in range(plan.num_iters):
            runs.append(once())
            on_run()
        return runs
    with jax.profiler.trace(str(plan.trace_dir)):
        once()
    return []


def _part(name: str, unit: str, samples: Sequence[float]) -> str:
    found = summary(samples)
    return f"{name}: median {found['median']:.3f}, mean {found['mean']:.3f}, p99 {found['p99']:.3f} {unit}"
