"""`tpu-serve bench serve`: load for a running server, and how long its answers took."""

from __future__ import annotations

import argparse
import contextlib
import math
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.bench_dataset import dataset_options, load_tokenizer
from tpu_serve.cli.bench_serve_options import METRICS, SAMPLING, add_serve_options
from tpu_serve.config import ConfigError
from tpu_serve.config.client import client_api_key

if TYPE_CHECKING:
    from tpu_serve.bench.serving.http_client import HttpClient
    from tpu_serve.bench.serving.run import Plan, Result
    from tpu_serve.bench.serving.target import Target

RESERVED = frozenset({
    "date", "endpoint_type", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration",
    "completed", "failed", "failures", "server", "settings", "repeats", "spread", "client_versions", "versions", "device",
})  # fmt: skip
"""Keys of the file that --metadata may not take."""


def add(kinds: Any) -> None:
    """Adds `serve` to the benchmarks."""
    parser = kinds.add_parser(
        "serve",
        help="send load to a running server and measure its answers",
        description="Sends requests to a running server with OpenAI's API and measures how long answers take, seen from here and, where it has "
        "/metrics, from there. Times are in milliseconds unless said otherwise, lengths in tokens, rates in requests per second. Exit code: "
        "0 all requests succeeded, 1 some failed, 2 it could not run.",
    )
    add_serve_options(parser)
    parser.add_config_option()
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    import asyncio

    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    from tpu_serve.bench.serving.run import Watcher, bench
    from tpu_serve.cli.progress import Progress

    plan, metrics, saves = _plan(arguments), _metrics(arguments), _saves(arguments)
    metadata = _pairs("--metadata", arguments.metadata)
    if taken := RESERVED & metadata.keys():
        raise ConfigError(f"--metadata {min(taken)} is a key that the file has already.")
    file_folder = arguments.result_dir
    if file_folder is not None and not file_folder.is_dir():
        raise ConfigError(f"--result-dir {file_folder} is not a folder.")
    _allow_connections(min(plan.num_prompts, plan.max_concurrency or plan.num_prompts))
    client = _client(arguments)
    try:
        target, card_root = await _target(arguments, client)
        tokenizer_id = arguments.tokenizer or card_root or arguments.model or target.model
        tokenizer = load_tokenizer(tokenizer_id)
        total = plan.num_prompts * plan.num_runs
        with Progress(total, "requests", False if arguments.disable_tqdm else None) as progress:
            results = await bench(target, tokenizer, plan, Watcher(_say, progress.advance))
        about = await target.about() if saves else {}
    finally:
        await client.close()
    _print(arguments, plan, metrics, results)
    if saves:
        from tpu_serve.bench.serving import document

        found = document.document(
            target, plan, results, tokenizer_id=tokenizer_id, label=arguments.label, metadata=metadata, metrics=metrics,
            is_detailed=arguments.save_detailed, about=about,
        )  # fmt: skip
        path = (file_folder or Path()) / (
            arguments.result_filename or document.file_name(target, plan, arguments.label)
        )
        try:
            document.write(path, found, appends=arguments.append_result)
        except OSError as error:
            raise ConfigError(f"The result {path} cannot be written: {error.strerror}.") from None
        _say(f"wrote {path}")
    num_failed = sum(result.figures.failed for result in results)
    if num_failed:
        _say(f"{num_failed} of {plan.num_prompts * plan.num_runs} requests failed")
    return int(num_failed > 0)


def _plan(arguments: argparse.Namespace) -> Plan:
    from tpu_serve.bench.serving.arrivals import Arrivals
    from tpu_serve.bench.serving.figures import read_objectives
    from tpu_serve.bench.serving.run import Plan

    dataset = dataset_options(arguments)
    arrivals = Arrivals(
        rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        ramp_up=arguments.ramp_up_strategy,
        start_rate=arguments.ramp_up_start_rps,
        end_rate=arguments.ramp_up_end_rps,
    )
    if dataset.is_self_timed and (math.isfinite(arrivals.rate) or arrivals.ramp_up):
        raise ConfigError(
            "--self-timed takes the times from the trace: leave --request-rate and --ramp-up-strategy out."
        )
    if math.isinf(arrivals.rate) and arrivals.ramp_up is None and arrivals.burstiness != 1:
        raise ConfigError("--burstiness has no meaning without a finite --request-rate.")
    return Plan(
        dataset=dataset,
        arrivals=arrivals,
        num_prompts=arguments.num_prompts,
        seed=arguments.seed,
        max_concurrency=arguments.max_concurrency,
        num_warmups=arguments.num_warmups,
        num_runs=arguments.repeat,
        ready_seconds=arguments.ready_check_timeout_sec,
        percents=_percents(arguments.metric_percentiles),
        objectives=read_objectives(arguments.goodput),
        profiles=arguments.profile,
    )


def _client(arguments: argparse.Namespace) -> HttpClient:
    from tpu_serve.bench.serving.http_client import HttpClient

    url = arguments.base_url or f"http://{_bracketed(arguments.host)}:{arguments.port}"
    key = client_api_key(arguments.api_key)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    headers |= {name.lower(): value for name, value in _pairs("--header", arguments.header).items()}
    return HttpClient(url, headers, is_insecure=arguments.insecure)


async def _target(arguments: argparse.Namespace, client: HttpClient) -> tuple[Target, str | None]:
    """The server, and the folder or hub id that it says its model is, when it was asked."""
    from tpu_serve.bench.serving.target import ENDPOINTS, Backend, Target, model_card, wait_listening

    backend: Backend = "openai-chat" if arguments.backend == "openai-chat" else "openai"
    model, root = arguments.served_model_name or arguments.model, None
    if model is None or (arguments.tokenizer is None and not Path(arguments.model or model).is_dir()):
        await wait_listening(client, arguments.ready_check_timeout_sec)
        # For a name that was given, the card is only asked where the tokenizer lies; not every server has one.
        with contextlib.suppress(*([] if model is None else [ConfigError])):
            card = await model_card(client, model)
            model, root = card["id"], card.get("root")
    fields = {name: getattr(arguments, name) for name in SAMPLING if getattr(arguments, name) is not None}
    if arguments.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": arguments.logprobs} if backend == "openai-chat" else {"logprobs": arguments.logprobs}  # fmt: skip
    endpoint = arguments.endpoint or ENDPOINTS[backend]
    if not endpoint.startswith("/"):
        raise ConfigError(f"--endpoint {endpoint} must begin with a slash.")
    if endpoint.endswith("chat/completions") != (backend == "openai-chat"):
        raise ConfigError(f"--endpoint {endpoint} is not one that --backend {arguments.backend} can ask.")
    assert model is not None
    target = Target(
        client=client,
        backend=backend,
        endpoint=endpoint,
        model=model,
        fields={**fields, **arguments.extra_body},
        ignore_eos=arguments.ignore_eos,
        streams=not arguments.no_stream,
        id_prefix=arguments.request_id_prefix,
    )
    return target, root


def _print(arguments: argparse.Namespace, plan: Plan, metrics: Sequence[str], results: Sequence[Result]) -> None:
    from tpu_serve.bench.serving.block import block, spread_table
    from tpu_serve.bench.serving.document import run_figures, spread

    for number, result in enumerate(results, 1):
        title = "Serving Benchmark Result"
        if len(results) > 1:
            print(f"Run {number} of {len(results)}, seed {result.seed}")
        print(
            block(
                result.figures,
                metrics=metrics,
                max_concurrency=plan.max_concurrency,
                request_rate=plan.arrivals.rate,
                server=result.server,
                title=title,
            )
        )
        if result.server is not None and result.server.num_compiled:
            _say(
                f"{result.server.num_compiled} programs were compiled during the run: the figures include that; "
                "--num-warmups keeps it apart"
            )
    if results[0].num_warm_up_compiles:
        _say(f"{results[0].num_warm_up_compiles} programs were compiled during the warm-up")
    if len(results) > 1:
        runs = [run_figures(result.figures, metrics) for result in results]
        print(spread_table(runs, spread(runs)))


def _metrics(arguments: argparse.Namespace) -> list[str]:
    text = arguments.percentile_metrics
    if text is None:
        text = "e2el" if arguments.no_stream else ",".join(METRICS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics knows {', '.join(METRICS)}, got {name!r}.")
    measured = [*names, *(word.partition(":")[0] for word in arguments.goodput)]
    if arguments.no_stream and set(measured) != {"e2el"}:
        raise ConfigError("With --no-stream only e2el can be measured: leave the other metrics out.")
    return list(dict.fromkeys(names))


def _percents(text: str) -> tuple[float, ...]:
    try:
        percents = tuple(float(word) for word in text.split(","))
    except ValueError:
        percents = (math.nan,)
    if not all(0 <= percent <= 100 for percent in percents):
        raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100 with commas between, got {text!r}.")
    return percents


def _pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} takes NAME=VALUE, got {word!r}.")
        found[name] = value
    return found


def _saves(arguments: argparse.Namespace) -> bool:
    names = ("save_result", "save_detailed", "append_result", "result_dir", "result_filename")
    is_saved = any(bool(getattr(arguments, name)) for name in names)
    if (arguments.metadata or arguments.label) and not is_saved:
        raise ConfigError("--metadata and --label are for the file: say --save-result, or leave them out.")
    return is_saved


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _allow_connections(count: int) -> None:
    """Lets this process have so many connections at once, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"tpu-serve: {text}", file=sys.stderr, flush=True)
