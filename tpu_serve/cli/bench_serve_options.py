"""The options of `tpu-serve bench serve`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from tpu_serve.cli.bench_dataset import add_dataset_options
from tpu_serve.cli.options import json_object, not_negative, positive
from tpu_serve.config.client import KEY_VARIABLES

METRICS = ("ttft", "tpot", "itl", "e2el")
SAMPLING = {
    "top_p": float, "top_k": int, "min_p": float, "temperature": float, "frequency_penalty": float, "presence_penalty": float,
    "repetition_penalty": float,
}  # fmt: skip
"""Fields of requests that have a flag of their own."""


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Adds all of them, in groups."""
    _add_server(parser.add_argument_group("server"))
    add_dataset_options(parser, count=1000, name="random")
    _add_load(parser.add_argument_group("load"))
    _add_request(parser.add_argument_group("requests"))
    _add_result(parser.add_argument_group("results"))


def _add_server(group: Any) -> None:
    add = group.add_argument
    add("--backend", choices=("openai", "openai-chat", "vllm"), default="openai",
        help="openai asks for completions, openai-chat for chat completions; vllm is openai (default: %(default)s)")  # fmt: skip
    add("--base-url", metavar="URL", help="of the server, without /v1; instead of --host and --port")
    add("--host", default="127.0.0.1", help="(default: %(default)s)")
    add("--port", type=positive, default=8000, help="(default: %(default)s)")
    add("--endpoint", metavar="PATH", help="path of the API (default: that of the backend)")
    add("--model", metavar="NAME", help="name of the model in requests; the server's first one when left out")
    add("--served-model-name", metavar="NAME", help="name of the model in requests when --model is a folder")
    add("--tokenizer", metavar="FOLDER", help="folder or hub id that prompts are made with (default: the model's own)")
    add("--api-key", metavar="KEY", help=f"also read from {' and '.join(KEY_VARIABLES)}")
    add("--header", metavar="NAME=VALUE", nargs="+", action="extend", default=[], help="further headers of requests")
    add("--insecure", action="store_true", help="do not check the server's certificate")
    add("--ready-check-timeout-sec", metavar="S", type=not_negative("seconds"), default=600.0,
        help="seconds to wait for the answer to a first request; 0 does without (default: %(default)g)")  # fmt: skip


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--request-rate", metavar="R", type=float, default=math.inf,
        help="requests per second; inf sends all at once (default: inf)")  # fmt: skip
    add("--burstiness", metavar="B", type=float, default=1.0,
        help="1: gaps of a Poisson process; below, bursts; above, more even (default: %(default)g)")  # fmt: skip
    add("--max-concurrency", metavar="N", type=positive, help="most requests under way at once")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="raise the rate during the run")
    add("--ramp-up-start-rps", metavar="R", type=float, help="requests per second at the first request")
    add("--ramp-up-end-rps", metavar="R", type=float, help="requests per second at the last request")
    add("--num-warmups", metavar="N", type=_count, default=0, help="requests before it, not measured (default: 0)")
    add("--repeat", metavar="K", type=positive, default=1,
        help="runs, with other random prompts each; figures are medians and their spread is shown (default: 1)")  # fmt: skip


def _add_request(group: Any) -> None:
    add = group.add_argument
    add("--ignore-eos", action="store_true", help="answers go on to their full length")
    for name, kind in SAMPLING.items():
        note = "0 when left out" if name == "temperature" else "the server's default when left out"
        add(f"--{name.replace('_', '-')}", metavar="X", type=kind, help=f"{name} of requests; {note}")
    add("--logprobs", metavar="N", type=_count, help="log-probabilities asked for per token")
    add("--no-stream", action="store_true", help="answers in one piece: only E2EL is measured then")
    add("--request-id-prefix", metavar="TEXT", default="", help="ask with the header x-request-id, numbered after TEXT")
    add("--extra-body", metavar="JSON", type=json_object, default={}, help="further fields of requests; they win")
    add("--profile", action="store_true", help="have the server take a trace of the runs (it needs --profile-dir)")


def _add_result(group: Any) -> None:
    add = group.add_argument
    add("--goodput", metavar="METRIC:MS", nargs="+", default=[],
        help="objectives, as in ttft:200 tpot:50 e2el:3000, in milliseconds; requests per second that meet all are shown")  # fmt: skip
    add("--percentile-metrics", metavar="LIST",
        help="metrics that are shown, of ttft, tpot, itl, e2el, with commas between (default: all; e2el with --no-stream)")  # fmt: skip
    add("--metric-percentiles", metavar="LIST", default="99",
        help="percentiles that are shown, 0 to 100, with commas between (default: 99)")  # fmt: skip
    add("--label", help="name of this configuration, for the file")
    add("--save-result", action="store_true", help="write a JSON file")
    add(
        "--save-detailed",
        action="store_true",
        help="with every request's times, text and error in it (of the first run); implies --save-result",
    )
    add(
        "--append-result",
        action="store_true",
        help="add a line to the file instead of replacing it; implies --save-result",
    )
    add("--metadata", metavar="NAME=VALUE", nargs="+", action="extend", default=[], help="further keys of the file")
    add("--result-dir", metavar="FOLDER", type=Path, help="of the file; implies --save-result")
    add("--result-filename", metavar="FILE", help="its name; implies --save-result (default: says what was run)")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)
