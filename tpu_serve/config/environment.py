"""Environment variables that matter to the server or look as if they did, as a report may show them."""

from __future__ import annotations

import os

_OURS = ("TPU_SERVE_", "JAX_", "XLA_", "LIBTPU_", "TPU_", "HF_", "NPROC", "XDG_CACHE_HOME", "OTEL_", "SSL_CERT_")
_FOREIGN = ("VLLM_", "SGLANG_", "SGL_", "SKIP_JAX_PRECOMPILE", "MIN_TOKEN_BUCKET")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "HEADERS")


def relevant_variables() -> dict[str, str]:
    """Variables that this program or its libraries read, secrets hidden."""
    names = sorted(name for name in os.environ if name.startswith(_OURS))
    return {name: "(set)" if any(word in name for word in _SECRET) else os.environ[name] for name in names}


def foreign_variables() -> list[str]:
    """Names of variables of other servers, which have no effect here."""
    return sorted(name for name in os.environ if name.startswith(_FOREIGN))
