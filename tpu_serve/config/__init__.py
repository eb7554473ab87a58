"""Every option of the engine and the server: one frozen dataclass a topic, each field carrying its own help text.

The command line, `LLM(...)` and `/metrics` all read this one declaration. Checks that need no model happen here; the only reads of
environment variables in the package happen here too.
"""

from tpu_serve.config.compile import CompileOptions
from tpu_serve.config.engine import (
    EMBEDDED_MODEL,
    AttentionOptions,
    CacheOptions,
    EngineConfig,
    ModelOptions,
    SchedulerOptions,
    engine_options,
)
from tpu_serve.config.moe import MoEOptions
from tpu_serve.config.parallel import ParallelOptions
from tpu_serve.config.sampling import SamplingOptions
from tpu_serve.config.server import ServerConfig
from tpu_serve.option import ConfigError

__all__ = [
    "EMBEDDED_MODEL",
    "AttentionOptions",
    "CacheOptions",
    "CompileOptions",
    "ConfigError",
    "EngineConfig",
    "MoEOptions",
    "ModelOptions",
    "ParallelOptions",
    "SamplingOptions",
    "SchedulerOptions",
    "ServerConfig",
    "engine_options",
]
