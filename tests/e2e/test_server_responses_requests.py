"""/v1/responses: how requests are read. Items become messages, refusals name fields, and what does nothing is named."""

from __future__ import annotations

import json
from typing import Any

from fakes import FakeRunner, asynchronous, saying, serving
from response_modes import LOGPROBS, OTHER, RESPONSES, TOOL, TOOLS, USER, ask, brief
from test_server_errors import check_error

from tpu_serve.config import ServerConfig
from tpu_serve.request import Request
from tpu_serve.server.responses import create_response

# The prompt is the messages themselves, and then the tools.
AS_JSON = "{{ messages | tojson }}{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def thought(role: str, content: str, text: str, **fields: Any) -> dict[str, Any]:
    return message(role, content, reasoning=text, reasoning_content=text, **fields)


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def call_item(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": json.dumps(arguments)}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
INPUTS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"input": "hi"}, [USER]),
    ({"input": "hi", "instructions": "Be short."}, [message("system", "Be short."), USER]),
    (
        {"input": [message("developer", "No."), USER], "instructions": "Be short."},
        [message("system", "Be short.\n\nNo."), USER],
    ),
    ({"input": [message("developer", "No."), USER]}, [message("system", "No."), USER]),
    ({"input": [USER, message("system", "No."), USER]}, [USER, message("system", "No."), USER]),
    (
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": x} for x in "ab"]}]},
        [message("user", "a\nb")],
    ),
    ({"input": [USER, REASONING, said("yes"), USER]}, [USER, thought("assistant", "yes", "hm"), USER]),
    ({"input": [USER, said("a"), said("b")]}, [USER, message("assistant", "a"), message("assistant", "b")]),
    (
        {"input": [USER, REASONING, said("I look."), call_item("c1", "f", id=1), call_item("c2", "g"), RESULT]},
        [
            USER,
            thought("assistant", "I look.", "hm", tool_calls=[call("c1", "f", id=1), call("c2", "g")]),
            message("tool", "42", tool_call_id="c1", name="f"),
        ],
    ),
    (
        {"input": [call_item("c1", "f"), RESULT, call_item("c2", "g"), {**RESULT, "call_id": "x", "output": []}]},
        [
            message("assistant", "", tool_calls=[call("c1", "f")]),
            message("tool", "42", tool_call_id="c1", name="f"),
            message("assistant", "", tool_calls=[call("c2", "g")]),
            message("tool", "", tool_call_id="x"),
        ],
    ),
    (
        {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, USER]},
        [thought("assistant", "", "s"), USER],
    ),
    (
        {"input": [call_item("c1", "f"), said("later")]},
        [message("assistant", "", tool_calls=[call("c1", "f")]), message("assistant", "later")],
    ),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None}, USER]}, [USER]),
    (
        {"input": [{**RESULT, "output": [{"type": "input_text", "text": "4"}, {"type": "output_text", "text": "2"}]}]},
        [message("tool", "4\n2", tool_call_id="c1")],
    ),
]


@asynchronous
async def test_items_become_the_messages_of_a_chat():
    prompts: list[str] = []

    def script(request: Request, index: int) -> int:
        prompts.append(bytes(request.prompt_token_ids).decode())
        return saying("ok")(request, index)

    options = {"max_model_len": 1000, "template": AS_JSON}
    async with serving(ServerConfig(tool_call_parser="hermes"), runner=FakeRunner(script=script), **options) as served:
        for fields, messages in INPUTS:
            assert brief(await ask(served, **fields)) == [("message", "ok")]
            assert json.loads(prompts[-1]) == messages
            # The same as a chat with these messages.
            texts = [{name: value for name, value in each.items() if name != "reasoning_content"} for each in messages]
            assert (await served.post("/v1/chat/completions", {"messages": texts})).status_code == 200
            assert json.loads(prompts[-1]) == messages
        await ask(served, tools=[TOOL])
        told = {name: value for name, value in TOOL.items() if name != "type"}
        assert json.loads("[" + prompts[-1].replace("][", "],[") + "]")[1] == [{"type": "function", "function": told}]
        await ask(served, reasoning={"effort": "none"})
        assert prompts[-1].endswith("]False")
        await ask(served, chat_template_kwargs={"enable_thinking": "maybe"})
        assert prompts[-1].endswith("]maybe")


@asynchronous
async def test_the_oldest_turns_of_an_input_that_is_too_long_are_dropped_when_asked():
    prompts: list[str] = []

    def script(request: Request, index: int) -> int:
        prompts.append(bytes(request.prompt_token_ids).decode())
        return saying("ok")(request, index)

    turns = [
        message("user", "a" * 60),
        call_item("c1", "f"),
        RESULT,
        message("user", "b" * 60),
        message("user", "c" * 60),
    ]
    config = ServerConfig(tool_call_parser="hermes")
    async with serving(config, runner=FakeRunner(script=script), template=AS_JSON) as served:
        body = {"input": turns, "instructions": "I"}
        response = await served.post(RESPONSES, body)
        shown = check_error(response, 400, "input", "context_length_exceeded")
        assert "maximum context length is 256 tokens" in shown
        assert (await served.post(RESPONSES, {**body, "truncation": "auto"})).status_code == 200
        assert [each["content"][:1] for each in json.loads(prompts[-1])] == ["I", "b", "c"]
        body["input"] = turns[1:3] + turns[4:]
        await ask(served, **body, truncation="auto")
        assert [each["content"][:1] for each in json.loads(prompts[-1])] == ["I", "c"], (
            "what a tool said went with its call"
        )
        await ask(served, input="hi", truncation="auto")
        turns = [message("user", "a" * 50), message("user", "b" * 50)]
        for choice, shown in (("none", ["a", "b"]), ("auto", ["b"])):  # only in the second case are tools in the prompt
            await ask(served, input=turns, truncation="auto", tools=[OTHER], tool_choice=choice)
            told = json.JSONDecoder().raw_decode(prompts[-1])[0]
            assert [each["content"][:1] for each in told] == shown
        response = await served.post(RESPONSES, {"input": "x" * 300, "truncation": "auto"})
        check_error(response, 400, "input", "context_length_exceeded")


REFUSALS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"input": None}, "input", "missing_field", "input is required."),
    ({"input": 5}, "input", "invalid_type", "input must be"),
    ({"input": []}, "input", "invalid_value", "at least one item"),
    ({"input": ["hi"]}, "input", "invalid_type", "input[0] must be an object"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "unsupported_parameter", "send the item itself"),
    ({"input": [{"type": "web_search_call"}]}, "input", "unsupported_parameter", "input[0].type = 'web_search_call'"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input", "invalid_value", "input[0].role must be user"),
    ({"input": [{"role": "user"}]}, "input", "invalid_type", "input[0].content must be a string or an array"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "unsupported_parameter",
        "input[0].content[0].type = 'input_image' is not supported: this server reads text only.",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input", "invalid_type", "input[0].call_id must be a string"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input", "invalid_type", "input[0].output must be"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter", "nothing is stored"),
    ({"conversation": "c"}, "conversation", "unsupported_parameter", "nothing is stored"),
    ({"background": True}, "background", "unsupported_parameter", "keep the connection open"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter", "send the text itself as input"),
    ({"messages": [USER]}, "messages", "unsupported_parameter", "it is called input here"),
    ({"max_tokens": 5}, "max_tokens", "unsupported_parameter", "it is called max_output_tokens here"),
    ({"response_format": {}}, "response_format", "unsupported_parameter", "it is called text.format here"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter", "it is called reasoning.effort here"),
    ({"n": 2}, "n", "unsupported_parameter", "one answer"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter", "no tools of its own"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value", "max_output_tokens must be at least 1, got 0."),
    ({"temperature": 3}, "temperature", "invalid_value", "temperature"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "needs message.output_text.logprobs in include"),
    ({"top_logprobs": 99, **LOGPROBS}, "top_logprobs", "invalid_value", "max allowed: 20"),
    ({"include": ["x"]}, "include", "unsupported_parameter", "got 'x'"),
    ({"truncation": "left"}, "truncation", "invalid_value", "truncation must be auto or disabled"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", "invalid_value", "0 or more"),
    ({"metadata": {"a": 1}}, "metadata", "invalid_type", "must be strings"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "invalid_value", "512"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value", "16 entries, got 17"),
    ({"reasoning": {"effort": "huge"}}, "reasoning", "invalid_value", "reasoning.effort must be one of none, "),
    ({"text": {"format": {"type": "xml"}}}, "text", "invalid_value", "text.format.type must be one of"),
    ({"text": {"format": {}}}, "text", "invalid_type", "text.format.type must be a string"),
    (
        {"text": {"format": {"type": "json_schema"}}},
        "text",
        "invalid_value",
        "text.format.schema must be a JSON schema",
    ),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
        "text",
        "invalid_grammar",
        "text",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter", "tools[0].type = 'web_search'"),
    ({"tools": [{"type": "function"}]}, "tools", "invalid_type", "tools[0].name must be a non-empty string"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "invalid_value", "beside its type"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value", "`tools` must be set"),
    ({**TOOLS, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice", "tool_not_found", "'h'"),
    ({**TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value", "tool_choice.name must be"),
    ({**TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice", "unsupported_parameter", "tool_choice.type = 'mcp'"),
]


@asynchronous
async def test_refusals_name_the_field_as_it_was_sent():
    async with serving(ServerConfig(tool_call_parser="hermes")) as served:
        for fields, param, reason, words in REFUSALS:
            for stream in (False, True):
                response = await served.post(RESPONSES, {"input": "hi", "stream": stream, **fields})
                shown = check_error(response, 400, param, reason)
                assert words in shown, shown
                assert "messages[" not in shown
        check_error(await served.post(RESPONSES, {"input": "hi", "model": "nobody"}), 404, "model", "model_not_found")
        await served.idle()


@asynchronous
async def test_what_has_no_effect_is_named():
    fields = {
        "oops": 1,
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "tools": [{**TOOL, "defer_loading": True}],
        "background": False,
        "stream_options": {"include_obfuscation": False},
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "service_tier": "auto",
    }
    async with serving(ServerConfig(tool_call_parser="hermes")) as served:
        for stream in (False, True):
            response = await served.post(RESPONSES, {"input": "hi", "stream": stream, "max_output_tokens": 2, **fields})
            assert response.status_code == 200
            named = (
                "oops,include.reasoning.encrypted_content,text.verbosity,reasoning.summary,tools.defer_loading,tools"
            )
            assert response.headers["x-tpu-serve-ignored"] == named
        reply = await create_response({"input": "hi", "max_output_tokens": 2, "oops": 1}, served.state.service)
        assert reply["ignored_fields"] == ["oops"]
    async with serving(ServerConfig(strict_fields=True)) as served:
        check_error(await served.post(RESPONSES, {"input": "hi", "oops": 1}), 400, "oops", "unknown_field")
        assert (await served.post(RESPONSES, {"input": "hi", "user": "x", "metadata": {"a": "b"}})).status_code == 200
