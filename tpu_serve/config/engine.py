"""What the engine is built from."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu_serve.config.compile import CompileOptions
from tpu_serve.config.moe import MoEOptions
from tpu_serve.config.parallel import ParallelOptions
from tpu_serve.config.sampling import SamplingOptions
from tpu_serve.option import ConfigError, check_at_least, check_choices, check_types, option

EMBEDDED_MODEL = Path(__file__).parents[1] / "embedded" / "tiny-chat"
"""The model that is used when none is named."""
LONGEST_THAT_FITS = -1
"""The `max_model_len` that --max-model-len auto stands for."""


@dataclass(frozen=True)
class ModelOptions:
    """Which weights, in which type."""

    model: str = option(
        "", "a Hugging Face folder or hub id; the embedded model when left out", aliases=("--model-path",)
    )
    tokenizer: str | None = option(
        None, "folder or hub id of the tokenizer, when it is not the model's", aliases=("--tokenizer-path",)
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    load_format: str = option(
        "auto",
        "'dummy' makes random weights: the folder needs config.json and the tokenizer only",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = option(
        "auto",
        "type of weights and activations; 'auto' is the checkpoint's own",
        choices=("auto", "bfloat16", "float32"),
    )
    quantization: str = option(
        "none",
        "quantise the experts of an unquantised checkpoint while it is loaded: 'int8', or 'fp8' (e4m3); quantised checkpoints need no option",
        aliases=("-q",),
        choices=("none", "int8", "fp8"),
    )
    requantize: str = option(
        "auto",
        "what becomes of a quantised checkpoint's experts: 'auto' takes the format that the chip multiplies fastest and logs the error that this "
        "costs, 'off' keeps their values, widened where the chip has no arithmetic for them",
        choices=("auto", "off"),
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus answer in tokens (k and m suffixes allowed), or 'auto' for as many as fit; the model's own limit when left out",
        aliases=("--context-length",),
    )
    hf_overrides: dict[str, Any] = option(
        {},
        "JSON object laid over config.json, for example to cut layers",
        aliases=("--json-model-override-args",),
        metavar="JSON",
    )
    seed: int = option(0, "seed of dummy weights and of requests that bring none", aliases=("--random-seed",))

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        if self.max_model_len != LONGEST_THAT_FITS:
            check_at_least(self, 2, "max_model_len")

    @property
    def given_max_model_len(self) -> int | None:
        """The number that --max-model-len gives, None when it gives none."""
        return None if self.max_model_len == LONGEST_THAT_FITS else self.max_model_len

    @property
    def source(self) -> str:
        """Folder or hub id that is read."""
        return self.model or str(EMBEDDED_MODEL)

    @property
    def served_name(self) -> str:
        """What requests call the model unless --served-model-name says otherwise."""
        return self.model or EMBEDDED_MODEL.name


@dataclass(frozen=True)
class CacheOptions:
    """The paged KV cache."""

    page_size: int | None = option(
        None, "tokens per page of the KV cache; 16 on CPU and 128 on TPU when left out", aliases=("--block-size",)
    )
    num_pages: int | None = option(
        None,
        "pages of the KV cache; computed from the memory limits when left out",
        aliases=("--num-gpu-blocks-override",),
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of keys and values in the cache: 'auto' is the model's; 'fp8' (e4m3) and 'int8' keep a float32 scale for each token and head",
        choices=("auto", "fp8", "fp8_e4m3", "int8"),
    )
    kv_cache_memory_bytes: int | None = option(
        None, "memory for the KV cache on each device (k, m, g suffixes allowed)"
    )
    device_memory_utilization: float = option(
        0.9,
        "share of each device's memory that weights, caches, steps and their programs may take",
        aliases=("--gpu-memory-utilization", "--hbm-utilization", "--mem-fraction-static"),
    )
    enable_prefix_caching: bool = option(True, "reuse cached pages of equal prompt beginnings")
    num_state_snapshots: int | None = option(
        None,
        "for models with recurrent layers: states kept for the prefix cache to go on from; computed from the memory limits when left out",
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        check_at_least(self, 1, "page_size", "kv_cache_memory_bytes")
        check_at_least(self, 2, "num_pages")
        check_at_least(self, 0, "num_state_snapshots")
        if self.page_size is not None and self.page_size & (self.page_size - 1):
            raise ConfigError(f"--page-size must be a power of two, got {self.page_size}.")
        if not 0 < self.device_memory_utilization <= 1:
            raise ConfigError(f"--device-memory-utilization must be in (0, 1], got {self.device_memory_utilization}.")

    @property
    def stored_type(self) -> str | None:
        """NumPy's name of the type that keys and values are quantised to, None for the model's own."""
        return {"auto": None, "int8": "int8"}.get(self.kv_cache_dtype, "float8_e4m3fn")


MOST_DECODE_STEPS = 128
"""In one launch. Log-probabilities of all of them lie on the device until it ends."""


@dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed."""

    attention_backend: str = option(
        "auto",
        "what computes attention: 'kernel' is the TPU kernel, simulated (slowly) on a CPU and refused where it cannot run; 'xla' is XLA; 'auto' "
        "takes the kernel wherever it runs on a TPU and logs why where it does not",
        choices=("auto", "kernel", "xla"),
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)


@dataclass(frozen=True)
class SchedulerOptions:
    """How requests share a step."""

    max_num_seqs: int | None = option(
        None,
        "most sequences in one step, of each data-parallel rank; 64 on CPU and 128 on TPU when left out",
        aliases=("--max-running-requests",),
    )
    max_num_batched_tokens: int | None = option(
        None,
        "token budget of one step, the size of a prefill chunk, of each data-parallel rank (k and m suffixes allowed); 256 on CPU and 2048 on "
        "TPU when left out",
        aliases=("--chunked-prefill-size",),
    )
    max_num_queued_reqs: int | None = option(
        None, "most requests that may wait in the server; 16 times --max-num-seqs of all ranks together when left out"
    )
    max_num_queued_tokens: int | None = option(
        None,
        "most prompt tokens of requests that may wait in the server (k and m suffixes allowed); any number when left out",
    )
    scheduling_policy: str = option(
        "fcfs",
        "order of waiting requests, and of those that lose their pages last: 'fcfs' is that of arrival, 'priority' that of the requests' "
        "priority (lower ones first) and then of arrival",
        choices=("fcfs", "priority"),
    )
    num_decode_steps: int = option(
        1,
        "most decode steps in one launch, while all that runs decodes and has no grammar, bad words or other constraint: less work for the host, "
        "but tokens come in groups, a request that arrives waits for up to twice as many steps instead of two, and steps behind a stop string "
        "or a client that goes away are computed for nothing",
        aliases=("--num-scheduler-steps",),
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        check_at_least(self, 1, "num_decode_steps")
        if self.num_decode_steps > MOST_DECODE_STEPS:
            raise ConfigError(
                f"--num-decode-steps must be at most {MOST_DECODE_STEPS}, got {self.num_decode_steps}: more steps save nothing more, and whoever "
                f"arrives waits for them."
            )
        check_at_least(
            self, 1, "max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "max_num_queued_tokens"
        )


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine is built from."""

    model: ModelOptions = field(default_factory=ModelOptions)
    moe: MoEOptions = field(default_factory=MoEOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    compile: CompileOptions = field(default_factory=CompileOptions)

    def __post_init__(self) -> None:
        if self.scheduler.num_decode_steps > 1 and self.parallel.data_parallel_size > 1:
            raise ConfigError(
                f"--num-decode-steps {self.scheduler.num_decode_steps} cannot be used with --data-parallel-size "
                f"{self.parallel.data_parallel_size}: ranks launch together, and those that decode would wait for one that has a prompt; "
                f"leave one of the two out."
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Builds the configuration from flat option names, as in `LLM(model=…, max_model_len=…)`.

        Raises:
          ConfigError: an option does not exist (with the nearest name) or its value is impossible.
        """
        homes = {name: part for part, name, _ in engine_options()}
        for name in options:
            if name not in homes:
                near = difflib.get_close_matches(name, homes, n=1)
                raise ConfigError(f"Unknown option {name!r}.{f' Did you mean {near[0]!r}?' if near else ''}")
        parts: dict[str, dict[str, Any]] = {part.name: {} for part in dataclasses.fields(cls)}
        for name, value in options.items():
            parts[homes[name]][name] = tuple(value) if isinstance(value, list) else value
        return cls(**{part: _PARTS[part](**values) for part, values in parts.items()})

    def non_default(self) -> dict[str, Any]:
        """Options that differ from their defaults, for the log."""
        base = EngineConfig()
        return {
            name: getattr(getattr(self, part), name)
            for part, name, _ in engine_options()
            if getattr(getattr(self, part), name) != getattr(getattr(base, part), name)
        }


_PARTS: Mapping[str, Any] = {
    "model": ModelOptions,
    "moe": MoEOptions,
    "cache": CacheOptions,
    "attention": AttentionOptions,
    "scheduler": SchedulerOptions,
    "sampling": SamplingOptions,
    "parallel": ParallelOptions,
    "compile": CompileOptions,
}


def engine_options() -> Iterator[tuple[str, str, dataclasses.Field[Any]]]:
    """(part, option name, field) of every engine option, in the order of the help text."""
    for part, cls in _PARTS.items():
        for item in dataclasses.fields(cls):
            yield part, item.name, item
