"""tpu-serve: an inference server for mixture-of-experts language models on TPUs.

The names below are imported when they are first used, so that `import tpu_serve` and `tpu-serve --help` stay fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_serve.config import ConfigError
    from tpu_serve.llm import LLM
    from tpu_serve.request import InvalidRequest, Request, SamplingParams, TokenOutput

__version__ = "0.1.0"
__all__ = ["LLM", "ConfigError", "InvalidRequest", "Request", "SamplingParams", "TokenOutput", "__version__"]

_HOMES = {
    "LLM": "tpu_serve.llm",
    "ConfigError": "tpu_serve.config",
    **dict.fromkeys(("InvalidRequest", "Request", "SamplingParams", "TokenOutput"), "tpu_serve.request"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
