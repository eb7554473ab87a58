"""Requests that hurt other servers, and one thing after each of them: the server is healthy and answers everybody else as before."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bug_cases import CHAT, CHATTED, COMPLETIONS, PIECES, REFUSED, SAID, SERVERS, TOOLS, USER, Chatted, Refused, Said
from chat_modes import joined
from fakes import Served, parse_events, serving

from tpu_serve.config import ServerConfig

JSON = {"content-type": "application/json"}


class Bench:
    """Servers that all cases share, each started when the first case needs it."""

    def __init__(self, runner: asyncio.Runner):
        self._runner = runner
        self._stack = contextlib.AsyncExitStack()
        self._servers: dict[str, tuple[Served, str]] = {}

    def run(self, check: Callable[[Served], Any], name: str = "qwen") -> None:
        """Runs a check against a server, then looks after the server."""
        self._runner.run(self._run(check, name))

    async def _run(self, check: Callable[[Served], Any], name: str) -> None:
        if name not in self._servers:
            config, engine = SERVERS[name]
            served = await self._stack.enter_async_context(
                serving(ServerConfig(enable_scripted_output=True, **config), max_num_queued=300, **engine)
            )
            self._servers[name] = served, await control(served)
        served, expected = self._servers[name]
        await check(served)
        await served.idle()
        assert (await served.client.get("/health")).status_code == 200
        assert await control(served) == expected

    def close(self) -> None:
        self._runner.run(self._stack.aclose())


async def control(served: Served) -> str:
    answer = await served.complete(prompt="control", max_tokens=5)
    return answer["choices"][0]["text"]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        bench = Bench(runner)
        yield bench
        bench.close()


def ids_of(served: Served, script: tuple[str | bytes | int, ...]) -> list[int]:
    tokens = {text: number for number in range(258, 272) if (text := served.engine.tokenizer.token_text(number))}
    ids: list[int] = []
    for part in script:
        if isinstance(part, int):
            ids.append(part)
        elif part in tokens:
            ids.append(tokens[part])
        else:
            ids += part.encode() if isinstance(part, str) else part
    return ids


def test_tokens_of_several_letters_are_one_token(bench: Bench):
    async def check(served: Served) -> None:
        assert [len(ids_of(served, (piece,))) for piece in PIECES] == [1] * len(PIECES)
        assert served.engine.tokenizer.decode(ids_of(served, PIECES)) == "".join(PIECES)

    bench.run(check)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case.number}-{case.param}")
def test_refused(bench: Bench, case: Refused):
    async def check(served: Served) -> None:
        for stream in (False, True):
            response = await served.post(case.path, {**case.body, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, case.param), error
            assert case.words in error["message"]
            assert error["reason"]

    bench.run(check)


@pytest.mark.parametrize("case", SAID, ids=lambda case: f"{case.number}-{case.text[:12]!r}")
def test_said(bench: Bench, case: Said):
    async def check(served: Served) -> None:
        script = ids_of(served, case.script)
        fields = {"max_tokens": 100, "scripted_token_ids": script, "return_token_ids": True, **case.fields}
        (choice,) = (await served.complete(**fields))["choices"]
        chunks = await served.events(COMPLETIONS, prompt="hi", **fields)
        parts = [part for chunk in chunks for part in chunk["choices"]]
        expected = (case.text, case.finish_reason, case.stop_reason)
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == expected
        text = "".join(part["text"] for part in parts)
        assert (text, parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == expected
        assert [id for part in parts for id in part["token_ids"]] == choice["token_ids"]
        assert case.num_tokens in (None, len(choice["token_ids"]))
        assert all(part["text"] for part in parts[:-1]), "a chunk says nothing"
        if "\ufffd" not in case.text:
            assert all("\ufffd" not in part["text"] for part in parts)

    bench.run(check)


@pytest.mark.parametrize(
    ("case", "server"),
    [pytest.param(case, name, id=f"{case.number}-{name}") for case in CHATTED for name in case.servers],
)
def test_chatted(bench: Bench, case: Chatted, server: str):
    async def check(served: Served) -> None:
        script = ids_of(served, case.script)
        body = {"messages": USER, "max_tokens": 200, "scripted_token_ids": script, **case.fields}
        whole = await served.post(CHAT, body)
        assert whole.status_code == 200, whole.text
        (choice,) = whole.json()["choices"]
        message = choice["message"]
        (streamed,) = joined(await served.events(CHAT, **body)).values()
        for content, reasoning, calls, reason in (
            (message["content"], message["reasoning"], message["tool_calls"] or [], choice["finish_reason"]),
            (
                streamed["content"] or None,
                streamed["reasoning"] or None,
                streamed["tool_calls"],
                streamed["finish_reason"],
            ),
        ):
            assert (content, reasoning, reason) == (case.content, case.reasoning, case.finish_reason)
            said = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
            assert said == case.calls
            assert all("<|" not in call["function"]["arguments"] for call in calls)

    bench.run(check, server)


def test_bodies_that_are_no_objects(bench: Bench):
    async def check(served: Served) -> None:
        paths = served.app.openapi()["paths"]
        bodies = [path for path, operations in paths.items() if "requestBody" in operations.get("post", {})]
        assert {COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/invocations"} <= set(bodies)
        for path in bodies:
            for body in ('"x"', "[1]", "42", "null", "{"):
                response = await served.client.post(path, content=body, headers=JSON)
                assert response.status_code == 400, (path, body, response.text)
                assert response.json()["error"]["message"]

    bench.run(check)


def test_answers_to_long_lists_of_wrong_things_are_short(bench: Bench):
    async def check(served: Served) -> None:
        response = await served.post(COMPLETIONS, {"prompt": [{}] * 4000})
        assert response.status_code == 400
        assert len(response.content) < 20_000

    bench.run(check)


@pytest.mark.parametrize("prompt", ["\n1. Carol has 20", "“é😀”"])
def test_an_echo_is_the_prompt_and_its_tokens_are_its_text(bench: Bench, prompt: str):
    async def check(served: Served) -> None:
        fields = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
        (choice,) = (await served.complete(**fields))["choices"]
        scored = choice["logprobs"]
        assert choice["text"] == prompt
        assert scored["token_logprobs"][0] is None
        assert len(scored["tokens"]) == len(prompt.encode())
        if prompt.isascii():
            assert "".join(scored["tokens"]) == prompt
            assert scored["text_offset"] == list(range(len(prompt)))

    bench.run(check)


def test_bytes_of_tokens_are_those_of_the_text(bench: Bench):
    async def check(served: Served) -> None:
        script = ids_of(served, ("“é😀”",))
        answer = await served.chat(logprobs=True, top_logprobs=3, scripted_token_ids=script)
        content = answer["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == "“é😀”"
        assert all(top["token"] for entry in content for top in entry["top_logprobs"])

    bench.run(check)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_of_a_stream(bench: Bench, path: str):
    async def check(served: Served) -> None:
        body = {**({"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}), "n": 2, "max_tokens": 7}
        whole = (await served.post(path, body)).json()["usage"]
        for continuous in (False, True):
            options = {"include_usage": True, "continuous_usage_stats": continuous}
            chunks = await served.events(path, **body, stream_options=options)
            *others, last = chunks
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert last["usage"][name] == whole[name]
            assert last["choices"] == []
            assert all(("usage" in chunk) == continuous for chunk in others)

    bench.run(check)


def test_equal_request_ids(bench: Bench):
    async def check(served: Served) -> None:
        body = {"prompt": "hi", "max_tokens": 50, "request_id": "id"}
        answers = await asyncio.gather(*(served.post(COMPLETIONS, body) for _ in range(2)))
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [
            answers[0].json()["choices"][0]["text"]
        ] * 2

    bench.run(check)


def test_a_length_is_no_reservation(bench: Bench):
    async def check(served: Served) -> None:
        answer = await served.complete(prompt=[97] * 200, max_tokens=100)
        assert answer["usage"]["completion_tokens"] == 56
        assert answer["choices"][0]["finish_reason"] == "length"

    bench.run(check)


def test_256_streams_at_a_time(bench: Bench):
    """Thirty-two times as many as run at once: each says what it says alone, in order, and none waits for ever."""

    async def check(served: Served) -> None:
        async def stream(index: int) -> str:
            script = list(f"{index}: é😀 ".encode() * 2)
            path, base = (COMPLETIONS, {"prompt": f"p{index}"}) if index % 2 else (CHAT, {"messages": USER})
            response = await served.post(path, {**base, "stream": True, "max_tokens": 60, "scripted_token_ids": script})
            assert response.status_code == 200, response.text
            choices = [choice for chunk in parse_events(response.text) for choice in chunk["choices"]]
            return "".join(choice["text"] if index % 2 else choice["delta"].get("content", "") for choice in choices)

        texts = await asyncio.gather(*(stream(index) for index in range(256)))
        assert texts == [f"{index}: é😀 " * 2 for index in range(256)]

    bench.run(check)


def test_tools_with_objects_that_are_no_tools_hurt_nobody(bench: Bench):
    async def check(served: Served) -> None:
        for tool in ({}, {"type": "function", "function": None}, {"type": "function", "function": {"name": 5}}):
            response = await served.post(CHAT, {"messages": USER, "tools": [*TOOLS, tool]})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "tools"

    bench.run(check)
