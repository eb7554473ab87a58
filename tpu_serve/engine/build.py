"""The composition root: reads a model folder and puts the engine together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tpu_serve.checkpoint.folder import resolve
from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.progress import GB, LoadProgress
from tpu_serve.checkpoint.quantised.folder import DequantisedFolder, open_checkpoint
from tpu_serve.config import ConfigError, EngineConfig, SamplingOptions
from tpu_serve.device.chip import GIB, chip_of
from tpu_serve.device.devices import take_devices
from tpu_serve.device.mesh import make_mesh
from tpu_serve.device.params import random_init
from tpu_serve.engine.compiling import ProgramMaker, set_up_compile_cache
from tpu_serve.engine.core import EngineCore
from tpu_serve.engine.design import Design, design_engine
from tpu_serve.engine.device_memory import DeviceMemory
from tpu_serve.engine.engine import Engine
from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.engine.limits import check_limits
from tpu_serve.engine.placement import Placement
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.engine.quantisation import QuantisationErrors
from tpu_serve.engine.sizing import first_plan, settled, verified
from tpu_serve.engine.warm_up import WarmUp
from tpu_serve.hf_config import eos_token_ids, read_config, read_generation_config
from tpu_serve.request import InvalidRequest, SamplingParams
from tpu_serve.runner.compilation import Compilation
from tpu_serve.runner.compile_counter import compile_seconds, expected, num_cache_hits
from tpu_serve.runner.model_runner import ModelRunner
from tpu_serve.runner.programs import Allowed
from tpu_serve.runner.recompiles import Recompiles
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.data_parallel import DataParallelScheduler
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
    with expected():
        return _build(config, on_phase)


def _build(config: EngineConfig, on_phase: Phase) -> Engine:
    on_phase("config", 0.0)
    set_up_compile_cache(config.compile)
    dummy = config.model.load_format == "dummy"
    folder = resolve(config.model.source, config.model.revision, weights=not dummy)
    hf_config = read_config(folder, config.model.hf_overrides)
    devices = take_devices(config.parallel)
    design = design_engine(
        config, hf_config, chip_of(devices[0]), make_mesh(devices, config.parallel.data_parallel_size)
    )
    model, placement, experts = design.model, design.placement, design.experts
    plan = first_plan(config, design)
    warm_up = None
    if experts is not None:
        experts.planner.prepare(plan.expert_tokens, is_strict=config.moe.moe_strict_tables)
        warm_up = WarmUp(config.moe, experts, plan.expert_tokens) if config.moe.warm_up_measure else None
    check_limits(config, design, plan)
    on_phase("tokenizer", 0.0)
    tokenizer = load_tokenizer(config, folder)
    allowed = allowed_tokens(design, tokenizer)
    # What runs the experts is known only once it has been measured, which takes weights.
    designed = ProgramMaker(config, design, allowed)
    maker = designed if warm_up is None else None
    plan = settled(config, design, plan, designed.largest)
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

    begun = None if maker is None else maker.begin(plan)
    try:
        params = _weights(config, design, on_phase, None if begun is None else begun[1])
        if warm_up is not None:
            on_phase("measure", 0.0)
            experts = warm_up.run(params)
        if maker is None or begun is None:
            maker = ProgramMaker(config, design, allowed, experts)
            begun = maker.begin(plan)
        on_phase("compile", 0.0)
        programs, compilation = begun
        runner = ModelRunner(programs, params, compilation)
        is_early = config.compile.serve_while_compiling
        runner.start(lambda done, total: on_phase("compile", done / total), wait_for_all=not is_early)
        plan = verified(config, design, plan, compilation)
    except BaseException:
        if begun is not None:
            begun[1].cancel()
        raise
    maker.report(compilation, plan)
    ranks = [_scheduler(config, plan, placement.cache_layout.windows) for _ in range(plan.num_ranks)]
    scheduler = ranks[0] if len(ranks) == 1 else DataParallelScheduler(ranks)
    core = EngineCore(scheduler, runner, partial(_take_new_programs, runner, ranks) if is_early else None)
    compilation.on_change = core.look_again
    recompiles = Recompiles(config.compile.on_recompile, core.fail)
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
        num_recompiled=lambda: recompiles.num,
        programs=lambda: (compilation.num_done, len(compilation.names)),
    )


def _take_new_programs(runner: ModelRunner, ranks: Sequence[Scheduler]) -> int:
    """See `ModelRunner.take_new_programs`. Launches of several steps are planned once there are programs for them."""
    most = runner.take_new_programs()
    for rank in ranks:
        rank.num_decode_steps = runner.num_decode_steps
    return most


def _scheduler(config: EngineConfig, plan: EnginePlan, windows: Sequence[int | None]) -> Scheduler:
    """Of one data rank.

    Args:
      windows: what the plan's pages are for.
    """
    return Scheduler(
        Cache(
            [PagePool(count, plan.page_size, window) for count, window in zip(plan.num_pages, windows, strict=True)],
            None if plan.num_snapshots is None else Snapshots(plan.num_snapshots),
        ),
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_decode_steps=config.scheduler.num_decode_steps,
    )


def allowed_tokens(design: Design, tokenizer: Tokenizer) -> Allowed:
    """Which tokens the model may sample."""
    suppressed = read_generation_config(design.hf_config.folder).suppressed_ids
    return Allowed(min(tokenizer.vocab_size, design.model.vocab_size), suppressed)


def _weights(config: EngineConfig, design: Design, on_phase: Phase, compilation: Compilation | None) -> Any:
    """The weights on the devices. What is compiled meanwhile and fails ends this."""
    on_phase("weights", 0.0)
    placement = design.placement
    if config.model.load_format == "dummy":
        return random_init(placement.specs, placement.mesh, placement.rules, config.model.seed)

    def progress(name: str, share: float) -> None:
        if compilation is not None and compilation.failure is not None:
            raise compilation.failure
        on_phase(name, share)

    return _load(design, progress)


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


def load_tokenizer(config: EngineConfig, folder: Path) -> Tokenizer:
    """The model's, or the one that --tokenizer names."""
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
    count, name, ranks = placement.mesh.size, placement.chip.name, plan.num_ranks
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
        ranks * cache_tokens, plan.page_size, cache_bytes / GIB, "" if count == 1 else " on each device",
        plan.max_model_len, ranks * plan.concurrency(layout.windows),
    )  # fmt: skip
    if ranks > 1:
        logger.info(
            "Data parallel: %d ranks of %d devices, each with %d of these tokens, %d sequences and %d tokens in a step",
            ranks, count // ranks, cache_tokens, plan.max_num_seqs, plan.max_num_batched_tokens,
        )  # fmt: skip
    of_each = " on each rank" if ranks > 1 else ""
    for pages, window in sizes:
        if window is not None:
            logger.info(
                "Layers that see %d tokens: %d pages%s, given back behind the window", window, pages - 1, of_each
            )
    if plan.num_snapshots is not None:
        rows = num_slots(plan.max_num_seqs) + plan.num_snapshots
        logger.info(
            "Recurrent state: %.3f MiB a sequence, %.3f GiB for %d slots and %d snapshots of the prefix cache%s",
            layout.state_bytes / 2**20, rows * layout.state_bytes / GIB, rows - plan.num_snapshots, plan.num_snapshots,
            of_each,
        )  # fmt: skip
