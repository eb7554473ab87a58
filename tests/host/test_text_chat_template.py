"""Chat templates: the embedded model's against transformers' output, and what may go wrong."""

import json
import re

import pytest

from tpu_serve.config import EMBEDDED_MODEL, ConfigError
from tpu_serve.request import InvalidRequest
from tpu_serve.text.chat_template import RENDER_ARGUMENTS, ChatTemplate
from tpu_serve.text.tokenizer import Tokenizer

EMBEDDED = ChatTemplate.load(Tokenizer.load(EMBEDDED_MODEL))

USER = {"role": "user", "content": "Hi é😀"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather <now> & "here"',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Stadt, z. B. Köln"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"K\\u00f6ln","days":2}'},
}
TOOL_SYSTEM = (
    "# Tools\n\nFunction signatures are inside <tools></tools>:\n<tools>\n"
    '{"type": "function", "function": {"name": "get_weather", "description": "Weather <now> & \\"here\\"", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string", "description": "Stadt, z. B. Köln"}}, "required": ["city"]}}}'
    '\n</tools>\n\nTo call one, answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
)
TOOL_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'

# Expected strings: apply_chat_template of transformers 5.24.0 (arguments of tool calls given to it as mappings).
GOLDENS = {
    "a user": ([USER], {}, "<|im_start|>user\nHi é😀<|im_end|>\n<|im_start|>assistant\n"),
    "a system turn, no generation prompt": (
        [SYSTEM, USER],
        {"add_generation_prompt": False},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi é😀<|im_end|>\n",
    ),
    "thinking off": (
        [SYSTEM, USER],
        {"enable_thinking": False},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi é😀<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "thinking on": (
        [USER],
        {"enable_thinking": True},
        "<|im_start|>user\nHi é😀<|im_end|>\n<|im_start|>assistant\n",
    ),
    "earlier reasoning": (
        [USER, {"role": "assistant", "content": "4", "reasoning": "2+2"}, {"role": "user", "content": "sure? "}],
        {},
        "<|im_start|>user\nHi é😀<|im_end|>\n<|im_start|>assistant\n<think>\n2+2\n</think>\n\n4<|im_end|>\n"
        "<|im_start|>user\nsure? <|im_end|>\n<|im_start|>assistant\n",
    ),
    "tools": (
        [SYSTEM, USER],
        {"tools": TOOLS},
        "<|im_start|>system\nBe brief.\n\n"
        + TOOL_SYSTEM
        + "<|im_start|>user\nHi é😀<|im_end|>\n<|im_start|>assistant\n",
    ),
    "tool results": (
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "18 °C"},
            {"role": "tool", "tool_call_id": "call_2", "content": "19 °C"},
            {"role": "assistant", "content": "Warm.\n", "tool_calls": []},
        ],
        {"tools": TOOLS},
        "<|im_start|>system\n"
        + TOOL_SYSTEM
        + "<|im_start|>user\nHi é😀<|im_end|>\n<|im_start|>assistant\n"
        + TOOL_CALL
        + "\n"
        + TOOL_CALL
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\n18 °C\n</tool_response>\n"
        "<tool_response>\n19 °C\n</tool_response><|im_end|>\n<|im_start|>assistant\nWarm.\n<|im_end|>\n<|im_start|>assistant\n",
    ),
    "continued": (
        [USER, {"role": "assistant", "content": "OK!\n"}],
        {"add_generation_prompt": False, "continue_final_message": True},
        "<|im_start|>user\nHi é😀<|im_end|>\n<|im_start|>assistant\nOK!\n",
    ),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_embedded_template_renders_as_in_transformers(name):
    messages, options, expected = GOLDENS[name]
    before = json.dumps(messages)
    assert EMBEDDED.render(messages, **options) == expected
    assert json.dumps(messages) == before  # the caller's messages are not touched


def render(source, messages=(USER,), /, **options) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


@pytest.mark.parametrize("content", ["OK!\n", "OK! ", " OK!\n\n", "", "a<|im_end|>\nb"])
@pytest.mark.parametrize("shown", ["m.content", "m.content | trim"])
def test_a_continued_message_ends_the_prompt_exactly(content, shown):
    source = "{{ add_generation_prompt }}{% for m in messages %}[{{ " + shown + " }}]\n{% endfor %}!"
    text = render(source, [USER, {"role": "assistant", "content": content}], continue_final_message=True)
    assert text == "False[Hi é😀]\n[" + (content.lstrip() if "trim" in shown else content)


def test_a_message_that_cannot_be_continued_is_refused():
    assistant = {"role": "assistant", "content": "OK"}
    for source, messages in (
        ("{{ messages[0].content }}", [USER, assistant]),
        ("{{ messages | length }}", []),
        ("{{ messages | length }}", [USER, {"role": "assistant", "tool_calls": [CALL]}]),
    ):
        with pytest.raises(InvalidRequest, match="final message"):
            render(source, messages, continue_final_message=True)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, r"messages\[1\]\.content\[0\] has type 'image_url'"),
        ({"type": "text"}, "must have its text"),
        ("text", "must be an object"),
    ],
)
def test_other_parts_are_refused(part, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        render("", [USER, {"role": "user", "content": [part]}])
    assert caught.value.param == "messages"


def test_tool_arguments_are_mappings_when_they_can_be():
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a if a is string else a | items | list }}"
    for arguments, expected in (('{"x": 1}', "[('x', 1)]"), ("{x", "{x"), ("[1]", "[1]"), ({"x": 2}, "[('x', 2)]")):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        assert render(source, [message]) == expected


@pytest.mark.parametrize("calls", [5, "x", {"a": 1}, True])
def test_tool_calls_that_are_no_array_are_refused(calls):
    with pytest.raises(InvalidRequest, match="tool_calls"):
        render("x", [{"role": "assistant", "content": "x", "tool_calls": calls}])


def test_tool_arguments_nested_too_deeply_stay_text():
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    assert (
        render(
            "{{ messages[0].tool_calls[0].function.arguments | length }}",
            [{"role": "assistant", "content": "", "tool_calls": [call]}],
        )
        == "100000"
    )


def test_null_fields_are_absent():
    assert render("{{ messages[0].content is defined }}", [{"role": "assistant", "content": None}]) == "False"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{{ {'b': '<é&>', 'a': none} | tojson }}", '{"b": "<é&>", "a": null}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true) }}", '{"a": "\\u00e9", "b": 1}'),
        ("{{ [1, 2] | tojson(indent=1) }}{{ [1, 2] | tojson(separators=(',', ':')) }}", "[\n 1,\n 2\n][1,2]"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        (
            "{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ messages[::-1][0].role.startswith('u') }}",
            "2True",
        ),
        ("{{ tools is none }}{{ documents is none }}{{ custom }}", "TrueTrueyes"),
    ],
)
def test_environment(source, expected):
    assert render(source, custom="yes") == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate & so on.') }}", "^Roles must alternate & so on.$"),
        ("{{ messages[0].name.first }}", "cannot render.*has no attribute 'name'"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ 1 // 0 }}", "cannot render"),
        ("{{ nothing | tojson }}", "cannot render"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render.*unsafe"),
        ("{{ ''['__class__']['__mro__'] }}", "cannot render.*unsafe"),
        ("{{ messages.append(1) }}", "cannot render.*unsafe"),
        ("{{ range(10 ** 9) | list }}", "cannot render.*[Rr]ange"),
        ("{% include 'secrets' %}", "cannot render"),
    ],
)
def test_failures_of_a_template_are_the_requests(source, words):
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert re.search(words, str(caught.value), re.DOTALL)


def test_messages_must_be_objects():
    with pytest.raises(InvalidRequest, match=r"messages\[0\] must be an object"):
        render("", ["hello"])


def test_wrong_templates_are_configuration_errors():
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})
    with pytest.raises(ConfigError, match="No filter named 'nonsense'"):
        ChatTemplate("{{ 1 | nonsense }}", {})
    with pytest.raises(ConfigError, match="named default"):
        ChatTemplate({"rag": ""}, {})


def test_named_templates():
    source = {"default": "plain", "tool_use": "tools {{ tool_style }}"}
    assert render(source) == render(source, tools=[]) == "plain"
    assert render(source, tools=TOOLS) == "tools "
    assert ChatTemplate(source, {}).variables == {"tool_style"}
    assert render({"default": "plain"}, tools=TOOLS) == "plain"


def test_a_developer_is_the_system_where_the_template_knows_none():
    messages = [{"role": "developer", "content": "a"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages) == "developer"
    assert messages == [{"role": "developer", "content": "a"}]


def test_variables_name_what_the_template_looks_up():
    source = "{% set ns = namespace(n=own) %}{{ raise_exception(strftime_now(bos_token)) }}{% for x in range(2) %}{{ x }}{% endfor %}"
    assert ChatTemplate(source, {}).variables == {"own", "bos_token"}
    assert EMBEDDED.variables == {"messages", "tools", "add_generation_prompt", "enable_thinking"}
    assert {"messages", "tools", "add_generation_prompt"} < RENDER_ARGUMENTS


def test_an_override_file_replaces_the_tokenizers_template(tmp_path):
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    file = tmp_path / "own.jinja"
    with pytest.raises(ConfigError, match=r"own\.jinja cannot be read"):
        ChatTemplate.load(tokenizer, file)
    file.write_text("{{ eos_token }}")
    assert ChatTemplate.load(tokenizer, file).render([USER]) == "<|im_end|>"


def test_a_tokenizer_may_have_no_template():
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    tokenizer.chat_template_source = None
    assert ChatTemplate.load(tokenizer) is None
