"""The benchmarks over a real scheduler and a runner that only counts."""

import pytest

from tpu_serve.bench import decode, prefill
from tpu_serve.bench.decode import full_steps, run_decode
from tpu_serve.bench.driver import Driver, Run, Step
from tpu_serve.bench.prefill import run_prefill
from tpu_serve.bench.sweep import Sweep
from tpu_serve.config import ConfigError
from tpu_serve.engine.core import EngineCore
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.step import SampledToken


class CountingTicket:
    def __init__(self, output):
        self.output = output


class CountingRunner:
    """Samples token 1 everywhere; keeps the prompts that it was given."""

    def __init__(self):
        self.prompts = []

    def launch(self, output):
        for item in output.scheduled:
            if item.start == 0:
                self.prompts.append(item.sequence.request.prompt_token_ids)
        return CountingTicket(output)

    def collect(self, ticket):
        return [SampledToken(1) if item.samples else None for item in ticket.output.scheduled]


def make_driver(*, seed=0, num_pages=100, budget=64, max_num_seqs=8, max_model_len=64):
    scheduler = Scheduler(
        Cache([PagePool(num_pages, 4)]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )
    return Driver(EngineCore(scheduler, CountingRunner()), vocab_size=100, seed=seed)


def make_sweep(**changes):
    return Sweep(**{"input_lens": (5, 9), "batch_sizes": (1, 3), "num_iters": 2, "num_warmup": 1, **changes})


def one_ms_a_row(rows):
    return len(rows) * 1e-3


def look_up(result, path):
    for key in path.split("."):
        result = result[key]
    return result


def test_prefill_runs_every_case_as_often_as_asked():
    driver, calls = make_driver(), []
    results = run_prefill(driver, make_sweep(), one_ms_a_row, lambda: calls.append(1))
    assert [(result["input_len"], result["batch_size"]) for result in results] == [(5, 1), (5, 3), (9, 1), (9, 3)]
    assert [len(result["samples_ms"]) for result in results] == [2, 2, 2, 2]
    assert len(calls) == make_sweep().num_runs == 12
    assert [len(prompt) for prompt in driver.core.runner.prompts] == [5] * 12 + [9] * 12
    for result in results:
        assert all(look_up(result, path) is not None for path in prefill.COLUMNS.values())
        rate = result["input_len"] * result["batch_size"] / result["latency_ms"]["median"] * 1e3
        assert result["tokens_per_second"] == pytest.approx(rate)
    driver.core.scheduler.check()


def test_prompts_are_random_and_follow_the_seed():
    first, same, other = make_driver(seed=1), make_driver(seed=1), make_driver(seed=2)
    for driver in (first, same, other):
        driver.run(3, 20, 1)
    assert first.core.runner.prompts == same.core.runner.prompts != other.core.runner.prompts
    assert len(set(first.core.runner.prompts)) == 3
    assert all(0 <= token < 100 for prompt in first.core.runner.prompts for token in prompt)


def test_a_long_prefill_takes_several_steps():
    results = run_prefill(make_driver(budget=16), make_sweep(input_lens=(20,), batch_sizes=(2,)), one_ms_a_row)
    assert results[0]["num_steps"] == 3
    assert results[0]["bound_ms"] == pytest.approx(1 + 2 + 1), "16 of one; its last 4 beside 12 of the other; 8"


def test_chunks_limit_the_tokens_of_a_step():
    driver = make_driver(budget=32)
    results = run_prefill(driver, make_sweep(input_lens=(20,), batch_sizes=(1,), chunks=(8, None)), one_ms_a_row)
    assert [(result["chunk"], result["num_steps"]) for result in results] == [(8, 3), (32, 1)]
    assert driver.core.scheduler.max_num_batched_tokens == 32
    assert make_sweep(chunks=(8, None)).num_runs == 2 * make_sweep().num_runs


@pytest.mark.parametrize(
    ("chunk", "message"), [(33, "--chunk 33 needs --max-num-batched-tokens 33; it is 32"), (2, "less than a token for each of a batch of 3")]
)  # fmt: skip
def test_chunks_that_the_engine_cannot_run_are_refused(chunk, message):
    with pytest.raises(ConfigError, match=message):
        make_driver(budget=32).check_chunks([8, chunk], (1, 3))


def test_decode_counts_full_steps_only():
    results = run_decode(make_driver(), make_sweep(), 7, one_ms_a_row)
    for result in results:
        assert len(result["samples"]["step_ms"]) == 2 * 5, "every token but the first and the last one"
        assert len(result["samples"]["prefill_ms"]) == 2
        assert all(look_up(result, path) is not None for path in decode.COLUMNS.values())
        rate = result["batch_size"] / result["step_ms"]["mean"] * 1e3
        assert result["tokens_per_second"] == pytest.approx(rate)
        assert result["bound_ms"] == result["batch_size"]
        assert result["bound_share"] == pytest.approx(result["batch_size"] / result["step_ms"]["median"])


def test_full_steps_begin_after_the_last_first_token():
    tokens = {1.0: "a", 3.0: "ab", 3.5: "ab", 4.5: "ba", 4.75: "ab", 5.0: "b"}
    steps = [Step(at, tuple(names), at < 4.75, len(names)) for at, names in tokens.items()]
    assert full_steps(Run(steps), 2) == [0.5, 1.0]


def test_decode_without_a_full_step_is_an_error():
    with pytest.raises(ConfigError, match="never decodes as a whole"):
        run_decode(make_driver(budget=16), make_sweep(input_lens=(40,), batch_sizes=(3,)), 3, one_ms_a_row)


@pytest.mark.parametrize(
    ("driver", "batch_sizes", "num_tokens", "message"),
    [
        ({}, (1,), 65, "65 tokens do not fit the context of 64"),
        ({}, (1, 9), 10, "needs --max-num-seqs 9; it is 8"),
        ({"num_pages": 20}, (2,), 40, "needs 20 pages of the KV cache; 19 are there"),
    ],
)
def test_what_does_not_fit_is_refused(driver, batch_sizes, num_tokens, message):
    with pytest.raises(ConfigError, match=message):
        make_driver(**driver).check(batch_sizes, num_tokens)


def test_what_fits_exactly_is_run():
    driver = make_driver(num_pages=21)
    driver.check((2,), 40)
    assert driver.run(2, 30, 10).num_preemptions == 0
