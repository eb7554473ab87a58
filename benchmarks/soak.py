"""A server at saturation with random requests that are often given up: at the end every page must be free, memory and compile count flat.

    python benchmarks/soak.py --minutes 10                        # the embedded model
    python benchmarks/soak.py --minutes 10 MODEL -- --max-num-seqs 32

What follows `--` goes to `tpu-serve serve`. Memory is flat when its median over the last fifth of the run is above that over the second fifth by
no more than 2 % and 16 MiB, whichever is more; the first fifth may fill what is filled once. Exit code: 0 all checks hold, 1 one does not, 2 it
could not run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from processes import MemoryWatch, ServerFailed, end_when_terminated, free_port, running

from tpu_serve.bench.serving.http_client import BrokenConnection, HttpClient
from tpu_serve.bench.serving.server_metrics import Snapshot

FLAT_SHARE, FLAT_BYTES = 0.02, 16 * 2**20
IDLE_SECONDS = 60.0
ANSWER_SECONDS = 600.0
BUSY = (429, 503)
"""A full queue is no failure: the load is meant to fill it."""


@dataclass
class Soak:
    """What happened.

    Attributes:
      counts: answers by what became of them; those that begin with "unexpected" are failures.
      memory: (seconds since the start of the load, bytes of all processes).
      compiled: programs that the server had compiled for serving before and after.
      running, waiting, kv_usage: of the server, when the load had ended and it had time to settle.
      most_kv_usage: the highest that was seen under load, 0 to 1.
    """

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, int]] = field(default_factory=list)
    compiled: tuple[float, float] = (0.0, 0.0)
    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    most_kv_usage: float = 0.0

    def faults(self) -> list[str]:
        """The checks that do not hold, each with its number."""
        found = [f"{count} answers: {what}" for what, count in self.counts.items() if what.startswith("unexpected")]
        if not self.counts["answered"]:
            found.append("not one request was answered")
        if not self.counts["given up"]:
            found.append("not one request was given up")
        if self.running or self.waiting:
            found.append(f"{self.running:g} requests run and {self.waiting:g} wait after the load has ended")
        if self.kv_usage:
            found.append(f"{self.kv_usage:.2%} of the KV cache is in use after the load has ended")
        if self.compiled[1] != self.compiled[0]:
            found.append(f"{self.compiled[1] - self.compiled[0]:g} programs were compiled while serving")
        before, after = self.memory_levels()
        if after - before > max(FLAT_BYTES, FLAT_SHARE * before):
            found.append(f"memory rose from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")
        return found

    def memory_levels(self) -> tuple[float, float]:
        """Median bytes over the second and the last fifth of the samples."""
        sizes = [size for _, size in self.memory]
        fifth = max(1, len(sizes) // 5)
        return statistics.median(sizes[fifth : 2 * fifth] or sizes), statistics.median(sizes[-fifth:])

    def text(self) -> str:
        before, after = self.memory_levels()
        faults = self.faults()
        lines = [
            f"soak: {self.seconds:.0f} s, {sum(self.counts.values())} requests",
            *(f"  {what}: {count}" for what, count in sorted(self.counts.items())),
            f"KV cache: {self.most_kv_usage:.1%} in use at most, {self.kv_usage:.1%} at the end",
            f"memory of all processes: {before / 2**20:.0f} MiB in the second fifth, {after / 2**20:.0f} MiB in the last",
            f"programs compiled while serving: {self.compiled[1] - self.compiled[0]:g}",
            *(f"FAULT: {fault}" for fault in faults),
        ]
        return "\n".join([*lines, "all checks hold" if not faults else f"{len(faults)} checks do not hold"])


async def soak(url: str, pid: int, seconds: float, concurrency: int, *, max_tokens: int = 96, seed: int = 0) -> Soak:
    """Loads the server at `url`, whose process is `pid`, with `concurrency` clients, and looks at what it leaves."""
    found, client = Soak(seconds=seconds), HttpClient(url)
    before = await _metrics(client)
    memory = MemoryWatch(pid, min(1.0, seconds / 25))
    ends = time.monotonic() + seconds
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(_client(client, found, random.Random(f"{seed} {number}"), ends, max_tokens))
            group.create_task(_watch(client, found, ends))
    finally:
        memory.stop()
    found.memory = memory.samples
    settled = time.monotonic() + IDLE_SECONDS
    while True:
        after = await _metrics(client)
        found.running, found.waiting = (_value(after, f"num_requests_{state}") for state in ("running", "waiting"))
        found.kv_usage = _value(after, "kv_cache_usage_perc")
        if not (found.running or found.waiting or found.kv_usage) or time.monotonic() > settled:
            break
        await asyncio.sleep(0.1)
    found.compiled = (_compiled(before), _compiled(after))
    await client.close()
    return found


async def _client(client: HttpClient, found: Soak, source: random.Random, ends: float, max_tokens: int) -> None:
    """Requests one after the other, until the time is over."""
    while time.monotonic() < ends:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found.counts[await _request(client, source, max_tokens)] += 1
        except (OSError, BrokenConnection) as error:
            found.counts[f"unexpected {type(error).__name__}: {error}"] += 1


async def _request(client: HttpClient, source: random.Random, max_tokens: int) -> str:
    """Sends one request and reads it to its end, or gives it up in the middle; what became of it."""
    path, body = _random_body(source, max_tokens)
    gives_up = source.random() < 0.4
    patience = source.choice((0.0, source.expovariate(1 / 0.05), source.expovariate(1 / 0.5)))
    try:
        async with asyncio.timeout(patience if gives_up else None):
            async with client.send("POST", path, json.dumps(body).encode()) as answer:
                data = await answer.read()
    except TimeoutError:
        if not gives_up:
            raise
        return "given up"
    if answer.status in BUSY:
        await asyncio.sleep(0.05)
        return f"refused with {answer.status}"
    if answer.status != 200:
        return f"unexpected status {answer.status}: {data[:200]!r}"
    if b'"error"' in data[-400:]:
        return f"unexpected error in an answer: {data[-300:]!r}"
    return "answered"


def _random_body(source: random.Random, max_tokens: int) -> tuple[str, dict[str, object]]:
    """Path and fields: prompts that often begin alike, greedy or sampled, streamed or whole, one answer or two."""
    words = [source.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(source.randint(1, max_tokens))]
    text = source.choice(("", "Once upon a time, ")) + "".join(words)
    fields: dict[str, object] = {"max_tokens": source.randint(1, max_tokens), "stream": source.random() < 0.7}
    fields |= source.choice(({"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "seed": source.randrange(2**31)}))
    fields |= source.choice(({}, {"ignore_eos": True}, {"n": 2}, {"frequency_penalty": 0.5}, {"stop": ["e"]}))
    if source.random() < 0.5:
        return "/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**fields, "prompt": text}


async def _watch(client: HttpClient, found: Soak, ends: float) -> None:
    while time.monotonic() < ends:
        found.most_kv_usage = max(found.most_kv_usage, _value(await _metrics(client), "kv_cache_usage_perc"))
        await asyncio.sleep(min(1.0, found.seconds / 20))


async def _metrics(client: HttpClient) -> str:
    async with asyncio.timeout(60), client.send("GET", "/metrics") as answer:
        return (await answer.read()).decode()


def _value(metrics: str, name: str) -> float:
    """Of a metric that stands under vLLM's prefix; 0 before it is first set."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith((f"vllm:{name}{{", f"vllm:{name} "))
    )


def _compiled(metrics: str) -> float:
    return Snapshot.read(metrics).total("compile_total", phase="serving") or 0.0


def main(words: Sequence[str]) -> int:
    """Starts a server, loads it, prints; returns the exit code."""
    words = list(words)
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the embedded model when left out")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="(default: %(default)g)")
    parser.add_argument("--concurrency", type=int, default=128, metavar="N", help="clients (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write counts and memory samples to FILE")
    arguments = parser.parse_args(words[:end])
    port = free_port()
    command = [sys.executable, "-m", "tpu_serve.cli.main", "serve", *filter(None, [arguments.model])]
    command += ["--host", "127.0.0.1", "--port", str(port), *words[end + 1 :]]
    try:
        with running(command, port, ready_body=json.dumps({"prompt": "a", "max_tokens": 1}).encode()) as server:
            found = asyncio.run(
                soak(
                    server.url, server.process.pid, arguments.minutes * 60, arguments.concurrency,
                    max_tokens=arguments.max_tokens, seed=arguments.seed,
                )
            )  # fmt: skip
    except ServerFailed as error:
        print(f"soak: the server does not run: {error}", file=sys.stderr)
        return 2
    print(found.text())
    code = server.exit_code
    print(f"the server ended with {code} when asked to")
    if arguments.output_json is not None:
        document = {
            "benchmark": "soak", "seconds": found.seconds, "counts": found.counts, "memory": found.memory,
            "compiled": found.compiled, "kv_usage": found.kv_usage, "faults": found.faults(), "exit_code": code,
        }  # fmt: skip
        arguments.output_json.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return int(bool(found.faults()) or code != 0)


if __name__ == "__main__":
    end_when_terminated()
    sys.exit(main(sys.argv[1:]))
