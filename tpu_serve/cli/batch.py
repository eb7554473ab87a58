"""`tpu-serve batch`: answers a file of requests through the code that the server answers with."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tpu_serve.cli.options import (
    add_engine_options,
    add_others,
    add_server_options,
    engine_config,
    log_notes,
    positive,
    server_config,
)
from tpu_serve.cli.progress import Progress
from tpu_serve.cli.terminated import Terminated, terminable
from tpu_serve.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from tpu_serve.cli.batch_file import ResultWriter
    from tpu_serve.cli.batch_job import Batch
    from tpu_serve.engine.engine import Engine

SERVER_OPTIONS = (
    "served_model_name",
    "chat_template",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "enable_auto_tool_choice",
    "strict_fields",
    "enable_scripted_output",
)
"""Those that say how requests are read; the others are about HTTP."""
ALL_ANSWERED, SOME_FAILED = 0, 1


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch",
        aliases=["run-batch"],
        help="answer a file of requests",
        usage="%(prog)s -i FILE -o FILE [MODEL] [OPTIONS]",
        description="Answers a file of requests in the format of OpenAI's Batch API. A line that fails becomes an error line and the rest goes on. "
        "Exit code: 0 every line was answered, 1 some failed, 2 could not run. The last line on standard error is a JSON summary.",
    )
    add = parser.add_argument
    add(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests, one JSON object a line; - is standard input, and a file may be given by its http(s) URL",
    )
    add(
        "-o", "--output-file", required=True, metavar="FILE",
        help="results, each written as soon as it may go out; replaced unless --resume; - is standard output",
    )  # fmt: skip
    add("--concurrency", type=positive, metavar="N", help="most lines under way; twice --max-num-seqs when left out")
    add("--unordered", action="store_true", help="write results as they finish, not in the order of the input")
    add("--resume", action="store_true", help="continue an output file: lines with a result in it are skipped")
    add(
        "--progress", action=argparse.BooleanOptionalAction, default=None,
        help="progress on standard error; on a terminal when left out",
    )  # fmt: skip
    add_engine_options(parser)
    add_server_options(parser, only=SERVER_OPTIONS)
    add_others(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers the file; returns the exit code."""
    import asyncio

    from tpu_serve.cli.batch_job import Batch, stopped

    engine_options, server_options = engine_config(arguments), server_config(arguments)
    with ExitStack() as stack:
        source, writer = _open_files(arguments, stack)
        total = None if arguments.input_file == "-" else _count_lines(source)
        progress = stack.enter_context(Progress(total, "requests", arguments.progress))

        from tpu_serve.engine.build import build_engine
        from tpu_serve.server.logs import configure_logging

        configure_logging("warning")
        log_notes(arguments)
        engine = build_engine(engine_options, progress.phase)
        concurrency = arguments.concurrency or 2 * engine.core.scheduler.max_num_seqs
        writer.start()
        batch = Batch(writer, progress, concurrency=concurrency, ordered=not arguments.unordered)
        try:
            asyncio.run(_serve(batch, source, engine, server_options))
        except OSError as error:
            raise stopped(str(error)) from None
        except (KeyboardInterrupt, Terminated):
            print(f"tpu-serve: {batch.totals.num_requests} results are written; --resume continues", file=sys.stderr)
            raise
    print(json.dumps(batch.totals.as_json()), file=sys.stderr)
    return SOME_FAILED if batch.totals.num_failed else ALL_ANSWERED


async def _serve(batch: Batch, source: BinaryIO, engine: Engine, config: ServerConfig) -> None:
    from tpu_serve.server.chat import create_chat_completion
    from tpu_serve.server.completions import create_completion
    from tpu_serve.server.responses import create_response
    from tpu_serve.server.service import Service
    from tpu_serve.server.tokenization import tokenize

    async def create_tokens(body: dict[str, Any]) -> dict[str, Any]:
        reply, ignored = await tokenize(body, service)
        return {**reply, "ignored_fields": list(ignored)} if ignored else reply

    names = config.served_model_name or (engine.config.model.served_name,)
    service = Service.start(engine, config, names)
    handlers = {
        "/v1/chat/completions": lambda body: create_chat_completion(body, service),
        "/v1/completions": lambda body: create_completion(body, service),
        "/v1/responses": lambda body: create_response(body, service),
        "/tokenize": create_tokens,
    }
    try:
        with terminable():
            await batch.run(source, handlers, lambda: service.frontend.client.failure)
    finally:
        service.close()


def _open_files(arguments: argparse.Namespace, stack: ExitStack) -> tuple[BinaryIO, ResultWriter]:
    from tpu_serve.cli.batch_file import ResultWriter

    source = _open_input(arguments.input_file)
    if source.seekable():  # closing a pipe would wait for the thread that reads it
        stack.callback(source.close)
    if arguments.output_file == "-":
        if arguments.resume:
            raise ConfigError("--resume needs an output file: standard output cannot be read back.")
        return source, ResultWriter(sys.stdout.buffer)
    if is_url(arguments.output_file):
        raise ConfigError(
            f"--output-file {arguments.output_file} is a URL, and results are appended as they come: name a file, and upload it afterwards."
        )
    path = Path(arguments.output_file)
    if path.exists() and Path(arguments.input_file).exists() and os.path.samefile(path, arguments.input_file):
        raise ConfigError(f"{path} is both the input and the output.")
    writer = ResultWriter.open(path, resume=arguments.resume)
    stack.callback(writer.close)
    return source, writer


def _open_input(name: str) -> BinaryIO:
    if is_url(name):
        from tpu_serve.cli.batch_download import download

        return download(name)
    try:
        # Not sys.stdin: the interpreter closes that when it exits, and would wait for the thread that reads it.
        return os.fdopen(os.dup(0), "rb") if name == "-" else Path(name).open("rb")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}.") from None


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _count_lines(file: BinaryIO) -> int | None:
    if not file.seekable():
        return None
    count = sum(bool(line.strip()) for line in file)
    file.seek(0)
    return count
