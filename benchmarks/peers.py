"""This server and others on the same checkpoint on this machine's CPU, in one table; see README.md for how the others are installed.

    python benchmarks/peers.py --models models/tiny models/small --rounds 2 --output-json peers.json \\
        --peer vllm=peers/vllm/bin/vllm --peer transformers=peers/transformers/bin/transformers --peer llama.cpp=peers/llama-server

In every round each server is started, asked and stopped, one after the other. Figures are medians over the rounds. A server that does not start,
or fails a request, is said to and has no figure in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Server, ServerFailed, end_when_terminated, free_port, running
from servers import DEFAULT_PROGRAM, OURS, PEERS, Peer, gguf_of

from tpu_serve.bench.report import table
from tpu_serve.bench.serving.http_client import HttpClient
from tpu_serve.bench.serving.prompts import DatasetOptions
from tpu_serve.bench.serving.run import Plan, Watcher, bench
from tpu_serve.bench.serving.target import Target
from tpu_serve.config import ConfigError
from tpu_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of equal length, `concurrency` under way at once, after as many that are not measured."""

    name: str
    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int


CASES = (
    Case("single", 128, 128, 1, 4),
    Case("16 at once", 128, 128, 16, 32),
    Case("64 at once", 128, 128, 64, 128),
    Case("prefill 1024", 1024, 1, 1, 6),
)
FIGURES = {
    "single": "tokens/s alone",
    "ttft": "TTFT ms alone",
    "16 at once": "tokens/s of 16",
    "64 at once": "tokens/s of 64",
    "prefill 1024": "prefill 1024, tokens/s",
    "start": "start s",
    "memory": "memory MiB",
}
"""Keys of a server's figures, and what the table calls them."""
LESS_IS_BETTER = ("ttft", "start", "memory")


def measure(peer: Peer, program: str, folder: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """Figures of one server by the keys of `FIGURES`, and `error` where it failed."""
    port = free_port()
    body = {"model": peer.model(folder), "prompt": "a", "max_tokens": 1, "temperature": 0}
    found: dict[str, Any] = {}
    try:
        with running(
            peer.command(program, folder, port),
            port,
            ready_body=json.dumps(body).encode(),
            environment=peer.environment,
        ) as server:
            found["start"] = server.ready_seconds
            asyncio.run(_ask(peer, server, folder, cases, found))
            found["memory"] = server.memory.peak_bytes / 2**20
    except ServerFailed as error:
        found["error"] = str(error)
    return found


async def _ask(peer: Peer, server: Server, folder: Path, cases: Sequence[Case], found: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(folder)
    for case in cases:
        client = HttpClient(server.url)
        target = Target(client=client, model=peer.model(folder), fields=peer.fields(case.output_len))
        plan = Plan(
            dataset=DatasetOptions(input_len=case.input_len, output_len=case.output_len),
            num_prompts=case.num_prompts, max_concurrency=case.concurrency, num_warmups=case.concurrency, ready_seconds=0,
        )  # fmt: skip
        try:
            (result,) = await bench(target, tokenizer, plan, Watcher())
        except ConfigError as error:
            found["error"] = f"{case.name}: {error} {server.last_words()}"
            return
        finally:
            await client.close()
        figures = result.figures
        if figures.failed:
            found["error"] = (
                f"{case.name}: {figures.failed} of {case.num_prompts} requests failed: {dict(figures.failures)}"
            )
            continue
        wanted = case.num_prompts * case.output_len
        if abs(figures.total_output_tokens - wanted) > wanted // 50:
            found["error"] = f"{case.name}: {figures.total_output_tokens} tokens came, {wanted} were asked for"
            continue
        if case.output_len == 1:
            found[case.name] = case.num_prompts * case.input_len / figures.duration
        else:
            found[case.name] = figures.output_throughput
        if case.name == "single":
            found["ttft"] = figures.times["ttft"].median


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each figure that any round has."""
    return {
        key: statistics.median(run[key] for run in runs if key in run)
        for key in FIGURES
        if any(key in run for run in runs)
    }


def text(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """A table for each model: figures, then how this server compares (above 1 is better for it), then what failed."""
    lines = []
    for model, by_peer in found.items():
        middle = {name: medians(runs) for name, runs in by_peer.items()}
        rows = [
            [name, *(f"{some[key]:.4g}" if key in some else "-" for key in FIGURES)] for name, some in middle.items()
        ]
        ours = middle.get(OURS, {})
        for name, some in middle.items():
            if name != OURS:
                rows.append([f"{OURS} / {name}", *(_ratio(key, ours, some) for key in FIGURES)])
        lines += [f"{model}:", table(["", *FIGURES.values()], rows), ""]
        failures = [f"{name}: {run['error']}" for name, runs in by_peer.items() for run in runs if "error" in run]
        lines += [f"FAILED {failure}" for failure in dict.fromkeys(failures)]
    return "\n".join(lines)


def _ratio(key: str, ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    if key not in ours or key not in theirs:
        return "-"
    ratio = theirs[key] / ours[key] if key in LESS_IS_BETTER else ours[key] / theirs[key]
    return f"{ratio:.2f}"


def _programs(words: Sequence[str]) -> dict[str, str]:
    programs = {OURS: DEFAULT_PROGRAM}
    for word in words:
        name, equals, program = word.partition("=")
        if not equals or name not in PEERS:
            raise SystemExit(f"--peer takes NAME=PROGRAM with a NAME of {', '.join(PEERS)}, got {word!r}.")
        programs[name] = program
    return programs


def main(words: Sequence[str]) -> int:
    """Measures and prints; 1 when a server failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", type=Path, required=True, metavar="FOLDER", help="from scripts/make_bench_models.py"
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PROGRAM", help=f"{', '.join(PEERS)}; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--cases", nargs="+", choices=[case.name for case in CASES], metavar="CASE", help="(default: all)"
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="every round's figures")
    arguments = parser.parse_args(words)
    cases = [case for case in CASES if arguments.cases is None or case.name in arguments.cases]
    programs = _programs(arguments.peer)
    if "llama.cpp" in programs:
        from to_gguf import write

        for folder in arguments.models:
            if not gguf_of(folder).exists():
                write(folder, gguf_of(folder))
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        str(folder): {name: [] for name in programs} for folder in arguments.models
    }
    for number in range(arguments.rounds):
        for folder in arguments.models:
            for name, program in programs.items():
                run = measure(PEERS[name], program, folder.resolve(), cases)
                found[str(folder)][name].append(run)
                print(f"round {number + 1}, {folder.name}, {name}: {json.dumps(run)}", file=sys.stderr, flush=True)
                if arguments.output_json is not None:
                    _write(arguments.output_json, found, cases)
    print(text(found))
    return int(any("error" in run for by_peer in found.values() for runs in by_peer.values() for run in runs))


def _write(file: Path, found: Mapping[str, Any], cases: Sequence[Case]) -> None:
    machine = {"cpus": os.cpu_count(), "processor": _processor(), "python": platform.python_version()}
    document = {
        "benchmark": "peers", "machine": machine, "cases": [dataclasses.asdict(case) for case in cases], "rounds": found,
    }  # fmt: skip
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    end_when_terminated()
    sys.exit(main(sys.argv[1:]))
