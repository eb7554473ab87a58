"""A server over a real scheduler and step loop whose model is a script: what it says is known in advance.

Run as a program it serves over HTTP: `python fakes.py SERVER_OPTIONS BUILD_OPTIONS IS_REMOTE`, two JSON objects and whether the engine has a
process of its own, `true` or `false`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import tokenizers
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tpu_serve.config import ConfigError, EngineConfig, ServerConfig
from tpu_serve.engine.core import EngineCore
from tpu_serve.engine.engine import Engine
from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.engine.process import EngineProcess
from tpu_serve.request import Request, TokenLogprobs
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput
from tpu_serve.server.app import create_app
from tpu_serve.server.listening import http_config, listening, tls_options, url_of
from tpu_serve.server.logs import configure_logging
from tpu_serve.server.run import serve
from tpu_serve.server.state import ServerState
from tpu_serve.text.tokenizer import Tokenizer

END, START = 256, 257
"""Ids of <|im_end|>, which ends a sequence, and <|im_start|>; ids below are the bytes themselves."""
VOCAB_SIZE = 272
"""Of the model, a little wider than the tokenizer's, as they usually are."""
MAX_MODEL_LEN = 256
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)

Script = Callable[[Request, int], int]
"""The token that a request generates at an index."""


def letters(request: Request, index: int) -> int:
    """Small letters for ever, different for every prompt and choice."""
    return ord("a") + (sum(request.prompt_token_ids) + 7 * request.choice + 3 * index) % 26


def saying(*tokens: int | str | bytes) -> Script:
    """These tokens, then the end. Texts are taken byte by byte."""
    ids: list[int] = []
    for token in tokens:
        ids += [token] if isinstance(token, int) else token.encode() if isinstance(token, str) else token
    return lambda request, index: ids[index] if index < len(ids) else END


@dataclass
class LaunchedStep:
    output: SchedulerOutput
    tokens: list[SampledToken | None]


@dataclass
class FakeRunner:
    """Samples by `script`. `seconds` is how long a step takes; the next step fails with `failure` when that is set."""

    script: Script = letters
    seconds: float = 0.0
    failure: Exception | None = None
    compile_count: int = 3
    num_steps: int = 0
    logprob: float = -0.25
    hangs: threading.Event = field(default_factory=threading.Event)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        if self.failure is not None:
            raise self.failure
        self.num_steps += output.num_steps
        return LaunchedStep(output, [self._sample(item) for item in output.scheduled])

    def collect(self, ticket: LaunchedStep) -> list[SampledToken | None]:
        time.sleep(self.seconds)
        while self.hangs.is_set():
            time.sleep(0.01)
        return ticket.tokens

    def reset(self) -> None:
        pass

    def _sample(self, item: Any) -> SampledToken | None:
        request, prompt_logprobs = item.sequence.request, self._prompt_logprobs(item)
        if not item.samples:
            return SampledToken(None, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        script = saying(*request.forced_token_ids) if request.forced_token_ids else self.script
        place, count = item.start + item.length - len(request.prompt_token_ids), request.params.logprobs
        tokens = [script(request, place + step) for step in range(item.num_steps)]
        scores = [None if count is None else self._logprobs(token, count) for token in tokens]
        first, *later = map(SampledToken, tokens, scores)
        first.prompt_logprobs, first.later = prompt_logprobs, tuple(later)
        return first

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token is always the most probable one, and those after it follow."""
        top = tuple(((token + step) % VOCAB_SIZE, self.logprob - step) for step in range(count))
        return TokenLogprobs(token, self.logprob, top)

    def _prompt_logprobs(self, item: Any) -> tuple[TokenLogprobs, ...]:
        request = item.sequence.request
        count = request.params.prompt_logprobs
        if count is None:
            return ()
        tokens = request.prompt_token_ids[item.start + 1 : item.start + item.length + 1]
        return tuple(self._logprobs(token, count) for token in tokens)


def byte_tokenizer(
    template: str | None = TEMPLATE, specials: tuple[str, ...] = (), pieces: tuple[str, ...] = ()
) -> Tokenizer:
    """Token b is byte b; further special tokens get the ids from 258 on, and tokens of several letters those after them."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    further = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    vocabulary = {chr(byte) if chr(byte) in alphabet else next(further): byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_end|>", "<|im_start|>", *specials)])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in pieces])
    return Tokenizer(backend, chat_template_source=template)


def fake_engine(
    *,
    runner: FakeRunner | None = None,
    template: str | None = TEMPLATE,
    max_num_queued: int = 64,
    max_num_queued_tokens: int | None = None,
    num_pages: int = 129,
    scheduling_policy: str = "fcfs",
    specials: tuple[str, ...] = (),
    pieces: tuple[str, ...] = (),
    max_model_len: int = MAX_MODEL_LEN,
    num_decode_steps: int = 1,
    **defaults: Any,
) -> Engine:
    """An engine over the fake runner; `defaults` are the model's sampling defaults."""
    scheduler = Scheduler(
        Cache([PagePool(num_pages, 8)]), max_num_seqs=8, max_num_batched_tokens=64, max_model_len=max_model_len,
        num_decode_steps=num_decode_steps,
    )  # fmt: skip
    info = ModelInfo(
        name="fake",
        architecture="FakeForCausalLM",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({END}),
        default_params=defaults,
        max_num_queued=max_num_queued,
        max_num_queued_tokens=max_num_queued_tokens,
        scheduling_policy=scheduling_policy,
    )
    core, tokenizer = EngineCore(scheduler, runner or FakeRunner()), byte_tokenizer(template, specials, pieces)
    intake = Intake(info, tokenizer=tokenizer)
    return Engine(EngineConfig(), info, intake, core, tokenizer, {("ragged", "none"): 3})


@dataclass
class Served:
    """A server in this event loop."""

    app: FastAPI
    state: ServerState
    client: httpx.AsyncClient
    engine: Engine
    runner: FakeRunner

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """The answer of a completion that must succeed."""
        response = await self.post("/v1/completions", {"prompt": "hi", **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, content: str = "hi", **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        response = await self.post("/v1/chat/completions", {"messages": messages, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that must start; checks its frame."""
        response = await self.post(path, {"stream": True, **fields})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)

    async def idle(self, seconds: float = 1.0) -> None:
        """Waits until nothing waits or runs and every page is free, and checks that nothing leaked."""
        scheduler = self.engine.core.scheduler
        deadline = time.monotonic() + seconds
        while self.engine.core.has_work or scheduler.cache.usage or self.state.num_inference:
            assert time.monotonic() < deadline, "requests or pages are left"
            await asyncio.sleep(0.01)
        scheduler.check()


def parse_events(text: str) -> list[dict[str, Any]]:
    """Payloads of a stream, which must end with [DONE]."""
    assert text.isascii(), "a client may split a character, or take U+2028 for the end of a line"
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@contextlib.asynccontextmanager
async def serving(
    config: ServerConfig | None = None, *, loading: bool = False, **engine_options: Any
) -> AsyncIterator[Served]:
    """A server reached without sockets."""
    config = config or ServerConfig()
    state = ServerState(config, config.served_model_name or ("tiny", "tiny-alias"), "fake/root")
    app, engine = create_app(config, state), fake_engine(**engine_options)
    if not loading:
        state.ready(engine)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        try:
            yield Served(app, state, client, engine, engine.core.runner)
        finally:
            engine.core.runner.hangs.clear()
            if state.service is not None:
                await asyncio.to_thread(state.service.close)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class RawRequest:
    """A POST whose client can go away at any time."""

    def __init__(self, app: FastAPI, path: str, body: Any, headers: dict[str, str] | None = None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
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
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.messages: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._incoming = [{"type": "http.request", "body": data, "more_body": False}]
        self.task = asyncio.create_task(app(self.scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    async def until(self, condition: Callable[[], Any], seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def live_server(config: ServerConfig | None = None, **engine_options: Any) -> Iterator[tuple[str, FakeRunner]]:
    """A server on a real port, or where `config` says, in a thread. Yields its URL."""
    engine = fake_engine(**engine_options)
    config = config or ServerConfig(port=0)
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    async def main() -> None:
        state = ServerState(config, ("tiny",), "fake/root")
        state.ready(engine)
        server = uvicorn.Server(http_config(create_app(config, state), config, tls_options(config)))
        servers.append(server)
        ready.set()
        await server.serve(sockets=[listener])
        assert state.service is not None
        await asyncio.to_thread(state.service.close)

    with listening(config) as listener:
        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        assert ready.wait(10)
        try:
            yield url_of(listener, config), engine.core.runner
        finally:
            servers[0].should_exit = True
            thread.join(10)


def fake_build(
    on_phase: Callable[[str, float], None],
    *,
    load_seconds: float = 0.0,
    error: str = "",
    step_seconds: float = 0.0,
    dies_after: int = 0,
) -> Engine:
    """Pretends to load. `error` is "config" or "crash"; the engine fails after `dies_after` steps when that is set."""
    for name in ("config", "tokenizer", "weights", "compile"):
        for quarter in range(4):
            on_phase(name, quarter / 4)
            time.sleep(load_seconds / 16)
    if error == "config":
        raise ConfigError("--max-model-len 999 is larger than the model's limit of 256.")
    if error == "crash":
        raise RuntimeError("the device is on fire")
    runner = FakeRunner(seconds=step_seconds)
    if dies_after:
        launch = runner.launch

        def launch_or_die(output: SchedulerOutput) -> LaunchedStep:
            if runner.num_steps >= dies_after:
                raise RuntimeError("the device is on fire")
            return launch(output)

        runner.launch = launch_or_die  # type: ignore[method-assign]
    return fake_engine(runner=runner)


def fake_process_build(
    config: EngineConfig, on_phase: Callable[[str, float], None], *, kills_itself_at: str = "", **options: Any
) -> Engine:
    """`fake_build` for an `EngineProcess`, which is gone at the phase `kills_itself_at`."""

    def on_phase_or_death(name: str, share: float) -> None:
        on_phase(name, share)
        if name == kills_itself_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return fake_build(on_phase_or_death, **options)


def main(server_options: dict[str, Any], build_options: dict[str, Any], is_remote: bool) -> int:
    """Serves a fake engine, in a process of its own if `is_remote`."""
    config = ServerConfig(**server_options)
    if is_remote:
        build = functools.partial(fake_process_build, **build_options)
        return serve(config, EngineConfig(), EngineProcess(functools.partial(configure_logging, config), build))
    return serve(config, EngineConfig(), lambda _, on_phase: fake_build(on_phase, **build_options))


if __name__ == "__main__":
    import fakes  # what is pickled must not be of __main__

    raise SystemExit(fakes.main(*map(json.loads, sys.argv[1:4])))
