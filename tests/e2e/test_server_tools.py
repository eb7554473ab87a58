"""Calls of tools: what requests may ask, what is read from what the model says, and what a forced call looks like."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from chat_modes import CHAT, USER, ask, ask_one, function
from fakes import END, FakeRunner, asynchronous, live_server, saying, serving

from tpu_serve.config import ServerConfig
from tpu_serve.request import Request

HERMES = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
XML = ServerConfig(tool_call_parser="qwen3_coder", reasoning_parser="qwen3")
GEMMA = ServerConfig(tool_call_parser="gemma4", reasoning_parser="gemma4")
TOOLS = [function("f", id={"type": "integer"}), function("g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"id": 42}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
F, G = ("f", '{"id": 42}'), ("g", "{}")
THOUGHTS = ("<think>", "</think>", "<|channel>", "<channel|>")
"""Marks that are one token each, from id 258 on, as in real vocabularies: it tells them from a call at the first token."""
NAMED = {"type": "function", "function": {"name": "f"}}


CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("hi", {}, ("hi", None, [], "stop")),
    (CALL, {}, (None, None, [F], "tool_calls")),
    ("I look.\n" + CALL, {}, ("I look.", None, [F], "tool_calls")),
    (CALL + "\n" + OTHER, {}, (None, None, [F, G], "tool_calls")),
    (CALL + "\n" + OTHER, {"parallel_tool_calls": False}, (None, None, [F], "tool_calls")),
    ("<think>hm</think>\n\n" + CALL, {}, (None, "hm", [F], "tool_calls")),
    ("<think>hm</think>\n\n" + CALL, {"include_reasoning": False}, (None, None, [F], "tool_calls")),
    (CALL, {"tool_choice": "none"}, (CALL, None, [], "stop")),
    (CALL, {"tool_choice": "auto"}, (None, None, [F], "tool_calls")),
    (CALL, {"tools": None}, (CALL, None, [], "stop")),
    ("<tool_call>\nno call", {}, ("<tool_call>\nno call", None, [], "stop")),
    (CALL, {"max_tokens": 45}, (None, None, [("f", '{"id":')], "length")),
    (CALL, {"max_tokens": 14}, ('<tool_call>\n{"', None, [], "length")),
    ("hello <tool_cSTOP", {"stop": "STOP"}, ("hello <tool_c", None, [], "stop")),
    ("hello <tool_cSTOP", {"stop": "STOP", "tools": None}, ("hello <tool_c", None, [], "stop")),
]


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@asynchronous
async def test_calls_are_read(interval: int):
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3", stream_interval=interval)
    async with serving(config) as served:
        for text, fields, expected in CASES:
            served.runner.script = saying(text)
            assert await ask_one(served, **{"tools": TOOLS, **fields}) == expected, text


@asynchronous
async def test_arguments_with_objects_and_characters_of_several_bytes():
    arguments = json.dumps({"numbers": [{"a": 1}], "s": 'é😀 "} </tool_call>'}, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    async with serving(HERMES, runner=FakeRunner(script=saying(text))) as served:
        assert await ask_one(served, tools=TOOLS) == (None, None, [("f", arguments)], "tool_calls")


@asynchronous
async def test_arguments_of_tags_have_the_types_of_the_schema():
    text = "<tool_call>\n<function=f>\n<parameter=id>\n42\n</parameter>\n<parameter=x>\n42\n</parameter>\n</function>\n</tool_call>"
    async with serving(XML, runner=FakeRunner(script=saying(text))) as served:
        assert await ask_one(served, tools=TOOLS) == (None, None, [("f", '{"id":42,"x":"42"}')], "tool_calls")


@asynchronous
async def test_marks_that_are_special_tokens_are_seen_but_not_shown():
    specials = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
    start, end, quote, channel, channel_end = range(258, 263)
    script = saying(
        channel, "thought\nhm", channel_end, start, "call:todo{content:", quote, "Buy <|milk", quote, "}", end
    )
    async with serving(GEMMA, runner=FakeRunner(script=script), specials=specials) as served:
        expected = (None, "hm", [("todo", '{"content":"Buy <|milk"}')], "tool_calls")
        assert await ask_one(served, tools=TOOLS) == expected
        content, reasoning, calls, _ = await ask_one(served)
        assert (content, reasoning, calls) == ("call:todo{content:Buy <|milk}", "hm", [])


@pytest.mark.parametrize(
    ("config", "text", "call"),
    [
        (HERMES, CALL, ("f", '{"id": 42}')),
        (
            XML,
            "<tool_call>\n<function=f>\n<parameter=id>\n42\n</parameter>\n</function>\n</tool_call>",
            ("f", '{"id":42}'),
        ),
        (GEMMA, "<|tool_call>call:f{id:42}<tool_call|>", ("f", '{"id":42}')),
        (ServerConfig(reasoning_parser="none"), '[{"name": "f", "parameters": {"id": 42}}]', ("f", '{"id": 42}')),
        (
            ServerConfig(reasoning_parser="harmony", tool_call_parser="harmony"),
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"id": 42}',
            ("f", '{"id": 42}'),
        ),
    ],
)
@asynchronous
async def test_a_forced_call_is_one_that_can_be_read(config: ServerConfig, text: str, call: tuple[str, str]):
    """The script is held against the grammar token by token: a wrong one fails the request."""
    async with serving(config, runner=FakeRunner(script=saying(text)), specials=THOUGHTS) as served:
        for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
            assert await ask_one(served, tools=TOOLS, tool_choice=choice) == (None, None, [call], reason)
        form = {"type": "json_object"}
        answer = await ask_one(served, tools=TOOLS, tool_choice="required", response_format=form)
        assert answer == (None, None, [call], "tool_calls")
        response = await served.post(CHAT, {"messages": USER, "tools": TOOLS[1:], "tool_choice": "required"})
        assert response.status_code == 500, "the grammar allows a function that is not one of the tools"


@asynchronous
async def test_a_forced_call_may_be_thought_about():
    for script in (saying(258, "\nhm\n", 259, CALL), saying(CALL)):
        async with serving(HERMES, runner=FakeRunner(script=script), specials=THOUGHTS) as served:
            _, _, calls, reason = await ask_one(served, tools=TOOLS, tool_choice="required")
            assert (calls, reason) == ([F], "tool_calls")


@asynchronous
async def test_a_form_of_the_content_leaves_calls_possible():
    """The start of a call is one token there, as it is in real vocabularies."""
    specials = ("<tool_call>", "</tool_call>")
    call = saying(258, '\n{"name": "f", "arguments": {"id": 42}}\n', 259)
    for script, expected in (
        (call, (None, None, [F], "tool_calls")),
        (saying('{"a":1}'), ('{"a":1}', None, [], "stop")),
        (saying("<think>", "x</think>", '{"a":1}'), ('{"a":1}', "x", [], "stop")),
    ):
        async with serving(HERMES, runner=FakeRunner(script=script), specials=specials) as served:
            assert await ask_one(served, tools=TOOLS, response_format={"type": "json_object"}) == expected
    async with serving(HERMES, runner=FakeRunner(script=saying("no JSON")), specials=specials) as served:
        body = {"messages": USER, "tools": TOOLS, "response_format": {"type": "json_object"}}
        assert (await served.post(CHAT, body)).status_code == 500


@asynchronous
async def test_a_script_is_said_even_where_a_call_is_forced():
    config = ServerConfig(tool_call_parser="hermes", enable_scripted_output=True)
    async with serving(config) as served:
        script = list(b"plain")
        for choice in ("required", NAMED):
            answer = await ask_one(served, tools=TOOLS, tool_choice=choice, scripted_token_ids=script)
            assert answer == ("plain", None, [], "stop")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": []}, "tools", "at least one"),
    ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools", "parameters"),
    *(({"tools": [function(name)]}, "tools", "letters, digits") for name in ("a b", "f>g", "\u00e4", "x" * 129)),
    ({"tools": ["f"]}, "tools", "object"),
    ({"tool_choice": "auto"}, "tool_choice", "tools"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tool_choice": NAMED}, "tool_choice", "tools"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "required"),
    ({"tools": TOOLS, "tool_choice": 3}, "tool_choice", "required"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "'h'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "name"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "type"),
    ({"tools": [function("f", a={"type": "nothing"})], "tool_choice": "required"}, "tools", "tools"),
    ({"functions": TOOLS}, "functions", "tools"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "minimal"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", "-1"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "--trust-request-chat-template"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages", "text"),
    ({"messages": [{"role": "tool"}]}, "messages", "content"),
]  # fmt: skip


@asynchronous
async def test_what_is_refused():
    async with serving(HERMES) as served:
        for fields, param, words in REFUSED:
            response = await served.post(CHAT, {"messages": USER, **fields})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert words in error["message"]


@asynchronous
async def test_tool_choice_none_needs_no_tools():
    async with serving(HERMES, runner=FakeRunner(script=saying("a"))) as served:
        assert (await ask_one(served, tool_choice="none"))[0] == "a"


@asynchronous
async def test_the_model_must_not_be_left_a_choice_that_cannot_be_read():
    for config, words in (
        (ServerConfig(), "--tool-call-parser"),
        (ServerConfig(tool_call_parser="hermes", enable_auto_tool_choice=False), "--no-enable-auto-tool-choice"),
    ):
        async with serving(config) as served:
            for fields in ({}, {"tool_choice": "auto"}):
                response = await served.post(CHAT, {"messages": USER, "tools": TOOLS, **fields})
                assert response.status_code == 400
                assert words in response.json()["error"]["message"]


TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments.id }}){% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n<tool_call>"
)


@asynchronous
async def test_the_template_sees_tools_calls_and_their_results():
    seen: list[str] = []

    def script(request: Request, index: int) -> int:
        if index == 0:
            seen.append("".join(chr(token) for token in request.prompt_token_ids if token < 256))
        return END

    messages = [
        {"role": "developer", "content": "be brief"},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"id": 42}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]  # fmt: skip
    async with serving(runner=FakeRunner(script=script), template=TEMPLATE) as served:
        response = await served.post(CHAT, {"messages": messages, "tools": TOOLS})
        assert response.status_code == 200, response.text
        assert seen[0].startswith("[f][g]system\nbe brief\nuser\nhi\nassistant\n(f 42)\ntool\ndone\n")
        tokenized = await served.post("/tokenize", {"messages": USER, "tools": TOOLS})
        without = await served.post("/tokenize", {"messages": USER})
        assert tokenized.json()["count"] == without.json()["count"] + len("[f][g]")
        await served.post(CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "none"})
        assert "[f]" not in seen[1]
        assert response.headers.get("x-tpu-serve-ignored") is None


@asynchronous
async def test_tools_that_the_template_does_not_show_are_reported():
    async with serving(HERMES) as served:
        response = await served.post(CHAT, {"messages": USER, "tools": TOOLS, "max_tokens": 1})
        assert response.headers["x-tpu-serve-ignored"] == "tools"


@asynchronous
async def test_several_choices_and_log_probabilities():
    def script(request: Request, index: int) -> int:
        return saying(CALL if request.choice else "hi")(request, index)

    async with serving(HERMES, runner=FakeRunner(script=script)) as served:
        choices = await ask(served, tools=TOOLS, n=2)
        assert [choice["finish_reason"] for choice in choices] == ["stop", "tool_calls"]
        body = {"messages": USER, "tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 1}
        whole = (await served.post(CHAT, body)).json()
        tokens: dict[int, list[Any]] = {0: [], 1: []}
        for chunk in await served.events(CHAT, **body):
            for part in chunk["choices"]:
                tokens[part["index"]] += (part["logprobs"] or {}).get("content", [])
        for choice in whole["choices"]:
            assert tokens[choice["index"]] == choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in tokens[1]) == CALL + "<|im_end|>"


@asynchronous
async def test_usage_on_every_chunk_counts_up():
    async with serving(HERMES, runner=FakeRunner(script=saying("<think>ab</think>x" + CALL))) as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await served.events(CHAT, messages=USER, tools=TOOLS, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        reasoning = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert reasoning == sorted(reasoning)
        assert (counts[0], counts[-1]) == (0, len("<think>ab</think>x" + CALL) + 1)


@asynchronous
async def test_the_model_card_says_how_answers_are_read():
    async with serving(HERMES) as served:
        card = (await served.client.get("/v1/models")).json()["data"][0]
        assert (card["reasoning_parser"], card["tool_call_parser"]) == ("qwen3", "hermes")
    async with serving(ServerConfig(reasoning_parser="none")) as served:
        card = (await served.client.get("/v1/models")).json()["data"][0]
        assert (card["reasoning_parser"], card["tool_call_parser"]) == (None, None)


def test_the_openai_client_runs_a_tool():
    with live_server(
        runner=FakeRunner(script=saying("ok " + CALL)),
        template=TEMPLATE.removesuffix("<tool_call>") + "{# <tool_call> #}",
    ) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
        answer = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)  # type: ignore[arg-type]
        (call,) = answer.choices[0].message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"id": 42})  # type: ignore[union-attr]
        assert answer.choices[0].finish_reason == "tool_calls"
        follow_up = [*USER, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        assert client.chat.completions.create(model="tiny", messages=follow_up, tools=TOOLS).choices  # type: ignore[arg-type]
        with client.chat.completions.stream(model="tiny", messages=USER, tools=TOOLS) as stream:  # type: ignore[arg-type]
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        (streamed,) = final.choices[0].message.tool_calls or []
        assert json.loads(streamed.function.arguments) == {"id": 42}
        assert final.choices[0].message.content == "ok"
