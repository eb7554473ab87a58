"""`serve`: the process of the HTTP endpoint, from binding its port to its exit code."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from tpu_serve import __version__
from tpu_serve.config import ConfigError, EngineConfig, ServerConfig
from tpu_serve.engine.process import EngineProcess, LoadingFailed
from tpu_serve.engine.served import ServedEngine
from tpu_serve.runner import background
from tpu_serve.server.app import create_app
from tpu_serve.server.info import server_options
from tpu_serve.server.listening import http_config, listening, tls_options, url_of
from tpu_serve.server.logs import configure_logging
from tpu_serve.server.state import ServerState
from tpu_serve.server.stats_line import StatsLine

logger = logging.getLogger(__name__)

Build = Callable[[EngineConfig, Callable[[str, float], None]], ServedEngine]
EXIT_FAILED = 1
EXIT_CONFIG = 2
LAST_WORDS = 1.5
"""Seconds that answers get to tell their clients that they end early."""
WORTH_MENTION = 0.1
"""Seconds that a phase of loading must take to be mentioned at the end."""
CLOSING = 2.0
"""Seconds that the engine gets to finish its step."""


def serve(server: ServerConfig, engine: EngineConfig, build: Build | EngineProcess | None = None) -> int:
    """Serves until a signal or a failure ends it. Call it in the main thread.

    Args:
      build: makes the engine, in a thread; a process of its own with `build_engine` in it when left out.

    Returns:
      The exit code: 0 after a signal (128 + its number when a second one cut the first one's wait short), 1 after a failure, 2 when the
      port or the configuration cannot be used. When a thread cannot be stopped, the process exits here instead.
    """
    configure_logging(server)
    try:
        _check_files(server)
        tls = tls_options(server)
        with listening(server) as listener:
            run = _Run(
                server,
                engine,
                EngineProcess(partial(configure_logging, server)) if build is None else build,
                listener,
                tls,
            )
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                code = runner.run(run.main())
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    if run.is_stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """That of uvloop where it is installed, else asyncio's own."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _check_files(server: ServerConfig) -> None:
    _ = server.api_keys  # reads their file
    if server.chat_template is not None and not Path(server.chat_template).is_file():
        raise ConfigError(f"--chat-template {server.chat_template} is not a file.")


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: what a signal means is decided here."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Run:
    """One life of the server.

    Attributes:
      is_stuck: at the end, a thread still runs that nothing can stop.
    """

    def __init__(
        self,
        server: ServerConfig,
        engine: EngineConfig,
        build: Build | EngineProcess,
        listener: socket.socket,
        tls: dict[str, Any],
    ):
        self._server, self._engine, self._listener = server, engine, listener
        self._process = build if isinstance(build, EngineProcess) else None
        self._build: Build = build.build if isinstance(build, EngineProcess) else build
        self._url = url_of(listener, server)
        self._model = engine.model.served_name
        self._state = ServerState(
            server, server.served_model_name or (self._model,), engine.model.source, self._on_death
        )
        self._http = _HttpServer(http_config(create_app(server, self._state), server, tls))
        self._loader = threading.Thread(target=self._load, name="loader", daemon=True)
        self._started = time.monotonic()
        self._phase: tuple[str, float] | None = None
        self._phases: list[str] = []
        self._code = 0
        self._last_line = ""
        self._num_signals = 0
        self._ending: asyncio.Task[None] | None = None
        self._stats: asyncio.Task[None] | None = None
        self._is_over = False
        self.is_stuck = False

    async def main(self) -> int:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        logger.info("tpu-serve %s listens on %s and loads %s", __version__, self._url, self._model)
        if options := server_options(self._server) | self._engine.non_default():
            logger.info("non-default args: %s", options)
        self._loader.start()
        await self._http.serve(sockets=[self._listener])
        if self._stats is not None:
            self._stats.cancel()
        closer = self._close_engine()
        if closer is not None:
            closer.join(CLOSING)
        self._is_over = True
        if self._process is not None:
            self._process.kill()  # only one that loads or hangs is there still
            self._loader.join(CLOSING)
        await asyncio.sleep(0)  # the engine's client has a last thing to do in the loop
        if self._state.tracing is not None:
            self._state.tracing.close()
        self.is_stuck = self._loader.is_alive() or (closer is not None and closer.is_alive()) or background.is_running()
        if self._code != EXIT_CONFIG:  # which has said everything
            logger.log(logging.ERROR if self._code == EXIT_FAILED else logging.INFO, "Exiting: %s", self._last_line)
        return self._code

    # ---- loading, in the loader's thread ----------------------------------------------------------------------------

    def _load(self) -> None:
        self._on_phase("import", 0.0)
        try:
            engine = self._build(self._engine, self._on_phase)
            self._log_phase()
        except Exception as error:
            self._post(self._on_load_failure, error)
        else:
            self._post(self._on_loaded, engine)

    def _on_phase(self, name: str, share: float) -> None:
        self._state.set_phase(name, share)
        if name == "compile" and self._phase is not None and self._phase[0] != name:
            logger.info("Loading: compiling programs; takes longest at the first start with these options")
        if self._phase is None or self._phase[0] != name:
            self._log_phase()
            self._phase = (name, time.monotonic())

    def _log_phase(self) -> None:
        if self._phase is not None:
            seconds = time.monotonic() - self._phase[1]
            logger.debug("Loading: %s took %.1f s", self._phase[0], seconds)
            if seconds >= WORTH_MENTION:
                self._phases.append(f"{self._phase[0]} {seconds:.1f} s")

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---- events, in the loop ----------------------------------------------------------------------------------------

    def _on_loaded(self, engine: ServedEngine) -> None:
        if self._is_over:
            return
        try:
            self._state.ready(engine)
            if self._state.service is not None:
                self._state.service.grammars.warm_up()
        except ConfigError as error:
            self._on_load_failure(error)
            return
        seconds = time.monotonic() - self._started
        phases = f" ({', '.join(self._phases)})" if self._phases else ""
        names = ", ".join(self._state.names)
        logger.info("Serving %s at %s after %.1f s%s. Application startup complete.", names, self._url, seconds, phases)
        if self._server.log_stats_interval and not self._server.disable_log_stats:
            self._stats = self._loop.create_task(self._log_stats(StatsLine(engine.reading)))

    async def _log_stats(self, line: StatsLine) -> None:
        then = time.monotonic()
        while True:
            await asyncio.sleep(self._server.log_stats_interval)
            now = time.monotonic()  # a busy loop wakes late
            if (text := line.take(now - then)) is not None:
                logger.info("%s", text)
            then = now

    def _on_load_failure(self, error: Exception) -> None:
        if self._is_over:
            return
        if isinstance(error, ConfigError):
            logger.error("%s", error)
            self._end(EXIT_CONFIG, "the configuration cannot be used")
            return
        if isinstance(error, LoadingFailed):  # its process has logged the rest
            self._end(EXIT_FAILED, f"loading failed: {error}")
            return
        logger.error("Loading failed", exc_info=error)
        self._end(EXIT_FAILED, f"loading failed: {type(error).__name__}: {error}")

    def _on_death(self, why: str) -> None:
        self._end(EXIT_FAILED, why, wait=LAST_WORDS)

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        name = signal.Signals(number).name
        if self._num_signals > 1:
            self._code = 128 + number
            self._last_line = f"a second signal ({name}) came"
            if self._ending is not None:
                self._ending.cancel()
            self._ending = self._loop.create_task(self._abort_and_exit())
            return
        self._state.drain()
        num = self._state.num_inference
        if num:
            logger.info("%s: waiting up to %g s for %d requests", name, self._server.shutdown_timeout, num)
        self._end(0, f"{name} was received", wait=self._server.shutdown_timeout)

    def _end(self, code: int, last_line: str, wait: float = 0.0) -> None:
        if self._ending is not None:
            if code == 0:
                return  # a failure that is under way stays one
            self._ending.cancel()
        self._code, self._last_line = code, last_line
        self._ending = self._loop.create_task(self._wait_and_exit(wait))

    async def _wait_and_exit(self, seconds: float) -> None:
        if not await self._until_idle(seconds):
            await self._abort_and_exit()
        self._http.should_exit = True

    async def _abort_and_exit(self) -> None:
        if self._state.service is not None:
            self._state.service.frontend.abort_all()
        await self._until_idle(LAST_WORDS)
        self._http.should_exit = self._http.force_exit = True

    async def _until_idle(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._state.num_inference and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._state.num_inference

    def _close_engine(self) -> threading.Thread | None:
        """Ends the engine; in a thread, because that waits for the step under way."""
        if self._state.service is None:
            return None
        closer = threading.Thread(target=self._state.service.close, name="closer", daemon=True)
        closer.start()
        return closer
