"""What a step costs the host: the scheduler, the packer and the reading of results, with made-up tokens in place of a device.

Steps overlap as in an engine: each is planned and packed before the one before is collected and committed. Nothing is sent to a device, and what
becomes of tokens afterwards (text, HTTP) is not in it.
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tpu_serve import __version__
from tpu_serve.bench.report import summary, table
from tpu_serve.config import ConfigError
from tpu_serve.layers.logprobs import Logprobs
from tpu_serve.layers.sampler import Sampled
from tpu_serve.request import Request, SamplingParams
from tpu_serve.runner.buckets import pick, token_buckets
from tpu_serve.runner.collect import collect
from tpu_serve.runner.pack import Packer, PackLayout, pack_masks
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput

PARTS = ("schedule", "pack", "collect", "commit")
VOCAB_SIZE = 32000
MOST_LOADED = 0.8
"""Share of the token budget that may be needed on average, for those who wait at the start to get in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """What is run.

    Attributes:
      num_seqs: sequences that run at a time.
      context_len: tokens of a prompt; each of the first ones has up to a page more, so that pages do not end all at once.
      num_steps: steps that are measured.
      page_size: tokens per page.
      budget: most tokens of a step.
      enable_prefix_caching: as in an engine; no two prompts are alike.
      end_percent: how many of 100 sequences end in a step. As many prompts come in their place.
      num_runs: how often all of it is done.
    """

    num_seqs: int = 256
    context_len: int = 1024
    num_steps: int = 500
    page_size: int = 64
    budget: int = 2048
    enable_prefix_caching: bool = True
    end_percent: float = 0.0
    num_runs: int = 3

    def __post_init__(self) -> None:
        if self.num_seqs > self.budget:
            raise ConfigError(
                f"--num-seqs {self.num_seqs} is more than --max-num-batched-tokens {self.budget}: each needs a token of every step."
            )
        if not 0 <= self.end_percent <= 50:
            raise ConfigError(f"--end-percent must lie between 0 and 50, got {self.end_percent:g}.")
        num_tokens = self.num_seqs * (1 + self.end_percent / 100 * self.context_len)
        if self.end_percent and num_tokens > MOST_LOADED * self.budget:
            raise ConfigError(
                f"--end-percent {self.end_percent:g} brings {num_tokens:.0f} tokens a step, prompts included, more than {MOST_LOADED:.0%} of "
                f"--max-num-batched-tokens {self.budget}: the queue would not get empty."
            )

    @property
    def max_model_len(self) -> int:
        return self.context_len + self.page_size + self.longest_answer

    @property
    def longest_answer(self) -> int:
        """Tokens of an answer: as many as make the wanted share end, or more than any run has."""
        if self.end_percent:
            return max(2, round(100 / self.end_percent))
        return (
            self.num_steps + self.num_seqs + 4 * -(-self.num_seqs * (self.context_len + self.page_size) // self.budget)
        )


class MadeUpTokens:
    """A runner without a device: packs each step as a real one does and samples ids by chance, which end no sequence."""

    def __init__(self, plan: HostPlan, num_slots: int):
        pages = -(-plan.max_model_len // plan.page_size)
        self._layouts = {
            size: PackLayout(size, min(size, plan.num_seqs), pages, plan.page_size, num_slots)
            for size in token_buckets(plan.budget, 8, 2)
        }
        self._packer = Packer(self._layouts[plan.budget])
        self._random = np.random.default_rng(1)
        nothing = np.zeros(0, np.float32)
        self._nothing: Any = Logprobs(nothing, nothing, nothing)  # type: ignore[arg-type]

    def launch(self, output: SchedulerOutput) -> np.ndarray:
        """What would be sent to the device, i32[...]."""
        rows, layout = output.by_rank, self._layout(output)
        pack_masks(rows, layout.num_rows, VOCAB_SIZE)
        return self._packer.pack(rows, layout)

    def sample(self, output: SchedulerOutput) -> Sampled:
        """What the device would bring."""
        ids = self._random.integers(3, VOCAB_SIZE, self._layout(output).num_rows, np.int32)
        return Sampled(ids, self._nothing)  # type: ignore[arg-type]

    def collect(self, output: SchedulerOutput, sampled: Sampled) -> list[SampledToken | None]:
        """As a runner's, of arrays that are there."""
        return collect(output.by_rank, sampled, self._nothing)

    def _layout(self, output: SchedulerOutput) -> PackLayout:
        return self._layouts[pick(list(self._layouts), output.num_tokens_of_largest)]


class _Traffic:
    """Prompts that are drawn by chance, as many as there are answers."""

    def __init__(self, plan: HostPlan):
        self._plan, self._random, self._number = plan, random.Random(0), 0

    def first(self) -> list[Request]:
        """Those that are there from the start. Where answers end, they do so evenly from the first step on."""
        plan = self._plan
        answers = [plan.longest_answer] * plan.num_seqs
        if plan.end_percent:
            answers = [1 + number * plan.longest_answer // plan.num_seqs for number in range(plan.num_seqs)]
        return [self.request(self._random.randrange(plan.page_size), answer) for answer in answers]

    def request(self, more: int = 0, answer: int | None = None) -> Request:
        plan = self._plan
        self._number += 1
        return Request(
            id=f"request-{self._number}",
            prompt_token_ids=tuple(self._random.choices(range(3, VOCAB_SIZE), k=plan.context_len + more)),
            params=SamplingParams(max_tokens=answer or plan.longest_answer),
            eos_token_ids=frozenset({1, 2}),
            seed=self._number,
        )


@dataclass(frozen=True, slots=True)
class HostRun:
    """Microseconds of each step.

    Attributes:
      parts: by the names of `PARTS`.
      num_rows: rows of each step.
    """

    parts: Mapping[str, Sequence[float]]
    num_rows: Sequence[int]

    @property
    def totals(self) -> list[float]:
        return [math.fsum(step) for step in zip(*self.parts.values(), strict=True)]

    def figures(self) -> dict[str, float]:
        """Median, least and 99th percentile of each part and of their sum, in microseconds; the sum also per row."""
        found: dict[str, float] = {}
        for name, samples in {**self.parts, "sum": self.totals}.items():
            figures = summary(samples)
            found |= {f"{name}_{figure}_us": figures[figure] for figure in ("median", "min", "p99")}
        rows = [total / count for total, count in zip(self.totals, self.num_rows, strict=True)]
        return found | {"row_median_us": summary(rows)["median"]}


@dataclass(frozen=True, slots=True)
class HostCosts:
    """All runs of a plan."""

    plan: HostPlan
    runs: Sequence[HostRun]

    def text(self) -> str:
        """A table with the medians over the runs."""
        figures = [run.figures() for run in self.runs]

        def middle(name: str) -> str:
            return f"{sorted(one[name] for one in figures)[len(figures) // 2]:.1f}"

        rows = [[part, *(middle(f"{part}_{name}_us") for name in ("median", "min", "p99"))] for part in (*PARTS, "sum")]
        plan = self.plan
        head = (
            f"bench host: {plan.num_seqs} sequences of {plan.context_len} tokens and more, {plan.num_steps} steps, {plan.num_runs} runs, "
            f"{plan.end_percent:g}% end per step, prefix caching {'on' if plan.enable_prefix_caching else 'off'}; no device"
        )
        body = table(["us per step", "median", "min", "p99"], rows)
        return f"{head}\n\n{body}\n\nper row: {middle('row_median_us')} us"

    def document(self) -> dict[str, Any]:
        """Everything, as JSON values; `repeats` has the figures of each run."""
        return {
            "benchmark": "host",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"tpu_serve": __version__, "numpy": np.__version__, "python": platform.python_version()},
            "num_cpus": os.cpu_count(),
            "settings": asdict(self.plan),
            "repeats": [run.figures() for run in self.runs],
            "samples_us": [{name: list(samples) for name, samples in run.parts.items()} for run in self.runs],
        }


def bench_host(
    plan: HostPlan,
    on_run: Callable[[], None] = lambda: None,
    make_runner: Callable[[HostPlan, int], MadeUpTokens] = MadeUpTokens,
    clock: Callable[[], float] = time.perf_counter,
) -> HostCosts:
    """Runs a plan; `on_run` is called after every run.

    Args:
      clock: in seconds.
    """
    runs = []
    for _ in range(plan.num_runs):
        runs.append(_run(plan, make_runner, clock))
        on_run()
    return HostCosts(plan, runs)


def _run(plan: HostPlan, make_runner: Callable[[HostPlan, int], MadeUpTokens], clock: Callable[[], float]) -> HostRun:
    pages = -(-plan.max_model_len // plan.page_size) * (plan.num_seqs + 1)
    scheduler = Scheduler(
        Cache([PagePool(1 + pages, plan.page_size)]),
        max_num_seqs=plan.num_seqs,
        max_num_batched_tokens=plan.budget,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=plan.enable_prefix_caching,
    )
    runner, traffic = make_runner(plan, scheduler.num_slots), _Traffic(plan)
    for request in traffic.first():
        scheduler.add(request)
    gc.collect()
    samples: dict[str, list[float]] = {name: [] for name in PARTS}
    num_rows: list[int] = []
    is_full = False
    previous: tuple[SchedulerOutput, Sampled] | None = None
    while len(num_rows) < plan.num_steps:
        is_full = is_full or (not scheduler.waiting and all(one.first_token for one in scheduler.running))
        times = [clock()]
        planned = scheduler.schedule()
        times.append(clock())
        assert planned is not None
        runner.launch(planned)
        times.append(clock())
        sampled = runner.sample(planned)
        if previous is not None:
            begun = clock()
            results = runner.collect(*previous)
            collected = clock()
            outputs = scheduler.commit(previous[0], results)
            times += [begun, collected, clock()]
            for output in outputs:
                if output.finish_reason is not None:
                    scheduler.add(traffic.request())
            if is_full:
                seconds = (times[1] - times[0], times[2] - times[1], times[4] - times[3], times[5] - times[4])
                for name, one in zip(PARTS, seconds, strict=True):
                    samples[name].append(one * 1e6)
                num_rows.append(len(planned.scheduled))
        previous = planned, sampled
    return HostRun(samples, num_rows)
