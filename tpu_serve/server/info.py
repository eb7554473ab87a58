"""What /server_info says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import platform
import time
from typing import Any

from tpu_serve import __version__
from tpu_serve.config import ServerConfig
from tpu_serve.engine.client import EngineDead
from tpu_serve.engine.served import ServedEngine
from tpu_serve.server.replies import ServerInfoReply, whole
from tpu_serve.server.state import ServerState

PATIENCE = 2.0
_SECRET = frozenset({"api_key"})
_PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "numpy",
    "tokenizers",
    "llguidance",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "pydantic",
    "msgspec",
)


async def server_info(state: ServerState) -> dict[str, Any]:
    """Versions and options at any time; devices and sizes while a loaded engine tells them, within `PATIENCE` seconds."""
    engine = None if state.service is None else state.service.frontend.engine
    return whole(
        ServerInfoReply(
            version=__version__,
            versions={"python": platform.python_version(), **package_versions()},
            status=state.status,
            models=list(state.names),
            uptime_seconds=round(time.monotonic() - state.started, 3),
            server_options=server_options(state.config),
            engine_options={} if engine is None else engine.config.non_default(),
            **await _described(engine),
        )
    )


async def _described(engine: ServedEngine | None) -> dict[str, Any]:
    described: dict[str, Any] = {"devices": [], "engine": None}
    if engine is not None:
        with contextlib.suppress(EngineDead, TimeoutError):
            described = await asyncio.wait_for(asyncio.wrap_future(engine.operate("describe")), PATIENCE)
    return described


def server_options(config: ServerConfig) -> dict[str, Any]:
    """Options that differ from their defaults. Of secrets there is only their number."""
    shown: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        if value != default:
            shown[item.name] = f"[{len(value)} hidden]" if item.name in _SECRET else value
    return shown


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter, those that are installed."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
