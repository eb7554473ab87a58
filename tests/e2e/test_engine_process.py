"""An engine in a process of its own: it is the same engine, and the end of either process is seen by the other."""

import asyncio
import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import RawRequest, Served, asynchronous, fake_build, fake_process_build, parse_events
from test_server_process import Stream, process

from tpu_serve.config import EngineConfig, ServerConfig
from tpu_serve.constraint.border import packed, unpacked
from tpu_serve.constraint.words import AllowedIds
from tpu_serve.engine.process import EngineProcess
from tpu_serve.server.app import create_app
from tpu_serve.server.run import serve
from tpu_serve.server.state import ServerState

COMPLETIONS = "/v1/completions"
TIMES = ("seconds", "created", "process_", "python_", "tpu_serve:hbm", "size_bytes")
"""What differs from run to run in the names of metrics."""


def make(is_remote: bool, **build: Any) -> Any:
    """A fake engine, in a process of its own or not."""
    if is_remote:
        return EngineProcess(build=functools.partial(fake_process_build, **build)).build(EngineConfig())
    return fake_build(lambda name, share: None, **build)


@contextlib.asynccontextmanager
async def serving(is_remote: bool = True, config: ServerConfig | None = None, **build: Any) -> AsyncIterator[Served]:
    """A server reached without sockets; its `runner` is None where the engine has a process of its own."""
    config = config or ServerConfig()
    state = ServerState(config, ("tiny",), "fake/root")
    app, engine = create_app(config, state), await asyncio.to_thread(make, is_remote, **build)
    state.ready(engine)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        try:
            yield Served(app, state, client, engine, None)
        finally:
            await asyncio.to_thread(state.service.close)
            await asyncio.sleep(0)


async def idle(served: Served) -> None:
    """Waits until the engine has told that nothing waits, runs or lies in the cache any more."""

    def is_idle() -> bool:
        reading = served.engine.reading()
        return not (reading.num_running or reading.num_waiting or reading.cache_usage or served.state.num_inference)

    await until(is_idle)


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def conversation(served: Served) -> list[Any]:
    """Everything a client sees of some requests, one after another."""
    seen: list[Any] = []
    for fields in (
        {"prompt": "x" * 30, "max_tokens": 9},
        {"prompt": "x" * 30, "max_tokens": 9, "logprobs": 2, "seed": 1},
        {"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 3},
        {"prompt": "hi", "stop": ["d"], "min_tokens": 2, "logit_bias": {"5": -100}, "bad_words": ["never"]},
        {"prompt": "hi", "max_tokens": 3, "allowed_token_ids": list(range(97, 123)), "priority": 0},
        {"prompt": "hi", "structured_outputs": {"regex": "[a-z]{3}"}},
        {"prompt": "hi", "structured_outputs": {"choice": ["abz"]}},
        {"prompt": [7, 400]},
    ):
        response = await served.post(COMPLETIONS, fields)
        body = response.json()
        seen.append((response.status_code, body.get("choices"), body.get("usage"), body.get("error")))
    events = await served.events("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    seen.append("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
    seen.append((await served.client.post("/reset_prefix_cache")).json())
    await idle(served)
    info = (await served.client.get("/server_info")).json()
    seen.append((info["devices"], info["engine"], info["status"]))
    values = re.findall(r"^(\S+) (\S+)$", (await served.client.get("/metrics")).text, re.MULTILINE)
    seen.append({name: value for name, value in values if not any(word in name for word in TIMES)})
    seen.append((await served.post("/health?deep=1", {})).status_code)
    return seen


@asynchronous
async def test_clients_and_scrapes_see_no_difference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tpu_serve.server.info.PATIENCE", 60)  # a fake engine has not imported jax before
    answers = []
    for is_remote in (True, False):
        async with serving(is_remote) as served:
            answers.append(await conversation(served))
    for remote, local in zip(*answers, strict=True):
        if isinstance(remote, dict):  # metrics, of which only those that differ are to be shown
            assert dict(remote.items() - local.items()) == dict(local.items() - remote.items())
        assert remote == local
    regex, choice = answers[0][5:7]
    assert regex[1] is not None, regex
    assert len(regex[1][0]["text"]) == 3, "the grammar ended it"
    assert "is not what the grammar allows" in choice[3]["message"], "it is followed where the engine is"
    assert answers[0][-3][1]["num_programs"] == 3
    steps = [name for name in answers[0][-2] if name.startswith("tpu_serve:steps_total")]
    assert float(answers[0][-2][steps[0]]) > 20


@asynchronous
async def test_an_engine_that_is_killed():
    async with serving(step_seconds=0.01) as served:
        whole = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 200}))
        stream = RawRequest(served.app, COMPLETIONS, {"prompt": "hi", "max_tokens": 200, "stream": True})
        await stream.until(lambda: stream.text.count("data: ") > 3)
        assert served.engine.reading().num_running == 2
        os.kill(served.engine.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        response = await asyncio.wait_for(whole, 5)
        await asyncio.wait_for(stream.task, 5)
        assert response.status_code == 500
        reason = "the engine's process was killed by SIGKILL (out of memory?)"
        assert response.json()["error"]["reason"] == "engine_failed"
        assert parse_events(stream.text)[-1]["error"]["reason"] == "engine_failed"
        health = await served.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead", "reason": reason})
        for path in (COMPLETIONS, "/reset_prefix_cache"):
            refused = await served.post(path, {"prompt": "hi"})
            assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "engine_failed")
        assert (await served.client.get("/server_info")).json()["status"] == "dead"
        assert (await served.client.get("/metrics")).status_code == 200
        assert time.monotonic() - killed < 10, "a guard, not a measurement"


@asynchronous
async def test_closing_tells_every_client():
    async with serving(step_seconds=0.01) as served:
        stream = RawRequest(served.app, COMPLETIONS, {"prompt": "hi", "max_tokens": 200, "stream": True})
        await stream.until(lambda: stream.text.count("data: ") > 3)
        await asyncio.to_thread(served.state.service.frontend.close)
        await asyncio.wait_for(stream.task, 5)
        assert parse_events(stream.text)[-1]["error"]["reason"] == "server_shutting_down"


@asynchronous
async def test_the_queue_counts_what_the_engine_has_yet_to_see():
    async with serving(step_seconds=0.05) as served:
        client = served.state.service.frontend.client
        tasks = [asyncio.create_task(served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 9})) for _ in range(20)]
        await until(lambda: served.state.service.frontend.num_live == 20)
        assert client.num_waiting + client.num_running >= 12, "they count before the engine has told of them"
        await until(lambda: (client.num_running, client.num_waiting, client.num_waiting_tokens) == (8, 12, 24))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(served)
        assert (client.num_waiting, client.num_running) == (0, 0)


def engine_of(server: Any) -> int:
    """The process of a server's engine."""
    for thread in Path(f"/proc/{server.pid}/task").iterdir():  # a child is that of the thread that started it
        for child in (thread / "children").read_text().split():
            if "tpu_serve.engine.worker" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    return 0


def is_running(pid: int) -> bool:
    """Whether there is such a process that is not merely waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_whose_engine_is_killed_ends_with_an_error():
    with process({}, step_seconds=0.05) as server:
        stream = Stream(server.until_ready(), 200)
        server.until(lambda: "data:" in stream.text)
        os.kill(server.until(lambda: engine_of(server)), signal.SIGKILL)
        assert server.wait(10) == 1
        stream.join(5)
        assert '"reason":"engine_failed"' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
        assert server.lines[-1].endswith("Exiting: the engine's process was killed by SIGKILL (out of memory?)")
        assert "Traceback" not in server.log


@pytest.mark.parametrize("build", [{"step_seconds": 0.05}, {"load_seconds": 600}], ids=["ready", "loading"])
def test_no_engine_outlives_a_server_that_is_killed(build: dict[str, Any]):
    with process({}, **build) as server:
        engine = server.until(lambda: engine_of(server))
        if "load_seconds" in build:
            server.until(lambda: "config" in httpx.get(f"{server.url}/health").text)
        else:
            stream = Stream(server.until_ready(), 200)
            server.until(lambda: "data:" in stream.text)
        assert is_running(engine)
        server.send(signal.SIGKILL)
        server.until(lambda: not is_running(engine), seconds=10)


@pytest.mark.parametrize(
    ("build", "code", "message"),
    [
        ({"error": "config"}, 2, "--max-model-len 999 is larger than the model's limit of 256."),
        ({"error": "crash"}, 1, "Exiting: loading failed: RuntimeError: the device is on fire"),
        (
            {"kills_itself_at": "weights"},
            1,
            "Exiting: loading failed: the engine's process was killed by SIGKILL (out of memory?)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_loading_that_fails(
    build: dict[str, Any], code: int, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("tpu_serve.server.run.configure_logging", lambda level: None)
    engine = EngineProcess(build=functools.partial(fake_process_build, **build))
    assert serve(ServerConfig(port=0), EngineConfig(), engine) == code
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == [message]
    assert not is_running(engine.pid)


def test_constraints_cross_without_a_grammar():
    allowed = AllowedIds([3, 5], 40)
    again = unpacked(packed(allowed), lambda source: pytest.fail("there is no grammar in it"))
    assert again.mask == allowed.mask
