"""Reasoning told from the answer, and what requests may say about it."""

from __future__ import annotations

from typing import Any

import pytest
from chat_modes import CHAT, USER, ask, ask_one
from fakes import END, TEMPLATE, FakeRunner, asynchronous, saying, serving

from tpu_serve.config import ConfigError, ServerConfig
from tpu_serve.constraint.masks import is_allowed
from tpu_serve.request import Request
from tpu_serve.scheduler.step import SampledToken

QWEN = ServerConfig(reasoning_parser="qwen3", tool_call_parser="hermes")
HYBRID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Thinks when it likes, unless it must not."""
THINKER = TEMPLATE.replace("{% if enable_thinking %}<think>{% endif %}", "<think>\n")
"""Is made to think."""


CASES: dict[str, list[tuple[str, dict[str, Any], Any]]] = {
    HYBRID: [
        ("<think>\na\n</think>\n\nb", {}, ("b", "a", [], "stop")),
        ("hi", {}, ("hi", None, [], "stop")),
        ("hi", {"chat_template_kwargs": {"enable_thinking": False}}, ("hi", None, [], "stop")),
        ("hi", {"reasoning_effort": "none"}, ("hi", None, [], "stop")),
        ("", {}, ("", None, [], "stop")),
        ("<think>a</think>b", {"chat_template_kwargs": {"enable_thinking": False}}, ("<think>a</think>b", None, [], "stop")),
        ("<think>a</think>b", {"include_reasoning": False}, ("b", None, [], "stop")),
        ("<think>a", {"include_reasoning": False}, (None, None, [], "stop")),
        ("<think>é😀 a", {}, (None, "é😀 a", [], "stop")),
        ("<think>a song\n", {"stop": "song"}, (None, "a ", [], "stop")),
        ("<think>a</think>b song", {"stop": "song"}, ("b ", "a", [], "stop")),
        ("<think>abcdef", {"max_tokens": 10}, (None, "abc", [], "length")),
    ],
    THINKER: [
        ("a</think>b", {}, ("b", "a", [], "stop")),
        ("a", {}, (None, "a", [], "stop")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("template", [HYBRID, THINKER])
@asynchronous
async def test_reasoning_is_told_from_the_answer(interval: int, template: str):
    async with serving(ServerConfig(stream_interval=interval), template=template) as served:
        for text, fields, expected in CASES[template]:
            served.runner.script = saying(text)
            assert await ask_one(served, **fields) == expected, text


@asynchronous
async def test_without_a_parser_reasoning_is_text():
    config = ServerConfig(reasoning_parser="none")
    async with serving(config, runner=FakeRunner(script=saying("<think>a</think>b"))) as served:
        (choice,) = await ask(served)
        assert choice["message"]["content"] == "<think>a</think>b"
        assert "completion_tokens_details" not in choice["usage"]


@pytest.mark.parametrize(
    ("template", "text", "num_reasoning"),
    [(THINKER, "abc</think>de", 11), (THINKER, "abc", 4), (HYBRID, "hello", 0), (HYBRID, "é</think>", 0)],
)
@asynchronous
async def test_tokens_of_reasoning_are_counted(template: str, text: str, num_reasoning: int):
    async with serving(runner=FakeRunner(script=saying(text)), template=template) as served:
        (choice,) = await ask(served)
        assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
        assert choice["usage"]["completion_tokens"] == len(text.encode()) + 1


@asynchronous
async def test_a_call_that_ends_a_thought_is_not_counted():
    thought, call = "hm<tool_call>\n{", '"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serving(QWEN, runner=FakeRunner(script=saying(thought + call)), template=THINKER) as served:
        (choice,) = await ask(served, tools=tools)
        assert choice["message"]["reasoning"] == "hm"
        assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(thought)}


@asynchronous
async def test_reasoning_under_one_name_only():
    config = ServerConfig(reasoning_content=False)
    async with serving(config, runner=FakeRunner(script=saying("<think>a</think>b"))) as served:
        message = (await served.chat())["choices"][0]["message"]
        assert (message["reasoning"], message["reasoning_content"]) == ("a", None)
        chunks = await served.events(CHAT, messages=USER)
        assert all("reasoning_content" not in choice["delta"] for chunk in chunks for choice in chunk["choices"])


@asynchronous
async def test_a_budget_ends_reasoning():
    """The fake model knows no constraint: it has to guess what it may say, and the request fails where it guesses wrongly."""
    for text, fields, expected in (
        ("abc</think>yes", {"thinking_token_budget": 3}, ("yes", "abc")),
        ("a</think>yes", {"thinking_token_budget": 3}, ("yes", "a")),
        ("</think>yes", {"thinking_token_budget": 0}, ("yes", None)),
        ("abcdef</think>yes", {"thinking_token_budget": -1}, ("yes", "abcdef")),
    ):
        async with serving(runner=FakeRunner(script=saying(text)), template=THINKER) as served:
            assert (await ask_one(served, **fields))[:2] == expected
    async with serving(runner=FakeRunner(script=saying("abcd</think>yes")), template=THINKER) as served:
        response = await served.post(CHAT, {"messages": USER, "thinking_token_budget": 3})
        assert response.status_code == 500
    async with serving(ServerConfig(reasoning_parser="none")) as served:
        response = await served.post(CHAT, {"messages": USER, "thinking_token_budget": 3})
        assert response.json()["error"]["param"] == "thinking_token_budget"


@asynchronous
async def test_a_form_holds_after_reasoning():
    form = {"type": "json_object"}
    for template, text, expected in (
        (THINKER, 'no JSON</think>{"a":1}', ('{"a":1}', "no JSON")),
        (HYBRID, '<think>no JSON</think>{"a":1}', ('{"a":1}', "no JSON")),
        (HYBRID, '{"a":1}', ('{"a":1}', None)),
    ):
        async with serving(runner=FakeRunner(script=saying(text)), template=template) as served:
            assert (await ask_one(served, response_format=form))[:2] == expected
    async with serving(runner=FakeRunner(script=saying("x</think>no JSON")), template=THINKER) as served:
        assert (await served.post(CHAT, {"messages": USER, "response_format": form})).status_code == 500
    async with serving(runner=FakeRunner(script=saying("no JSON")), template=HYBRID) as served:
        off = {"reasoning_effort": "none"}
        assert (await served.post(CHAT, {"messages": USER, "response_format": form, **off})).status_code == 500


@asynchronous
async def test_a_form_holds_at_once_where_the_prompt_has_ended_the_reasoning():
    """Whatever the parser takes for granted without a prompt that says so."""
    template = HYBRID + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}"
    form = {"type": "json_object"}
    for parser in ("deepseek_r1", "qwen3"):
        config = ServerConfig(reasoning_parser=parser)
        async with serving(config, runner=FakeRunner(script=saying('{"a":1}')), template=template) as served:
            assert (await ask_one(served, response_format=form))[:2] == ('{"a":1}', None)
        async with serving(config, runner=FakeRunner(script=saying("no JSON")), template=template) as served:
            assert (await served.post(CHAT, {"messages": USER, "response_format": form})).status_code == 500


@asynchronous
async def test_a_call_that_is_forced_does_not_begin_in_the_middle_of_a_thought():
    """The parser would end the thought there, and the constraint would not."""
    specials = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
    template = TEMPLATE.replace("<think>", "<|channel>thought\n")
    config = ServerConfig(reasoning_parser="gemma4", tool_call_parser="gemma4")
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"tools": tools, "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": True}}
    masks = []

    class Runner(FakeRunner):
        def _sample(self, item: Any) -> SampledToken | None:
            masks.append(item.sequence.constraint.mask)
            return super()._sample(item)

    runner = Runner(script=saying("hm", 262, 258, "call:f{}", 259))
    async with serving(config, runner=runner, specials=specials, template=template) as served:
        answer = await served.chat(**fields)
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert not is_allowed(masks[0], 258)
        assert not is_allowed(masks[0], END)
        assert is_allowed(masks[0], 262)
        assert is_allowed(masks[0], ord("a"))


def reading(seen: list[str]) -> Any:
    def script(request: Request, index: int) -> int:
        if index == 0:
            seen.append(bytes(token for token in request.prompt_token_ids if token < 256).decode())
        return END

    return script


@asynchronous
async def test_variables_of_the_template():
    seen: list[str] = []
    template = "{{ enable_thinking }} {{ reasoning_effort }} {{ style }} {{ documents[0].text if documents }}"
    config = ServerConfig(default_chat_template_kwargs={"style": "plain", "enable_thinking": True})
    async with serving(config, runner=FakeRunner(script=reading(seen)), template=template) as served:
        for fields, expected in (
            ({}, "True  plain "),
            ({"chat_template_kwargs": {"style": "grand"}}, "True  grand "),
            ({"reasoning_effort": "none"}, "False none plain "),
            ({"reasoning_effort": "high"}, "True high plain "),
            ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "False high plain "),
            ({"documents": [{"text": "d"}]}, "True  plain d"),
        ):
            await served.chat(**fields)
            assert seen.pop() == expected
    async with serving(runner=FakeRunner(script=reading(seen)), template="x") as served:
        body = {
            "messages": USER,
            "reasoning_effort": "low",
            "documents": [{"text": "d"}],
            "chat_template_kwargs": {"a": 1},
        }
        response = await served.post(CHAT, body)
        assert response.headers["x-tpu-serve-ignored"] == "chat_template_kwargs.a,reasoning_effort,documents"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "self"])
@asynchronous
async def test_the_server_has_no_default_for_what_requests_say(name: str):
    with pytest.raises(ConfigError, match=f"--default-chat-template-kwargs cannot set {name}"):
        async with serving(ServerConfig(default_chat_template_kwargs={name: False})):
            pass


@asynchronous
async def test_a_request_may_bring_a_template_where_it_is_trusted():
    seen: list[str] = []
    config = ServerConfig(trust_request_chat_template=True)
    async with serving(config, runner=FakeRunner(script=reading(seen)), template=None) as served:
        await served.chat(chat_template="<{{ messages[0].content }}>")
        assert seen == ["<hi>"]
        response = await served.post(CHAT, {"messages": USER, "chat_template": "{% if %}"})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["reason"]) == (400, "chat_template", "invalid_template")
        assert (await served.post(CHAT, {"messages": USER})).json()["error"]["reason"] == "no_chat_template"


@asynchronous
async def test_echo_and_a_final_message_that_goes_on():
    seen: list[str] = []
    messages = [*USER, {"role": "assistant", "content": "OK! \n"}]
    for text in (" yes", "\n\nyes"):
        async with serving(runner=FakeRunner(script=saying(text)), template=HYBRID) as served:
            fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
            assert (await ask_one(served, **fields))[0] == text
            assert (await ask_one(served, **fields, echo=True))[0] == "OK! \n" + text
    async with serving(runner=FakeRunner(script=reading(seen)), template=HYBRID) as served:
        await served.post(CHAT, {**fields, "max_tokens": 1})
        assert seen == ["user\nhi\nassistant\nOK! \n"]


@asynchronous
async def test_the_prompt_can_be_shown():
    async with serving(runner=FakeRunner(script=saying("a")), template=HYBRID) as served:
        answer = await served.chat(return_prompt_text=True)
        assert answer["prompt_text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
