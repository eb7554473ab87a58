"""The composition root: reads a model folder and puts the engine together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from tpu_serve.checkpoint.folder import resolve
from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.progress import GB, LoadProgress
from tpu_serve.checkpoint.quantised.folder import DequantisedFolder, open_checkpoint
from tpu_serve.config import ConfigError, EngineConfig, SamplingOptions
from tpu_serve.device.batch import zeros
from tpu_serve.device.chip import GIB, chip_of
from tpu_serve.device.devices import take_devices
from tpu_serve.device.mesh import make_mesh
from tpu_serve.device.params import random_init
from tpu_serve.engine.core import EngineCore
from tpu_serve.engine.design import Design, design_engine
from tpu_serve.engine.device_memory import DeviceMemory
from tpu_serve.engine.engine import Engine
from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.engine.placement import Placement
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.engine.programs import make_programs
from tpu_serve.engine.quantisation import QuantisationErrors
from tpu_serve.engine.warm_up import WarmUp
from tpu_serve.hf_config import eos_token_ids, read_config, read_generation_config
from tpu_serve.request import InvalidRequest, SamplingParams
from tpu_serve.runner.compile_counter import compile_seconds, num_cache_hits
from tpu_serve.runner.model_runner import ModelRunner
from tpu_serve.runner.programs import Allowed
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler, num_slots
from tpu_serve.scheduler.snapshots import Snapshots
from tpu_serve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Phase = Callable[[str, float], None]
"""Told the name of the phase under way and the share of it that is done, 0 to 1."""


def build_engine(config: EngineConfig, on_phase: Phase = lambda name, share: None) -> Engine:
    """Reads config, tokenizer and weights, allocates the cache and compiles every program.

    Raises:
      ConfigError: something does not fit; everything that can be checked is checked before weights are read.
    """
    on_phase("config", 0.0)
    _set_up_compile_cache(config)
    dummy = config.model.load_format == "dummy"
    folder = resolve(config.model.source, config.model.revision, weights=not dummy)
    hf_config = read_config(folder, config.model.hf_overrides)
    devices = take_devices(config.parallel)
    design = design_engine(config, hf_config, chip_of(devices[0]), make_mesh(devices))
    model, placement, experts = design.model, design.placement, design.experts
    mesh, rules = placement.mesh, placement.rules
    plan = design.plan(config)
    warm_up = None
    if experts is not None:
        experts.planner.prepare(plan.buckets, is_strict=config.moe.moe_strict_tables)
        warm_up = WarmUp(config.moe, experts, plan.buckets) if config.moe.warm_up_measure else None
    on_phase("tokenizer", 0.0)
    tokenizer = _tokenizer(config, folder)
    info = ModelInfo(
        name=config.model.source,
        architecture=hf_config.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_token_ids(hf_config),
        default_params=_default_params(folder, config.sampling),
        num_params=design.num_params,
        max_num_queued=plan.max_num_queued,
        max_num_queued_tokens=config.scheduler.max_num_queued_tokens,
        max_logprobs=config.sampling.max_logprobs,
        scheduling_policy=config.scheduler.scheduling_policy,
    )

    _report(info, plan, placement, design.dtype)

    on_phase("weights", 0.0)
    if dummy:
        params = random_init(placement.specs, mesh, rules, config.model.seed)
    else:
        params = _load(design, on_phase)
    if warm_up is not None:
        on_phase("measure", 0.0)
        experts = warm_up.run(params)
    on_phase("compile", 0.0)
    windows = placement.cache_layout.windows
    scheduler = Scheduler(
        Cache(
            [PagePool(count, plan.page_size, window) for count, window in zip(plan.num_pages, windows, strict=True)],
            None if plan.num_snapshots is None else Snapshots(plan.num_snapshots),
        ),
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    suppressed = read_generation_config(folder).suppressed_ids
    allowed = Allowed(min(tokenizer.vocab_size, model.vocab_size), suppressed)
    programs = make_programs(config, design, plan, allowed, experts)
    runner = ModelRunner(programs, params, zeros(programs.state))
    started, hits = time.perf_counter(), num_cache_hits()
    runner.compile(lambda done, total: on_phase("compile", done / total))
    logger.info(
        "%d programs, for %s tokens, were ready in %.1f s; %d of them came from the compile cache",
        len(plan.buckets), ", ".join(map(str, plan.buckets)), time.perf_counter() - started, num_cache_hits() - hits,
    )  # fmt: skip
    core = EngineCore(scheduler, runner)
    return Engine(
        config,
        info,
        Intake(info, config.model.seed, tokenizer),
        core,
        tokenizer,
        experts.planner.counts() if experts else {},
        buckets=plan.buckets,
        memory_bytes=DeviceMemory(placement, plan, devices[0]),
        compile_costs=lambda: (num_cache_hits(), compile_seconds()),
    )


def _set_up_compile_cache(config: EngineConfig) -> None:
    cache = config.compile.cache_folder
    # JAX looks at these settings once, at the process's first compilation; another engine may have been built before this one.
    compilation_cache.reset_cache()
    if cache is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--compile-cache-dir {cache} cannot be used: {error.strerror}. 'off' does without."
        ) from None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    # Small programs too: a second start should compile nothing.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _load(design: Design, on_phase: Phase) -> Any:
    """The weights of the checkpoint on the devices."""
    placement = design.placement
    files = open_checkpoint(design.hf_config.folder, design.hf_config)
    if isinstance(files, DequantisedFolder):
        what = "All of it" if design.format.name is None else "All but the experts"
        logger.info("The checkpoint is quantised: %s. %s is restored to the type of the model", files.scheme, what)
        if files.unused:
            logger.info("Scales of activations and of the KV cache are not used: %d tensors", len(files.unused))
    line, errors, started, num_bytes = LoadProgress(logger.info), QuantisationErrors(), time.perf_counter(), 0

    def progress(done: int, total: int) -> None:
        nonlocal num_bytes
        num_bytes = done
        line(done, total)
        on_phase("weights", done / max(1, total))

    params = load_params(
        placement.specs, files, placement.mesh, placement.rules, progress=progress, on_quantised=errors,
        ignore=design.ignored_weights,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    logger.info("Read %.3f GB of weights in %.1f s (%.2f GB/s)", num_bytes / GB, seconds, num_bytes / GB / seconds)
    errors.report(design.format)
    return params


def _tokenizer(config: EngineConfig, folder: Path) -> Tokenizer:
    if config.model.tokenizer is None:
        return Tokenizer.load(folder)
    is_local = Path(config.model.tokenizer).expanduser().is_dir()  # --revision is then the model's alone
    return Tokenizer.load(resolve(config.model.tokenizer, None if is_local else config.model.revision, weights=False))


def _default_params(folder: Path, options: SamplingOptions) -> dict[str, Any]:
    """Sampling defaults of the server. Where they come from, and what of the model's is left out, is in the log."""
    recommended = read_generation_config(folder)
    given: dict[str, Any] = dict(recommended.sampling)
    if options.generation_config != "auto":
        if given:
            logger.info("Sampling defaults of generation_config.json are not used: %s", _listed(given))
        given = {}
    elif recommended.unused:
        logger.warning(
            "generation_config.json asks for %s, which is not supported: it is left out", ", ".join(recommended.unused)
        )
    if given:
        logger.info("Sampling defaults from generation_config.json: %s", _listed(given))
    _check_defaults("generation_config.json", given)
    if options.overrides:
        logger.info("Sampling defaults from --override-generation-config: %s", _listed(options.overrides))
        given |= options.overrides
        given = {name: value for name, value in given.items() if value is not None}
        _check_defaults("--override-generation-config", given)
    return given


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _check_defaults(origin: str, values: Mapping[str, Any]) -> None:
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise ConfigError(f"{origin}: {error.message}") from None


def _report(info: ModelInfo, plan: EnginePlan, placement: Placement, dtype: Any) -> None:
    count, name = placement.mesh.size, placement.chip.name
    logger.info(
        "%s: %.1fM parameters, %.3f GiB of weights in %s on %s",
        info.architecture, info.num_params / 1e6, placement.param_bytes / GIB, dtype.name,
        name if count == 1 else f"each of {count} {name} devices",
    )  # fmt: skip
    layout = placement.cache_on_one_device
    sizes = list(zip(plan.num_pages, layout.windows, strict=True))
    cache_tokens = (plan.num_pages[0] - 1) * plan.page_size
    cache_bytes = sum(pages * layout.page_bytes(plan.page_size, window) for pages, window in sizes)
    logger.info(
        "KV cache size: %d tokens in pages of %d (%.3f GiB%s). Maximum concurrency for %d tokens per request: %.1fx",
        cache_tokens, plan.page_size, cache_bytes / GIB, "" if count == 1 else " on each device", plan.max_model_len,
        plan.concurrency(layout.windows),
    )  # fmt: skip
    for pages, window in sizes:
        if window is not None:
            logger.info("Layers that see %d tokens: %d pages, given back behind the window", window, pages - 1)
    if plan.num_snapshots is not None:
        rows = num_slots(plan.max_num_seqs) + plan.num_snapshots
        logger.info(
            "Recurrent state: %.3f MiB a sequence, %.3f GiB for %d slots and %d snapshots of the prefix cache",
            layout.state_bytes / 2**20, rows * layout.state_bytes / GIB, rows - plan.num_snapshots, plan.num_snapshots,
        )  # fmt: skip
