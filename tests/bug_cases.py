"""Requests that brought other servers down or made them say something wrong, each with the answer that is right.

`number` is the row of `public_bugs.PUBLIC_BUGS`. A script is what the model says, token by token: a text that is one of PIECES or of the server's
marks is that one token, any other text is one token per byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chat_modes import function
from fakes import TEMPLATE, VOCAB_SIZE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
PIECES = ("ABC", "DEF", "HI", " Alice", " N", " O", " P", " Q", '[{"', "}\n", "?\n")
"""Tokens of several letters, for what begins or ends inside them."""
GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>')
HYBRID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
THINKER = TEMPLATE.replace("{% if enable_thinking %}<think>{% endif %}", "<think>\n")
SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen": ({"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}, {"template": HYBRID, "pieces": PIECES}),
    "thinker": ({"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}, {"template": THINKER}),
    "gemma": ({"reasoning_parser": "gemma4", "tool_call_parser": "gemma4"}, {"specials": GEMMA_MARKS}),
    **{
        f"every {interval} tokens": (
            {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "stream_interval": interval},
            {"template": HYBRID, "pieces": PIECES},
        )
        for interval in (2, 3, 5)
    },
}
"""Options of the server and of the engine behind it."""


@dataclass(frozen=True)
class Refused:
    """A request that must be refused: 400, this field, and these words in the message."""

    number: int
    fields: dict[str, Any]
    param: str
    words: str = ""
    path: str = COMPLETIONS

    @property
    def body(self) -> dict[str, Any]:
        return {**({"prompt": "hi"} if self.path == COMPLETIONS else {"messages": USER}), **self.fields}


@dataclass(frozen=True)
class Said:
    """A text that the model says and what a completion must make of it, as a whole and as a stream.

    Attributes:
      num_tokens: of the answer, when it matters.
    """

    number: int
    script: tuple[str | bytes | int, ...]
    fields: dict[str, Any]
    text: str
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    num_tokens: int | None = None


@dataclass(frozen=True)
class Chatted:
    """The same for a chat. `calls` are pairs of a name and arguments, compared as JSON values."""

    number: int
    script: tuple[str | bytes | int, ...]
    fields: dict[str, Any]
    content: str | None
    reasoning: str | None = None
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    finish_reason: str = "stop"
    servers: tuple[str, ...] = ("qwen",)


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


REFUSED = [
    Refused(1, {"logit_bias": {"999999": -100}}, "logit_bias", "999999"),
    Refused(2, {"prompt": [-1]}, "prompt", "vocabulary"),
    Refused(2, {"prompt": [VOCAB_SIZE]}, "prompt", "vocabulary"),
    Refused(2, {"prompt": [2**63]}, "prompt", "vocabulary"),
    Refused(3, {"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    Refused(3, {"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group", CHAT),
    Refused(4, _schema({"type": "not-a-type"}), "response_format", "not-a-type", CHAT),
    Refused(4, _schema({"$ref": "#"}), "response_format", "no text can begin", CHAT),
    Refused(11, {"guided_regex": "[0-9]+"}, "guided_regex", "structured_outputs.regex"),
    Refused(11, {"guided_json": {}}, "guided_json", "structured_outputs.json", CHAT),
    Refused(28, {"prompt": [97] * 300}, "prompt", "maximum context length is 256"),
]

TOOLS = [function("f", id={"type": "integer"}), function("g"), function("todowrite", content={"type": "string"})]
F = '<tool_call>\n{"name": "f", "arguments": {"id": 42}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
ENDINGS_TOGETHER = ('<tool_call>\n{"name":"f","arguments":{"id":42}', "}\n", "</tool_call>")
"""The last brace comes in one token with what follows it."""
NAMED = {"type": "function", "function": {"name": "f"}}
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}

SAID = [
    Said(12, ("ABC", "DEF", "G"), {"stop": "DE"}, "ABC", stop_reason="DE"),
    Said(13, ("DEF", "G", "HI", "J", "K"), {"stop": "DEFGHIJ"}, "", stop_reason="DEFGHIJ"),
    Said(13, ("DEF", "G", "HI"), {"stop": "DEFGHIJ"}, "DEFGHI"),
    Said(14, (" Alice", "!", "\n"), {"stop": ["\n", "Alice:"]}, " Alice!", stop_reason="\n"),
    Said(15, (" N", " O", " P", " Q", " R"), {"stop": "O P Q"}, " N ", stop_reason="O P Q"),
    Said(16, ("abcdefghij" * 3,), {"stop": "0123456789"}, "abcdefghij" * 3),
    Said(16, ("012345678", "012345678"), {"stop": "0123456789"}, "012345678012345678"),
    Said(17, ("aaaaaba",), {"stop": "a", "min_tokens": 5}, "aaaaab", stop_reason="a", num_tokens=7),
    Said(18, ("ab", 257, "cd"), {"stop": "<|im_start|>"}, "ab", stop_reason="<|im_start|>"),
    Said(18, ("ab", 256, "cd"), {"stop": "<|im_end|>", "ignore_eos": True}, "ab", stop_reason="<|im_end|>"),
    Said(19, (b"\xc3(\xf0\x9fA\xff\xe2\x80",), {}, "\ufffd(\ufffdA\ufffd\ufffd"),
    Said(20, ("é😀x",), {}, "é😀x"),
    Said(20, ("é😀x",), {"max_tokens": 4}, "é\ufffd", "length"),
    Said(21, ("hello <tool", "_cSTOP"), {"stop": "STOP"}, "hello <tool_c", stop_reason="STOP"),
]

CHATTED = [
    Chatted(5, (F,), {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            None, calls=[("f", {"id": 42})], finish_reason="tool_calls"),
    Chatted(21, ("hello <tool", "_cSTOP"), {"tools": TOOLS, "stop": "STOP"}, "hello <tool_c"),
    Chatted(22, ("<think>a song", " of"), {"stop": "song"}, None, "a "),
    Chatted(43, ("hi",), NO_THOUGHTS, "hi"),
    Chatted(43, (F,), {**NO_THOUGHTS, "tools": TOOLS}, None, calls=[("f", {"id": 42})], finish_reason="tool_calls"),
    Chatted(44, ("a</think>b",), {}, "b", "a", servers=("thinker",)),
    Chatted(45, ENDINGS_TOGETHER, {"tools": TOOLS}, None, calls=[("f", {"id": 42})], finish_reason="tool_calls",
            servers=("qwen", "every 2 tokens", "every 3 tokens", "every 5 tokens")),
    Chatted(45, ('<tool_call>\n{"name":"f","arguments":{"b":true', "}}\n</tool_call>"), {"tools": TOOLS}, None,
            calls=[("f", {"b": True})], finish_reason="tool_calls",
            servers=("qwen", "every 2 tokens", "every 3 tokens", "every 5 tokens")),
    Chatted(46, ('<tool_call>\n{"name":"f","arguments":{"numbers":', '[{"', 'a":1}]', "}", "}\n", "</tool_call>"), {"tools": TOOLS},
            None, calls=[("f", {"numbers": [{"a": 1}]})], finish_reason="tool_calls"),
    Chatted(47, ("<|tool_call>", "call:todowrite{", "content:", '<|"|>', "Buy milk<", '|"|>}', "<tool_call|>"), {"tools": TOOLS},
            None, calls=[("todowrite", {"content": "Buy milk"})], finish_reason="tool_calls", servers=("gemma",)),
    Chatted(47, ("<|tool_call>", "call:todowrite{content:", '<|"|>', "Buy milk", '<|"|>', "}", "<tool_call|>"), {"tools": TOOLS},
            None, calls=[("todowrite", {"content": "Buy milk"})], finish_reason="tool_calls", servers=("gemma",)),
    Chatted(47, ("<|tool_call>", ":todowrite{content:", '<|"|>', "Buy milk", '<|"|>', "}", "<tool_call|>"), {"tools": TOOLS},
            None, calls=[("todowrite", {"content": "Buy milk"})], finish_reason="tool_calls", servers=("gemma",)),
    Chatted(48, (F,), {"tools": TOOLS, "tool_choice": "auto"}, None, calls=[("f", {"id": 42})], finish_reason="tool_calls"),
    Chatted(48, (F,), {"tools": TOOLS, "tool_choice": "required"}, None, calls=[("f", {"id": 42})], finish_reason="tool_calls"),
    Chatted(48, (F,), {"tools": TOOLS, "tool_choice": NAMED}, None, calls=[("f", {"id": 42})]),
    Chatted(48, ("plain text",), {"tools": TOOLS, "tool_choice": "required"}, "plain text"),
    Chatted(48, ("plain text",), {"tools": TOOLS, "tool_choice": "required", "max_tokens": 5}, "plain", finish_reason="length"),
    Chatted(49, (F, "\n", G), {"tools": TOOLS, "parallel_tool_calls": False}, None, calls=[("f", {"id": 42})],
            finish_reason="tool_calls"),
    Chatted(49, (F, "\n", G), {"tools": TOOLS}, None, calls=[("f", {"id": 42}), ("g", {})], finish_reason="tool_calls"),
    Chatted(50, (F,), {"tools": TOOLS, "max_tokens": 14}, '<tool_call>\n{"', finish_reason="length"),
]  # fmt: skip
