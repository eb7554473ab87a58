"""CPU of the host for a streamed token: from what the engine sampled to the bytes of a server-sent event, through the whole server."""

from __future__ import annotations

import asyncio
import datetime
import json
import platform
import socket
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tpu_serve import __version__
from tpu_serve.bench.stream_core import ScriptedCore, script, scripted_engine
from tpu_serve.config import ServerConfig
from tpu_serve.engine.engine import Engine
from tpu_serve.text.tokenizer import Tokenizer

WORDS = (
    "A mixture of experts gives each token to a few of its layers' parts, and the rest stay idle. Routing is learned; so is balance.\n\n"
    '```python\ndef top_k(scores: list[float], k: int) -> list[int]:\n    return sorted(range(len(scores)), key="x".join)[:k]\n```\n'
    "Größe, naïveté, 東京の天気, добрый день, 👍🏽 — and so on, \u2028 line by line.\n"
)
CALL = '<tool_call>{"name": "note", "arguments": {"text": "'
TOOL = {"name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked and what is answered.

    Attributes:
      path: the endpoint.
      body: of the request.
      texts: what is streamed, an equal share of each.
      parsers: server options that say how the answer is read; without them it is taken as it is.
      uses_socket: through uvicorn and the loopback interface, to a client in another process.
    """

    path: str
    body: Mapping[str, Any]
    texts: Sequence[str] = (WORDS,)
    parsers: Mapping[str, Any] = field(default_factory=lambda: {"reasoning_parser": "none", "tool_call_parser": "none"})
    uses_socket: bool = False


_QWEN = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
CASES: dict[str, Case] = {
    "chat": Case(CHAT, _MESSAGES),
    "chat_usage": Case(CHAT, {**_MESSAGES, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "chat_logprobs": Case(CHAT, {**_MESSAGES, "logprobs": True, "top_logprobs": 2}),
    "chat_reasoning": Case(CHAT, _MESSAGES, (f"<think>\n{WORDS}", f"</think>\n\n{WORDS}"), _QWEN),
    "chat_call": Case(
        CHAT,
        {**_MESSAGES, "tools": [{"type": "function", "function": TOOL}]},
        (CALL + WORDS.replace("\n", " ").replace('"', "'"),),
        _QWEN,
    ),
    "completions": Case(COMPLETIONS, {"prompt": "hi"}),
    "completions_logprobs": Case(COMPLETIONS, {"prompt": "hi", "logprobs": 2}),
    "responses": Case(RESPONSES, {"input": "hi"}),
    "chat_socket": Case(CHAT, _MESSAGES, uses_socket=True),
}


class Host(Protocol):
    """A server over an engine, in the running event loop. `bench` may not import the server: who calls gives one.

    Attributes:
      app: the ASGI application.
    """

    app: Callable[..., Any]

    async def serve(self, listener: socket.socket) -> None:
        """Answers on a listening socket until it is cancelled."""

    async def close(self) -> None:
        """Ends the engine's thread."""


MakeHost = Callable[[ServerConfig, Engine], Host]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How much is measured: `num_tokens` of each of `num_streams` at once, the first `num_warmup` of them not; each case `num_runs` times."""

    num_streams: int
    num_tokens: int
    num_warmup: int
    num_runs: int


@dataclass(frozen=True, slots=True)
class Found:
    """One run of one case.

    Attributes:
      microseconds: CPU time of the event loop's thread per token of a stream.
      num_bytes: of all bodies; chunk sizes and headers too where there is a socket.
      num_sends: messages of the application with a body; 0 where there is a socket.
    """

    microseconds: float
    num_bytes: int
    num_sends: int


@dataclass(frozen=True, slots=True)
class StreamReport:
    """All runs, by case."""

    plan: StreamPlan
    model: str
    runs: Mapping[str, Sequence[Found]]

    def text(self) -> str:
        """A table: microseconds of CPU per token, the least and the median of the runs."""
        plan = self.plan
        lines = [
            f"bench stream: {plan.num_streams} streams of {plan.num_tokens} tokens, CPU of the HTTP side in microseconds per token",
            f"{'':<24}{'min':>9}{'median':>9}{'sends/token':>13}{'bytes/token':>13}",
        ]
        num_all = plan.num_streams * plan.num_tokens
        for name, runs in self.runs.items():
            found = [run.microseconds for run in runs]
            sends = f"{runs[0].num_sends / num_all:.2f}" if runs[0].num_sends else "-"
            lines.append(
                f"{name:<24}{min(found):>9.1f}{statistics.median(found):>9.1f}{sends:>13}{runs[0].num_bytes / num_all:>13.1f}"
            )
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Everything, as JSON values; `bench compare` reads `repeats`."""
        return {
            "benchmark": "stream",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"tpu_serve": __version__, "python": platform.python_version()},
            "settings": {
                "model": self.model,
                "num_streams": self.plan.num_streams,
                "num_tokens": self.plan.num_tokens,
                "num_warmups": self.plan.num_warmup,
                "num_runs": self.plan.num_runs,
            },
            "repeats": [
                {f"{name}_us_per_token": runs[place].microseconds for name, runs in self.runs.items()}
                for place in range(self.plan.num_runs)
            ],
            "num_bytes": {name: runs[0].num_bytes for name, runs in self.runs.items()},
            "num_sends": {name: runs[0].num_sends for name, runs in self.runs.items()},
        }


def bench_stream(
    make_host: MakeHost,
    tokenizer: Tokenizer,
    model: str,
    plan: StreamPlan,
    cases: Sequence[str],
    on_done: Callable[[], None] = lambda: None,
) -> StreamReport:
    """Measures the cases, all of them once and then again.

    Raises:
      ConfigError: there are fewer tokens than a case has parts, or the tokenizer has no chat template.
      RuntimeError: a stream did not come as it should.
    """
    runs: dict[str, list[Found]] = {name: [] for name in cases}
    for _ in range(plan.num_runs):
        for name in cases:
            runs[name].append(asyncio.run(_run(make_host, tokenizer, plan, CASES[name])))
            on_done()
    return StreamReport(plan, model, runs)


async def _run(make_host: MakeHost, tokenizer: Tokenizer, plan: StreamPlan, case: Case) -> Found:
    token_ids = script(tokenizer, case.texts, plan.num_tokens)
    core = ScriptedCore(asyncio.get_running_loop(), plan.num_streams, token_ids)
    host = make_host(ServerConfig(**case.parsers), scripted_engine(core, tokenizer, plan.num_streams))
    body = json.dumps({**case.body, "stream": True})
    try:
        if case.uses_socket:
            num_bytes, num_sends = await _through_socket(host, case.path, body, plan.num_streams), 0
        else:
            num_bytes, num_sends = await _in_memory(host, case.path, body, plan.num_streams)
    finally:
        await host.close()
    # The last step is not read: streams end in it.
    seconds = core.cpu_seconds[-1] - core.cpu_seconds[plan.num_warmup]
    num_steps = len(core.cpu_seconds) - 1 - plan.num_warmup
    return Found(1e6 * seconds / (num_steps * plan.num_streams), num_bytes, num_sends)


async def _in_memory(host: Host, path: str, body: str, num_streams: int) -> tuple[int, int]:
    exchanges = [_Exchange(path, body) for _ in range(num_streams)]
    await asyncio.gather(*(host.app(exchange.scope, exchange.receive, exchange.send) for exchange in exchanges))
    for exchange in exchanges:
        if exchange.status != 200:
            raise RuntimeError(f"{path} answered {exchange.status}: {exchange.beginning.decode(errors='replace')}")
    return sum(exchange.num_bytes for exchange in exchanges), sum(exchange.num_sends for exchange in exchanges)


class _Exchange:
    """A client that reads everything at once and keeps its first bytes only."""

    def __init__(self, path: str, body: str):
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "server": ("bench", 80),
            "client": ("bench", 1),
        }
        self._body: bytes | None = body.encode()
        self.status = self.num_bytes = self.num_sends = 0
        self.beginning = b""

    async def receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()  # it stays; the application cancels this at the end
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        body = message.get("body", b"")
        self.beginning = self.beginning or body
        self.num_bytes += len(body)
        self.num_sends += 1


async def _through_socket(host: Host, path: str, body: str, num_streams: int) -> int:
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listener:
        server = asyncio.create_task(host.serve(listener))
        words = (str(listener.getsockname()[1]), str(num_streams), path, body)
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tpu_serve.bench.stream_client", *words, stdout=asyncio.subprocess.PIPE
        )
        try:
            output, _ = await client.communicate()
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
    found = json.loads(output or "{}")
    if found.get("num_answered") != num_streams:
        raise RuntimeError(f"{found.get('num_answered', 0)} of {num_streams} streams were answered by {path}.")
    num_bytes: int = found["num_bytes"]
    return num_bytes
