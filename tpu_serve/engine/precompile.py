"""Compiles what an engine would at its start, and keeps it, without weights and perhaps without the devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tpu_serve.checkpoint.folder import resolve
from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import chip_of
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.build import allowed_tokens, load_tokenizer
from tpu_serve.engine.compiling import ProgramMaker, forget_places, set_up_compile_cache
from tpu_serve.engine.design import design_engine
from tpu_serve.engine.limits import check_limits
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.engine.sizing import first_plan, settled, verified
from tpu_serve.hf_config import read_config
from tpu_serve.runner.compilation import Made, Program
from tpu_serve.runner.compile_counter import num_hits_here
from tpu_serve.runner.jax_cache import entries, is_whole, remove_damaged
from tpu_serve.runner.program_store import ProgramStore


@dataclass(frozen=True, slots=True)
class Kept:
    """A program in the folder.

    Attributes:
      seconds: that it took, now or when it was made.
      was_there: nothing had to be compiled.
      temporary_bytes: scratch on each device while it runs, None where the compiler does not tell.
    """

    name: str
    seconds: float
    was_there: bool
    temporary_bytes: int | None


def precompile(
    config: EngineConfig, devices: Sequence[Any], on_phase: Callable[[str, float], None]
) -> tuple[EnginePlan, list[Kept]]:
    """Fills the folder of --compile-cache-dir with the programs of an engine of these options.

    Args:
      devices: that it would take; see `target_devices` for such as are not here.
      on_phase: told how much of what is done.

    Raises:
      ConfigError: such an engine would not start, the compiler refuses a program, or the folder cannot be written.
    """
    folder = config.compile.cache_folder
    if folder is None:
        raise ConfigError("--compile-cache-dir off leaves nowhere to keep programs.")
    if config.moe.warm_up_measure:
        raise ConfigError(
            "--warm-up-measure decides on the chips themselves what their programs are: nothing can be compiled before."
        )
    on_phase("config", 0.0)
    model = resolve(config.model.source, config.model.revision, weights=False)
    hf_config = read_config(model, config.model.hf_overrides)
    mesh = make_mesh(devices, config.parallel.data_parallel_size)
    design = design_engine(config, hf_config, chip_of(devices[0]), mesh)
    allowed = allowed_tokens(design, load_tokenizer(config, model))
    entries = _Entries(folder, devices, config.compile.compiler_flags)
    if design.placement.chip.is_tpu:
        jax.config.update("jax_enable_compilation_cache", False)  # it could not find these again
        forget_places()
    else:
        set_up_compile_cache(config.compile)
    plan = first_plan(config, design)
    if design.experts is not None:
        design.experts.planner.prepare(plan.expert_tokens, is_strict=config.moe.moe_strict_tables)
    check_limits(config, design, plan)
    compile = entries.make if design.placement.chip.is_tpu else entries.through_jax
    maker = ProgramMaker(config, design, allowed, compile=compile)
    on_phase("compile", 0.0)
    compilation = None
    try:
        plan = settled(config, design, plan, maker.largest)
        _, compilation = maker.begin(plan)
        compilation.wait(compilation.names, lambda done, total: on_phase("compile", done / total))
        plan = verified(config, design, plan, compilation)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"The compiler refuses a program: {str(error).strip().splitlines()[0]}") from error
    finally:
        if compilation is not None:
            compilation.cancel()
    return plan, [entries.kept[name] for name in compilation.names]


class _Entries:
    """Makes programs, each of which it keeps in the folder.

    Attributes:
      kept: programs by name.
    """

    def __init__(self, folder: Path, devices: Sequence[Any], flags: Sequence[str]):
        self._folder, self._store = folder, ProgramStore(folder, devices, flags)
        self.kept: dict[str, Kept] = {}

    def make(self, program: Program) -> Made:
        """For devices that are not here: by what a program is made of."""
        lowered = program.lower()
        entry = self._store.find(program.name, lowered)
        was_there = entry is not None
        if entry is None:
            entry = self._store.make(program.name, lowered)
        temporary = entry.memory.get("temp_size_in_bytes")
        self.kept[program.name] = Kept(program.name, entry.seconds, was_there, temporary)
        return Made(None, memory=entry.figures)

    def through_jax(self, program: Program) -> Made:
        """For devices that are here, as an engine does: JAX's cache knows them.

        Raises:
          ConfigError: JAX, which says why in a warning, has not kept it.
        """
        lowered = program.lower()
        remove_damaged(lowered, self._folder)
        hits, before, started = num_hits_here(), entries(lowered, self._folder), time.perf_counter()
        made = Made(lowered.compile())
        was_there = num_hits_here() > hits
        if not was_there and not any(map(is_whole, entries(lowered, self._folder) - before)):
            raise ConfigError(
                f"The program {program.name!r} could not be kept in {self._folder}: the warning above has the reason."
            )
        told = made.memory_analysis()
        self.kept[program.name] = Kept(
            program.name,
            time.perf_counter() - started,
            was_there,
            None if told is None else int(told.temp_size_in_bytes),
        )
        return made
