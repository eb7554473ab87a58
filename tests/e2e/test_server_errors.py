"""Every refusal: status, body and the field it names."""

import asyncio
import json
from typing import Any

import pytest
from fakes import MAX_MODEL_LEN, VOCAB_SIZE, FakeRunner, asynchronous, serving

from tpu_serve.request import MAX_LOGPROBS
from tpu_serve.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TYPES = {
    "not_found": "Not Found",
    "method_not_allowed": "Method Not Allowed",
    "unsupported_media_type": "Unsupported Media Type",
    "request_too_large": "Content Too Large",
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def check_error(response: Any, status: int, param: str | None, reason: str) -> str:
    """Checks the whole body and returns the message."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert error == {
        "message": error["message"],
        "type": TYPES.get(reason) or TYPES[status],
        "param": param,
        "code": status,
        "reason": reason,
    }
    assert error["message"]
    assert "Traceback" not in response.text
    assert ".py" not in response.text
    assert len(response.content) < 20_000
    return error["message"]


BAD_VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "0.7"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": -0.1}, "min_p", "invalid_value"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": 100}, "n", "too_many_choices"),
    ({"n": 2, "best_of": 3}, "best_of", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": "x"}, "seed", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": ["a", 1]}, "stop", "invalid_type"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "out_of_vocabulary"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "invalid_value"),
    ({"allowed_token_ids": [1] * (VOCAB_SIZE + 1)}, "allowed_token_ids", "invalid_value"),
    ({"logit_bias": {str(token_id): 1 for token_id in range(513)}}, "logit_bias", "too_many_biases"),
    ({"bad_words": ["ab" * 20_000]}, "bad_words", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"cache_salt": "a/b"}, "cache_salt", "invalid_value"),
    ({"cache_salt": "a" * 129}, "cache_salt", "invalid_value"),
    ({"request_id": "two words"}, "request_id", "invalid_value"),
    ({"request_id": ""}, "request_id", "invalid_value"),
    ({"request_id": "a" * 129}, "request_id", "invalid_value"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"presence_penalty": -2.1}, "presence_penalty", "invalid_value"),
    ({"presence_penalty": "1"}, "presence_penalty", "invalid_type"),
    ({"presence_penalty": False}, "presence_penalty", "invalid_type"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": -1}, "repetition_penalty", "invalid_value"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {" 1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", "out_of_vocabulary"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": -101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": True}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"1": "5"}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"1": None}}, "logit_bias", "invalid_type"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
    ({"min_tokens": 1.5}, "min_tokens", "invalid_type"),
    ({"bad_words": [""]}, "bad_words", "invalid_value"),
    ({"bad_words": ["a"] * 129}, "bad_words", "invalid_value"),
    ({"bad_words": "a"}, "bad_words", "invalid_type"),
    ({"bad_words": [1]}, "bad_words", "invalid_type"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", "out_of_vocabulary"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids", "invalid_type"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "invalid_type"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"priority": 1}, "priority", "unsupported_parameter"),
    ({"priority": 2**63}, "priority", "invalid_value"),
    ({"priority": "1"}, "priority", "invalid_type"),
    ({"scripted_token_ids": [97]}, "scripted_token_ids", "unsupported_parameter"),
    ({"scripted_token_ids": []}, "scripted_token_ids", "unsupported_parameter"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "invalid_type"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "invalid_type"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs", "invalid_type"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "structured_outputs", "unsupported_parameter"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "unsupported_parameter"),
    ({"structured_outputs": "json"}, "structured_outputs", "invalid_type"),
    ({"response_format": {"type": "yaml"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_schema", "json_schema": [1]}}, "response_format", "invalid_type"),
    ({"response_format": {"type": 5}}, "response_format", "invalid_type"),
    ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, "response_format", "unsupported_parameter"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format", "unsupported_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "regex": "a"}}},
        "response_format",
        "unsupported_parameter",
    ),
    ({"response_format": {"type": "structural_tag", "format": {"type": ["x"]}}}, "response_format", "invalid_grammar"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "invalid_value",
    ),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "unsupported_parameter"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ({"guided_regex": "[0-9]+"}, "guided_regex", "unsupported_parameter"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "invalid_grammar"),
    ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs", "invalid_grammar"),
    ({"structured_outputs": {"json": {"type": "not-a-type"}}}, "structured_outputs", "invalid_grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "invalid_grammar"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "not-a-type"}}}},
        "response_format",
        "invalid_grammar",
    ),
    ({"model": 5}, "model", "invalid_type"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "empty_prompt"),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": []}, "prompt", "empty_prompt"),
    ({"prompt": ["a", ""]}, "prompt", "empty_prompt"),
    ({"prompt": [[1], []]}, "prompt", "empty_prompt"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": ["a", [1]]}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": [1.0]}, "prompt", "invalid_type"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ({"prompt": [-1]}, "prompt", "out_of_vocabulary"),
    ({"prompt": [VOCAB_SIZE]}, "prompt", "out_of_vocabulary"),
    ({"prompt": [2**63]}, "prompt", "out_of_vocabulary"),
    ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt", "out_of_vocabulary"),
    ({"prompt": ["a"] * 1025}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 100}, "prompt", "too_many_choices"),
    ({"prompt": ["a"] * 100, "echo": True, "max_tokens": 0}, "prompt", "too_many_choices"),
    ({"prompt": [1] * MAX_MODEL_LEN}, "prompt", "context_length_exceeded"),
    ({"prompt": [VOCAB_SIZE] * MAX_MODEL_LEN}, "prompt", "context_length_exceeded"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 2}, "min_tokens", "invalid_value"),
    ({"echo": True, "max_tokens": 0, "prompt": [VOCAB_SIZE]}, "prompt", "out_of_vocabulary"),
    ({"logprobs": MAX_LOGPROBS + 1}, "logprobs", "invalid_value"),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 1.0}, "logprobs", "invalid_type"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing_field"),
    ({"messages": []}, "messages", "invalid_type"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages", "invalid_type"),
    ({"messages": [{"content": "hi"}]}, "messages", "missing_field"),
    ({"messages": [{"role": "user"}]}, "messages", "invalid_value"),
    ({"messages": [{"role": "tool", "content": None}]}, "messages", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "invalid_value"),
    ({"messages": [USER] * 50}, "messages", "context_length_exceeded"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "invalid_value"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "invalid_type"),
    ({"tools": []}, "tools", "empty_tools"),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
]


@asynchronous
async def test_bad_values_are_refused_by_name_and_nothing_runs():
    async with serving() as served:
        for path, base, cases in (
            (COMPLETIONS, {"prompt": "hi"}, BAD_VALUES + BAD_COMPLETIONS),
            (CHAT, {"messages": [USER]}, BAD_VALUES + BAD_CHATS),
        ):
            for fields, param, reason in cases:
                check_error(await served.post(path, {**base, **fields}), 400, param, reason)
        assert served.runner.num_steps == 0
        await served.complete(max_tokens=1)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@asynchronous
async def test_numbers_that_are_not_finite_are_refused_by_name(number: str):
    async with serving() as served:
        for name in ("temperature", "top_p", "min_p"):
            data = f'{{"prompt": "hi", "{name}": {number}}}'
            response = await served.client.post(COMPLETIONS, content=data, headers={"content-type": "application/json"})
            check_error(response, 400, name, "invalid_value")


@asynchronous
async def test_messages_hold_the_numbers_and_the_words_that_clients_match():
    async with serving() as served:
        message = check_error(
            await served.post(COMPLETIONS, {"prompt": "x" * 300}), 400, "prompt", "context_length_exceeded"
        )
        assert message.startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens.")
        assert "300" in message
        message = check_error(
            await served.post(COMPLETIONS, {"prompt": "a", "logprobs": 21}), 400, "logprobs", "invalid_value"
        )
        assert message == "Requested sample logprobs of 21, which is greater than max allowed: 20."
        message = check_error(
            await served.post(CHAT, {"messages": [USER, {"role": "user", "content": 5}]}),
            400,
            "messages",
            "invalid_type",
        )
        assert message == "messages[1].content must be a string, got 5."


@asynchronous
async def test_an_unknown_model_is_a_404_with_the_nearest_name():
    async with serving() as served:
        for path, body in (
            (COMPLETIONS, {"prompt": "a"}),
            (CHAT, {"messages": [USER]}),
            ("/tokenize", {"prompt": "a"}),
        ):
            message = check_error(await served.post(path, {"model": "tinny", **body}), 404, "model", "model_not_found")
            assert message == "The model `tinny` does not exist. Valid aliases: tiny, tiny-alias. Did you mean `tiny`?"
            long = await served.post(path, {"model": "x" * 10_000, **body})
            assert len(check_error(long, 404, "model", "model_not_found")) < 200
        check_error(await served.client.get("/v1/models/tinny"), 404, "model", "model_not_found")
        for name in ("tiny", "tiny-alias", None):
            assert (await served.complete(model=name, max_tokens=1))["model"] == "tiny"


@asynchronous
async def test_bodies_that_are_not_json_objects():
    json_type = {"content-type": "application/json"}
    async with serving() as served:
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            for body in ('"x"', "[1]", "42", "null", "true"):
                response = await served.client.post(path, content=body, headers=json_type)
                check_error(response, 400, None, "invalid_type")
            for body, place in (
                ('{"a": 1,}', "line 1 column 9"),
                ('{\n"a" 1}', "line 2 column 5"),
                ("", "line 1 column 0"),
            ):
                response = await served.client.post(path, content=body, headers=json_type)
                assert place in check_error(response, 400, None, "invalid_json")
            for body in (b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 100_000):
                response = await served.client.post(path, content=body, headers=json_type)
                check_error(response, 400, None, "invalid_json")


@asynchronous
async def test_errors_of_the_protocol_have_the_same_shape():
    async with serving() as served:
        client = served.client
        check_error(await client.get("/nope"), 404, None, "not_found")
        check_error(await client.get("/v1/completions/"), 404, None, "not_found")
        response = await client.get(COMPLETIONS)
        assert "This path answers POST, not GET." in check_error(response, 405, None, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
            response = await client.post(COMPLETIONS, content='{"prompt": "a"}', headers=headers)
            message = check_error(response, 415, None, "unsupported_media_type")
            assert "Only 'application/json' is allowed" in message
        response = await client.post(
            COMPLETIONS, content='{"prompt": "a"}', headers={"content-type": "Application/JSON; charset=utf-8"}
        )
        assert response.status_code == 200


@asynchronous
async def test_a_thousand_wrong_items_get_a_short_answer():
    async with serving() as served:
        for fields in (
            {"prompt": [{"a": 1}] * 4000},
            {"stop": [1] * 100_000},
            {"stop_token_ids": ["x" * 100] * 100_000},
            {"temperature": "x" * 1_000_000},
            {"x" * 100_000: 1, "prompt": 5},
        ):
            response = await served.post(COMPLETIONS, {"prompt": "hi", **fields})
            assert response.status_code == 400
            assert len(response.content) < 2000
        names = ("n", "top_k", "top_p", "min_p", "seed", "temperature", "max_tokens", "stream", "echo")
        message = check_error(
            await served.post(COMPLETIONS, dict.fromkeys(names, "x")), 400, "temperature", "invalid_type"
        )
        assert message.count(" must be ") == 3
        response = await served.post(CHAT, {"messages": [1] * 100_000})
        assert response.status_code == 400
        assert len(response.content) < 2000


@asynchronous
async def test_a_full_queue_is_a_503_with_retry_after():
    async with serving(max_num_queued=4, runner=FakeRunner(seconds=0.01)) as served:
        calls = [served.post(COMPLETIONS, {"prompt": "hi", "n": 4, "max_tokens": 20}) for _ in range(12)]
        responses = await asyncio.gather(*calls)
        refused = [response for response in responses if response.status_code != 200]
        assert refused
        assert len(refused) < 12
        for response in refused:
            check_error(response, 503, None, "queue_full")
            assert 1 <= int(response.headers["retry-after"]) <= 60
        await served.idle()


@asynchronous
async def test_every_wrong_key_of_a_bias_is_named_but_no_flood_of_them():
    async with serving() as served:
        for keys, shown in (
            (["one", "2", "two"], "'one', 'two'."),
            ([f"k{number}" for number in range(500)], "'k9', …."),
        ):
            response = await served.post(CHAT, {"messages": [USER], "logit_bias": dict.fromkeys(keys, 1)})
            message = check_error(response, 400, "logit_bias", "invalid_value")
            assert message.endswith(shown)
            assert len(message) < 200


@asynchronous
async def test_a_defect_is_a_500_that_says_nothing_and_hurts_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async with serving() as served:
        with monkeypatch.context() as patch:
            for method in ("token_text", "token_spelling"):
                patch.setattr(Tokenizer, method, lambda self, token_id: 1 / 0)
            check_error(await served.post(COMPLETIONS, {"prompt": "hi", "logprobs": 1}), 500, None, "internal_error")
            events = await served.events(COMPLETIONS, prompt="hi", logprobs=1)
            assert [event["error"]["reason"] for event in events] == ["internal_error"]
            response = await served.post("/tokenize", {"prompt": "hi", "return_token_strs": True})
            check_error(response, 500, None, "internal_error")
            assert "division" not in response.text
        assert caplog.text.count("ZeroDivisionError") == 3
        await served.complete(max_tokens=1)
        assert (await served.client.get("/health")).status_code == 200
        await served.idle()


@asynchronous
async def test_nothing_that_is_not_json_leaves_the_server():
    async with serving(runner=FakeRunner(logprob=float("-inf"))) as served:
        answer = await served.complete(max_tokens=2, logprobs=2)
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-9999.0, -9999.0]
        assert set(logprobs["top_logprobs"][0].values()) == {-9999.0}
        served.runner.logprob = float("nan")
        chat = await served.chat(max_tokens=1, logprobs=True, top_logprobs=1)
        assert chat["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
        json.dumps(chat, allow_nan=False)
