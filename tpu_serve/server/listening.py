"""Where the server listens: a port or a Unix socket, with TLS or without, taken before anything is loaded."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tpu_serve.config import ConfigError, ServerConfig
from tpu_serve.server.connection import Connection

BACKLOG = 2048
KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than load balancers do, so that none sends a request into a closing one."""


@contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """A listening socket, closed at the end; a Unix socket's file goes with it.

    Raises:
      ConfigError: the address cannot be used.
    """
    if config.uds is None:
        with _listen(config.host, config.port) as listener:
            yield listener
        return
    with _listen_unix(config.uds) as listener:
        try:
            yield listener
        finally:
            with suppress(OSError):
                os.unlink(config.uds)


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Where clients find it."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_options(config: ServerConfig) -> dict[str, Any]:
    """What uvicorn is told of TLS; nothing when it is off.

    Raises:
      ConfigError: the files do not fit together.
    """
    if config.ssl_certfile is None:
        return {}
    demand = config.ssl_cert_reqs
    if demand is None:
        demand = ssl.CERT_REQUIRED if config.ssl_ca_certs is not None else ssl.CERT_NONE
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: b"")
    except (OSError, ValueError) as error:
        key = config.ssl_keyfile or config.ssl_certfile
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with the key in {key} cannot be used: {_why(error)}."
        ) from None
    if config.ssl_ca_certs is not None:
        try:
            ssl.create_default_context(cafile=config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used: {_why(error)}.") from None
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": int(demand),
    }


def _why(error: Exception) -> str:
    """Of an error of OpenSSL its reason, in words; its text is a number and a place in C code."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificate in PEM form").lower().replace("_", " ")
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def http_config(app: ASGIApp, config: ServerConfig, tls: dict[str, Any]) -> uvicorn.Config:
    """How uvicorn serves the application; `tls` is of `tls_options`."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        h11_max_incomplete_event_size=config.h11_max_incomplete_event_size,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=1,
        **tls,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port} is in use on {host}; choose another one, or 0 for any free one."
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"--host {host} is not an address of this machine.") from None
        raise ConfigError(f"--port {port} on {host} cannot be used: {error.strerror}.") from None
    return listener


def _listen_unix(path: str) -> socket.socket:
    _remove_left_over(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds {path} cannot be used: {error.strerror or error}.") from None
    return listener


def _remove_left_over(path: str) -> None:
    """Removes the file of a server that is gone; one that still answers keeps it."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"--uds {path} exists and is no socket.")
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        try:
            knock.connect(path)
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            return
    raise ConfigError(f"--uds {path} is in use by another server.")
