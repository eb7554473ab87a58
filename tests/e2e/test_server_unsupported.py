"""Fields that are not served, that change nothing, or that nobody knows."""

from fakes import asynchronous, serving
from test_server_errors import CHAT, COMPLETIONS, USER, check_error

from tpu_serve.config import ServerConfig
from tpu_serve.server.chat import create_chat_completion
from tpu_serve.server.completions import create_completion
from tpu_serve.server.parameters import HARMLESS, UNSUPPORTED
from tpu_serve.server.protocol import ChatCompletionRequest, CompletionRequest


@asynchronous
async def test_known_fields_that_are_not_served():
    async with serving() as served:
        for name, entry in UNSUPPORTED.items():
            for neutral in (None, *entry.neutral):
                response = await served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1, name: neutral})
                assert response.status_code == 200, (name, neutral, response.text)
                assert "x-tpu-serve-ignored" not in response.headers
            for value in ({"a": 1}, [1], "auto", 7):
                for path, base, model in (
                    (COMPLETIONS, {"prompt": "hi"}, CompletionRequest),
                    (CHAT, {"messages": [USER]}, ChatCompletionRequest),
                ):
                    if name in model.model_fields:
                        continue
                    response = await served.post(path, {**base, name: value})
                    message = check_error(response, 400, name, "unsupported_parameter")
                    assert message.startswith(f"{name} = ")
                    assert message.endswith(f" is not supported: {entry.hint}.")


@asynchronous
async def test_one_is_neutral_where_true_is_not():
    async with serving() as served:
        for value in (1, 1.0):
            assert (await served.post(COMPLETIONS, {"prompt": "hi", "length_penalty": value})).status_code == 200
        response = await served.post(COMPLETIONS, {"prompt": "hi", "length_penalty": True})
        check_error(response, 400, "length_penalty", "unsupported_parameter")


@asynchronous
async def test_harmless_and_unknown_fields():
    async with serving() as served:
        harmless = {name: {"any": ["thing"]} for name in HARMLESS}
        response = await served.post(COMPLETIONS, {"prompt": "hi", **harmless})
        assert response.status_code == 200
        assert "x-tpu-serve-ignored" not in response.headers
        body = {"prompt": "hi", "messages": [USER], "tokens": [97], "foo": 1, "b\r\nä,r": None, "b\r\nä,z": 2}
        for path, ignored in (
            (COMPLETIONS, "messages,tokens,foo,b????z"),
            (CHAT, "prompt,tokens,foo,b????z"),
            ("/detokenize", "prompt,messages,foo,b????z"),
        ):
            for stream in (False, True):
                response = await served.post(path, {**body, **({"stream": True} if stream and path[1] == "v" else {})})
                assert response.status_code == 200, response.text
                assert response.headers["x-tpu-serve-ignored"] == ignored
        inside = {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True, "padding": 3, "gone": None}}
        response = await served.post(COMPLETIONS, inside)
        assert response.headers["x-tpu-serve-ignored"] == "stream_options.padding"
        many = {f"field{number}" * 50: 1 for number in range(1000)}
        response = await served.post(COMPLETIONS, {"prompt": "hi", **many})
        assert len(response.headers["x-tpu-serve-ignored"]) < 2000


@asynchronous
async def test_strict_fields_refuse_unknown_names():
    async with serving(ServerConfig(strict_fields=True)) as served:
        check_error(await served.post(COMPLETIONS, {"prompt": "hi", "foo": 1}), 400, "foo", "unknown_field")
        check_error(await served.post("/tokenize", {"prompt": "hi", "foo": 1}), 400, "foo", "unknown_field")
        body = {"prompt": "hi", "stream": True, "stream_options": {"padding": 3}}
        check_error(await served.post(COMPLETIONS, body), 400, "stream_options.padding", "unknown_field")
        assert (await served.post(COMPLETIONS, {"prompt": "hi", "user": "me", "foo": None})).status_code == 200


@asynchronous
async def test_without_http_the_answer_itself_names_ignored_fields():
    async with serving() as served:
        service = served.state.service
        for create, body in ((create_completion, {"prompt": "hi"}), (create_chat_completion, {"messages": [USER]})):
            assert (await create({**body, "max_tokens": 1, "fantasy": 1}, service))["ignored_fields"] == ["fantasy"]
            assert "ignored_fields" not in await create({**body, "max_tokens": 1}, service)
