"""`tpu-serve bench stream`: what a streamed token costs the host's CPU, without a model."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.bench_engine import check_writable, write_json
from tpu_serve.cli.options import positive
from tpu_serve.config import EMBEDDED_MODEL, ConfigError, ServerConfig

if TYPE_CHECKING:
    from tpu_serve.bench.stream import Host
    from tpu_serve.engine.engine import Engine


def add(kinds: Any) -> None:
    stream = kinds.add_parser(
        "stream",
        help="what a streamed token costs the host's CPU, without a model",
        description="CPU time of the HTTP side per streamed token, from the sampled id to the bytes of a server-sent event, in microseconds. The engine is "
        "a script that says known tokens, one for every stream at a time; everything else is the server's own. chat_socket is "
        "served through a socket to a client in another process, the others through a client in memory.",
    )
    flag = stream.add_argument
    flag("model", nargs="?", metavar="MODEL", help="whose tokenizer is used (default: the embedded model)")
    flag("--num-streams", metavar="N", type=positive, default=64, help="streams at once (default: %(default)s)")
    flag("--num-tokens", metavar="N", type=positive, default=256, help="tokens of a stream (default: %(default)s)")
    flag("--num-warmups", metavar="N", type=positive, default=8, help="of them not measured (default: %(default)s)")
    flag("--repeat", metavar="N", type=positive, default=3, help="runs of every case (default: %(default)s)")
    flag("--case", metavar="NAME", nargs="+", help="which cases, by the names in the table (default: all)")
    flag("--output-json", type=Path, metavar="FILE", help="write the figures to FILE")
    stream.set_defaults(run=run, parser=stream)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and perhaps writes a file; returns the exit code."""
    check_writable(arguments.output_json)
    if arguments.num_tokens < arguments.num_warmups + 4:
        raise ConfigError(
            f"--num-tokens {arguments.num_tokens} leaves nothing to measure after --num-warmups {arguments.num_warmups}."
        )

    from tpu_serve.bench.stream import CASES, StreamPlan, bench_stream
    from tpu_serve.checkpoint.folder import resolve
    from tpu_serve.cli.progress import Progress
    from tpu_serve.text.tokenizer import Tokenizer

    cases = tuple(dict.fromkeys(arguments.case or CASES))
    for name in cases:
        if name not in CASES:
            raise ConfigError(f"--case {name} is not known; there are {', '.join(CASES)}.")
    model = arguments.model or EMBEDDED_MODEL.name
    plan = StreamPlan(arguments.num_streams, arguments.num_tokens, arguments.num_warmups, arguments.repeat)
    tokenizer = Tokenizer.load(resolve(arguments.model or str(EMBEDDED_MODEL), weights=False))
    with Progress(plan.num_runs * len(cases), "runs") as progress:
        report = bench_stream(_host, tokenizer, model, plan, cases, progress.advance)
    print(report.text())
    if arguments.output_json is not None:
        write_json(arguments.output_json, report.document())
    return 0


def _host(config: ServerConfig, engine: Engine) -> Host:
    """The server as `serve` makes it, but for its process."""
    import asyncio

    import uvicorn

    from tpu_serve.server.app import create_app
    from tpu_serve.server.listening import http_config
    from tpu_serve.server.state import ServerState

    state = ServerState(config, ("scripted",), "scripted")
    state.ready(engine)

    class Served:
        app: Callable[..., Any] = create_app(config, state)

        async def serve(self, listener: socket.socket) -> None:
            await uvicorn.Server(http_config(self.app, config, {})).serve(sockets=[listener])

        async def close(self) -> None:
            if state.service is not None:
                await asyncio.to_thread(state.service.close)

    return Served()
