"""The real `openai` client against a real port, and the same code path without HTTP."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fakes import FakeRunner, asynchronous, fake_engine, letters, live_server, saying, serving

from tpu_serve.config import ServerConfig
from tpu_serve.request import InvalidRequest
from tpu_serve.server.chat import create_chat_completion, stream_chat_completion
from tpu_serve.server.completions import create_completion, stream_completion
from tpu_serve.server.errors import error_body
from tpu_serve.server.service import Service

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[openai.OpenAI, FakeRunner]]:
    with live_server(runner=FakeRunner(seconds=0.001)) as (url, runner):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client, runner


@pytest.fixture
def client(server: tuple[openai.OpenAI, FakeRunner]) -> Iterator[openai.OpenAI]:
    yield server[0]
    server[1].script = letters


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "tpu-serve"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI, server: tuple[openai.OpenAI, FakeRunner]):
    server[1].script = saying("It is 😀.")
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == "It is 😀."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "It is 😀."
    assert not any("\ufffd" in text for text in texts)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_completions(client: openai.OpenAI):
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=4, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    joined = ["", "", "", ""]
    for chunk in client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=4, stream=True):
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == [choice.text for choice in answer.choices]


def test_errors_become_the_clients_own(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="x" * 300)
    assert refused.value.param == "prompt"
    assert refused.value.body["reason"] == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, presence_penalty=3)
    assert refused.value.param == "presence_penalty"


def test_how_each_status_reaches_the_client(server: tuple[openai.OpenAI, FakeRunner]):
    """Status, kind of exception, its code (a string, whatever was sent), and how many calls the client makes."""
    url = str(server[0].base_url).removesuffix("v1/")
    cases: list[tuple[str, dict[str, Any], type[openai.APIStatusError], str, int]] = [
        ("v1/completions", {"prompt": "x", "top_p": 2}, openai.BadRequestError, "400", 1),
        ("v1/completions", {"prompt": "x", "model": "other"}, openai.NotFoundError, "404", 1),
        ("v1/nothing", {}, openai.NotFoundError, "404", 1),
        ("v1/embeddings", {}, openai.InternalServerError, "501", 1),
        ("stop_profile", {}, openai.InternalServerError, "501", 1),
    ]
    for path, body, kind, code, num_calls in cases:
        calls: list[str] = []
        with openai.OpenAI(base_url=url, api_key="none", _strict_response_validation=True) as client:
            client._client.event_hooks = {"request": [lambda request, calls=calls: calls.append(str(request.url))]}
            with pytest.raises(kind) as refused:
                client.post(f"/{path}", body=body, cast_to=object)
        assert refused.value.code == code
        assert refused.value.body["reason"]
        assert len(calls) == num_calls, path


def test_a_failure_inside_a_stream_is_an_exception_after_what_came_before(
    client: openai.OpenAI, server: tuple[openai.OpenAI, FakeRunner]
):
    server[1].script = saying("ab", -1)
    for kind in ("chat", "text"):
        if kind == "chat":
            chunks = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        else:
            chunks = client.completions.create(model="tiny", prompt="hi", stream=True)
        seen = 0
        with pytest.raises(openai.APIError) as failed:
            for _ in chunks:
                seen += 1
        assert seen >= 2
        assert failed.value.body["reason"] == "request_failed"
        assert failed.value.code == "500"


def test_wrong_keys_and_comments_in_streams():
    config = ServerConfig(port=0, api_key=("key",), sse_keep_alive_interval=0.02)
    with live_server(config, runner=FakeRunner(saying("abc"), seconds=0.1)) as (url, _):
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError) as refused,
        ):
            client.models.list()
        assert refused.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="key") as client:
            chunks = list(client.completions.create(model="tiny", prompt="hi", stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_a_client_that_closes_its_stream_frees_the_engine(
    client: openai.OpenAI, server: tuple[openai.OpenAI, FakeRunner]
):
    runner = server[1]

    def check_that_it_stops() -> None:
        time.sleep(0.3)
        num_steps = runner.num_steps
        time.sleep(0.3)
        assert runner.num_steps == num_steps

    runner.seconds = 0.05
    try:
        chunks = client.completions.create(model="tiny", prompt="hi", max_tokens=250, stream=True)
        next(iter(chunks))
        chunks.close()
        check_that_it_stops()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.15).completions.create(model="tiny", prompt="hi", max_tokens=250)
        check_that_it_stops()
    finally:
        runner.seconds = 0.001


def test_an_engine_that_dies_in_a_stream_is_an_error_in_the_client():
    with live_server(runner=FakeRunner(seconds=0.005)) as (url, runner):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="tiny", prompt="hi", max_tokens=250, stream=True)
            next(iter(stream))
            runner.failure = RuntimeError("out of memory")
            with pytest.raises(openai.APIError, match="the engine failed") as failed:
                list(stream)
            assert failed.value.body["reason"] == "engine_failed"
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(model="tiny", prompt="hi")
            assert refused.value.status_code == 503


@asynchronous
async def test_the_same_answers_without_http():
    service = Service.start(fake_engine(), ServerConfig(), ("tiny",))
    try:
        async with serving() as served:
            for path, body, create, stream in (
                ("/v1/completions", {"prompt": "hi", "max_tokens": 3}, create_completion, stream_completion),
                (
                    "/v1/chat/completions",
                    {"messages": MESSAGES, "max_tokens": 3},
                    create_chat_completion,
                    stream_chat_completion,
                ),
            ):
                given = {**body, "request_id": "me"}
                over_http = (await served.post(path, given)).json()
                without = await create(given, service)
                same = {"created": 0, "metrics": None}
                assert {**without, **same} == {**over_http, **same}
                assert (await create(body, service, "you"))["id"].endswith("-you")
                chunks = [chunk async for chunk in stream(given, service)]
                expected = await served.events(path, **given)
                assert [{**chunk, "created": 0} for chunk in chunks] == [{**chunk, "created": 0} for chunk in expected]
                for bad in ({**body, "temperature": 3}, {}, [1], {**body, "cache_salt": "\ud800"}):
                    refused = await served.post(path, bad) if bad != {**body, "cache_salt": "\ud800"} else None
                    with pytest.raises(InvalidRequest) as raised:
                        await create(bad, service)
                    status, error = error_body(raised.value)
                    assert status == 400
                    if refused is not None:
                        assert (status, error) == (refused.status_code, refused.json())
        call = asyncio.create_task(create_completion({"prompt": "hi", "max_tokens": 250}, service))
        while not service.frontend.num_live:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert service.frontend.num_live == 0
        chunks = stream_completion({"prompt": "hi", "max_tokens": 250}, service)
        await anext(chunks)
        await chunks.aclose()
        assert service.frontend.num_live == 0
    finally:
        await asyncio.to_thread(service.close)
