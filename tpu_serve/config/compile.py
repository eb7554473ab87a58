"""Programs: for which steps, where they are kept, and what is done when one is missing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tpu_serve.config.folders import user_cache
from tpu_serve.option import ConfigError, check_choices, check_types, option

LAUNCH_BARRIER = "--xla_tpu_use_enhanced_launch_barrier=true"
"""What JAX adds to libtpu's flags on a machine that has TPUs. `tpu-serve compile` adds it where there are none."""
_NOT_OF_PROGRAMS = ("--xla_dump_", "--xla_force_host_platform_device_count")


@dataclass(frozen=True)
class CompileOptions:
    """Compiled programs."""

    token_buckets: tuple[int, ...] = option(
        (),
        "token counts that get a compiled program, the last one being the token budget; chosen when left out",
        aliases=("--precompile-token-paddings",),
        metavar="N",
    )
    compile_cache_dir: str | None = option(
        None,
        "folder that keeps compiled programs between starts; 'off' disables it; ~/.cache/tpu-serve/compile when left out",
    )
    serve_while_compiling: bool = option(
        False,
        "answer as soon as the smallest step has its program: prompts then go through in smaller pieces until the larger steps have theirs",
    )
    on_recompile: str = option(
        "warn",
        "what happens when a program is compiled after the start, which should never be: 'count' it in the metrics, 'warn' once for each, or "
        "end the engine with an 'error'",
        choices=("warn", "error", "count"),
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        if list(self.token_buckets) != sorted(set(self.token_buckets)) or any(n < 1 for n in self.token_buckets):
            raise ConfigError(
                f"--token-buckets must be positive and rising, got {' '.join(map(str, self.token_buckets))}."
            )

    @property
    def cache_folder(self) -> Path | None:
        """Where compiled programs are kept, or None when that is switched off."""
        if self.compile_cache_dir == "off":
            return None
        if self.compile_cache_dir:
            return Path(self.compile_cache_dir).expanduser()
        return user_cache() / "compile"

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """What the environment tells the compiler of TPUs, but for `LAUNCH_BARRIER`."""
        words = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")).split()
        return tuple(sorted(word for word in words if word != LAUNCH_BARRIER and not word.startswith(_NOT_OF_PROGRAMS)))
