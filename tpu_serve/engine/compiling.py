"""Programs of an engine on their way: from shapes, before weights are read, and from where earlier starts have kept them."""

from __future__ import annotations

import logging
import time
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from tpu_serve.config import CompileOptions, ConfigError, EngineConfig
from tpu_serve.engine.design import Design
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.engine.programs import make_programs
from tpu_serve.models.base import Experts
from tpu_serve.runner.compilation import Compilation, Compile, Made, compile_now
from tpu_serve.runner.compile_counter import num_cache_hits
from tpu_serve.runner.model_runner import programs_of
from tpu_serve.runner.program_store import ProgramStore
from tpu_serve.runner.programs import Allowed, Programs, step_name

logger = logging.getLogger(__name__)


def set_up_compile_cache(options: CompileOptions) -> None:
    """Says where JAX keeps what this process compiles from now on.

    Raises:
      ConfigError: the folder cannot be used.
    """
    cache = options.cache_folder
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
    forget_places()


def forget_places() -> None:
    """Keeps out of programs, and so of their keys, where on this machine things lie: the code, and the cache itself.

    Kernels carry the source lines of their operations, with paths and callers, and JAX does not strip them from keys. Without them a profile
    shows operations by name only; `--compile-cache-dir off` leaves them in.
    """
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # A cache of a GPU's compiler, whose path is an option of every program.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


class ProgramMaker:
    """Makes the programs of one engine's plans; none of them twice.

    Args:
      config, design: of the engine.
      allowed: which tokens may be sampled.
      experts: what runs them when it is not what was designed.
      compile: makes a program, when it is not to be found or compiled for this process.
    """

    def __init__(
        self,
        config: EngineConfig,
        design: Design,
        allowed: Allowed,
        experts: Experts | None = None,
        compile: Compile | None = None,
    ):
        self._config, self._design, self._allowed, self._experts = config, design, allowed, experts
        self._made: dict[Any, dict[str, Made]] = {}
        self._started, self._hits = time.perf_counter(), num_cache_hits()
        self._compile = compile or _compiler(config, design)

    def programs(self, plan: EnginePlan) -> Programs:
        """Of every bucket of a plan."""
        return make_programs(self._config, self._design, plan, self._allowed, self._experts)

    def largest(self, plan: EnginePlan) -> Made:
        """The step of a plan's largest bucket, which takes most of a device's memory. Compiles it while the caller waits, who can be interrupted."""
        programs = self.programs(plan)
        name = step_name(max(programs.layouts))
        made = self._made.setdefault(_shapes_of(plan), {})
        if name not in made:
            made[name] = Compilation([one for one in programs.steps if one.name == name], self._compile).made(name)
        return made[name]

    def begin(self, plan: EnginePlan) -> tuple[Programs, Compilation]:
        """Begins to compile everything that a plan's engine runs, and returns at once."""
        programs = self.programs(plan)
        return programs, Compilation(programs_of(programs), self._compile, self._made.get(_shapes_of(plan)))

    def report(self, compilation: Compilation, plan: EnginePlan) -> None:
        """Logs what has been compiled by now."""
        logger.info(
            "%d of %d programs, for steps of %s tokens and what they need, were ready %.1f s after they were begun; %d of them were kept from an "
            "earlier start",
            compilation.num_done, len(compilation.names), ", ".join(map(str, plan.buckets)),
            time.perf_counter() - self._started, num_cache_hits() - self._hits,
        )  # fmt: skip


def _compiler(config: EngineConfig, design: Design) -> Compile:
    """From the folder of programs, JAX's cache or the compiler, whichever is first to have it."""
    folder = config.compile.cache_folder
    if folder is None:
        return compile_now
    devices = list(design.placement.mesh.devices.flat)
    return ProgramStore(folder, devices, config.compile.compiler_flags).take_or_compile


def _shapes_of(plan: EnginePlan) -> Any:
    """What of a plan its programs depend on."""
    return plan.num_pages, plan.num_snapshots, plan.max_model_len, plan.page_size, plan.max_num_seqs, plan.buckets
