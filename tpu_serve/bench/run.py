"""One benchmark from options to report: checks, engine, cases, figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tpu_serve.bench import decode, prefill
from tpu_serve.bench.bound import Bound
from tpu_serve.bench.driver import Driver, check_batch, check_context
from tpu_serve.bench.report import Environment, Report
from tpu_serve.bench.sweep import Sweep
from tpu_serve.checkpoint.folder import resolve
from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.devices import take_devices
from tpu_serve.engine.build import Phase, build_engine
from tpu_serve.engine.engine import Engine
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model
from tpu_serve.runner.compile_counter import num_compiled


def bench_prefill(config: EngineConfig, sweep: Sweep, on_phase: Phase, on_run: Callable[[], None]) -> Report:
    """Measures prompts to first tokens; `on_run` is called after every batch.

    Raises:
      ConfigError: the engine cannot be built, or a case does not fit it. What config.json tells is checked before weights load.
    """
    num_tokens = max(sweep.input_lens) + 1
    engine, driver = prepare(config, sweep, num_tokens, on_phase)
    driver.check_chunks([chunk for chunk in sweep.chunks if chunk is not None], sweep.batch_sizes)
    bound = Bound.of(engine)
    before = num_compiled()
    results = prefill.run_prefill(driver, sweep, bound.seconds, on_run)
    return _report("prefill", prefill.COLUMNS, engine, sweep, {}, bound, before, results)


def bench_decode(
    config: EngineConfig, sweep: Sweep, output_len: int, on_phase: Phase, on_run: Callable[[], None]
) -> Report:
    """Measures decode steps; `on_run` is called after every batch.

    Raises:
      ConfigError: as for `bench_prefill`, or `output_len` leaves nothing to decode.
    """
    if output_len < 3:
        raise ConfigError(
            "--output-len must be at least 3: neither the first token nor the last comes from a full decode step."
        )
    engine, driver = prepare(config, sweep, max(sweep.input_lens) + output_len, on_phase)
    bound = Bound.of(engine)
    before = num_compiled()
    results = decode.run_decode(driver, sweep, output_len, bound.seconds, on_run)
    return _report("decode", decode.COLUMNS, engine, sweep, {"output_len": output_len}, bound, before, results)


def prepare(config: EngineConfig, sweep: Sweep, num_tokens: int, on_phase: Phase) -> tuple[Engine, Driver]:
    """An engine with a driver for a sweep whose sequences have up to `num_tokens` tokens.

    Raises:
      ConfigError: as for `bench_prefill`.
    """
    check_context(num_tokens, longest_context(config))
    if config.scheduler.max_num_seqs is not None:
        check_batch(max(sweep.batch_sizes), config.scheduler.max_num_seqs)
    engine = build_engine(config, on_phase)
    driver = Driver(engine.core, engine.info.vocab_size, config.model.seed)
    driver.check(sweep.batch_sizes, num_tokens)
    return engine, driver


def longest_context(config: EngineConfig) -> int:
    """Tokens that a sequence may have at most, from options and config.json alone; the engine may find that fewer fit.

    Raises:
      ConfigError: there is no such model, or it is not supported.
    """
    folder = resolve(config.model.source, config.model.revision, weights=False)
    longest = build_model(read_config(folder, config.model.hf_overrides)).max_position
    return min(config.model.given_max_model_len or longest, longest)


def _report(
    name: str,
    columns: dict[str, str],
    engine: Engine,
    sweep: Sweep,
    settings: dict[str, Any],
    bound: Bound,
    num_compiles_before: int,
    results: list[dict[str, Any]],
) -> Report:
    return Report(
        benchmark=name,
        settings={**dataclasses.asdict(sweep), **settings, "seed": engine.config.model.seed},
        environment=Environment.of(take_devices(engine.config.parallel)),  # those that the engine took
        config=engine.config,
        info=engine.info,
        bound=bound.document(),
        bound_note=str(bound),
        num_compiles_before=num_compiles_before,
        num_compiles_during=num_compiled() - num_compiles_before,
        results=results,
        columns=columns,
    )
