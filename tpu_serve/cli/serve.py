"""`tpu-serve serve`: the HTTP endpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tpu_serve.cli.options import (
    add_engine_options,
    add_others,
    add_server_options,
    engine_config,
    log_notes,
    server_config,
)
from tpu_serve.config import ConfigError


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="%(prog)s [MODEL] [OPTIONS]",
        description="Serves a model over HTTP with the OpenAI API. Flags may be spelled with - or _.",
    )
    add_engine_options(parser)
    add_server_options(parser)
    add_others(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is told to stop; returns the exit code."""
    engine, server = engine_config(arguments), server_config(arguments)
    if not engine.model.model:
        # --served-model-name takes every word that follows, a MODEL after it too.
        for name in server.served_model_name[1:]:
            if Path(name).expanduser().is_dir():
                raise ConfigError(
                    f"--served-model-name took the folder {name} as a name, and no MODEL is left: write MODEL first, or --model {name}."
                )

    from tpu_serve.server.logs import configure_logging
    from tpu_serve.server.run import serve

    configure_logging(server)
    log_notes(arguments)
    return serve(server, engine)
