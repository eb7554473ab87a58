"""What answers are read as, and that it does not matter how they arrive."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing_cases import CASES, GEMMA, TOOLS, XML, Parsed

from tpu_serve.parsing.answer import AnswerParser
from tpu_serve.parsing.events import Event, merged
from tpu_serve.parsing.registry import Formats


def new_parser(reasoning: str, calls: str, prompt: str = "") -> AnswerParser:
    formats = Formats.choose(reasoning=reasoning, calls=calls)
    return formats.parser(tools=TOOLS, reads_calls=calls != "none", prompt=prompt)


def events_of(parser: AnswerParser, pieces: list[str], *, is_cut: bool = False) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return list(merged(events + parser.finish(is_cut=is_cut)))


@pytest.mark.parametrize(("reasoning", "calls", "text", "expected"), CASES, ids=range(len(CASES)))
def test_what_a_text_means(reasoning: str, calls: str, text: str, expected: Parsed):
    events = events_of(new_parser(reasoning, calls), [text])
    assert Parsed.of(events) == expected
    assert list(merged(events)) == events


@pytest.mark.parametrize(("reasoning", "calls", "text", "expected"), CASES, ids=range(len(CASES)))
def test_every_way_to_split_a_text_means_the_same(reasoning: str, calls: str, text: str, expected: Parsed):
    whole = events_of(new_parser(reasoning, calls), [text])
    assert events_of(new_parser(reasoning, calls), list(text)) == whole
    for place in range(len(text) + 1):
        assert events_of(new_parser(reasoning, calls), [text[:place], text[place:]]) == whole
    for size in (2, 3, 5, 7):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert events_of(new_parser(reasoning, calls), pieces) == whole


@pytest.mark.parametrize(("reasoning", "calls", "text", "expected"), CASES, ids=range(len(CASES)))
def test_a_text_that_is_cut_means_the_same_however_it_is_split(reasoning: str, calls: str, text: str, expected: Parsed):
    for end in range(len(text)):
        whole = events_of(new_parser(reasoning, calls), [text[:end]], is_cut=True)
        assert events_of(new_parser(reasoning, calls), list(text[:end]), is_cut=True) == whole
        for name, arguments in Parsed.of(whole).calls:
            arguments = re.sub(r"(\\n)?<[^<]*$", "", arguments)  # half a tag
            assert (name, True) in [
                (known, known_arguments.startswith(arguments)) for known, known_arguments in expected.calls
            ] or not arguments


FORMATS = sorted({case[:2] for case in CASES} | {("qwen3", "qwen3_coder"), ("none", "harmony"), ("harmony", "json")})
WORDS = st.sampled_from(
    [
        *sorted({case[2][start : start + size] for case in CASES for start in range(0, len(case[2]), 9) for size in (9, 14)}),
        *("<tool_call>", "</tool_call>", '{"name":', '"f"', ',"arguments":', "{", "}", '"', "\\", "<think>", "</think>", "\n", " "),
        *("<|tool_call>", "call:", "f{", '<|"|>', "<tool_call|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "final"),
        *("<function=weather>", "<parameter=days>", "</parameter>", "</function>", "<|channel>", "<channel|>", "to=functions.f "),
        *("é😀", "\x00"),
    ]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(WORDS, max_size=14), st.data(), st.booleans())
def test_any_text_at_all(formats: tuple[str, str], words: list[str], data: st.DataObject, is_cut: bool):
    text = "".join(words)
    whole = events_of(new_parser(*formats), [text], is_cut=is_cut)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert events_of(new_parser(*formats), pieces, is_cut=is_cut) == whole
    assert events_of(new_parser(*formats), words, is_cut=is_cut) == whole


@pytest.mark.parametrize(("reasoning", "calls", "text", "expected"), XML + GEMMA)
def test_arguments_that_are_written_anew_are_json(reasoning: str, calls: str, text: str, expected: Parsed):
    for end in range(len(text) + 1):
        for _, arguments in Parsed.of(events_of(new_parser(reasoning, calls), [text[:end]])).calls:
            assert isinstance(json.loads(arguments), dict)


def test_arguments_are_passed_on_as_they_come():
    parser = new_parser("none", "hermes")
    assert Parsed.of(parser.feed('<tool_call>{"name":"f","arguments":{"city":"Par')).calls == [("f", '{"city":"Par')]
    assert [event.text for event in parser.feed("is")] == ["is"]  # type: ignore[union-attr]
    parser = new_parser("none", "qwen3_coder")
    assert Parsed.of(parser.feed("<tool_call><function=weather><parameter=city>Par")).calls == [
        ("weather", '{"city":"Par')
    ]
    parser = new_parser("none", "gemma4")
    assert Parsed.of(parser.feed('<|tool_call>call:f{a:<|"|>Par')).calls == [("f", '{"a":"Par')]
    assert parser.feed("<") == []
    assert [event.text for event in parser.feed("b")] == ["<b"]  # type: ignore[union-attr]


def test_only_what_may_be_a_tag_is_held_back():
    parser = new_parser("qwen3", "hermes")
    assert Parsed.of(parser.feed("Hello <")).content == "Hello"
    assert Parsed.of(parser.feed("tool_calx")).content == " <tool_calx"
    assert Parsed.of(parser.feed(" and")).content == " and"


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "expected"),
    [
        ("qwen3", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", "a</think>b", Parsed("b", "a")),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "a", Parsed("", "a")),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "hi", Parsed("hi")),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>a</think>", Parsed("<think>a</think>")),
        ("qwen3", "<|im_start|>assistant\n<think>\nI was ", "thinking</think>b", Parsed("b", "thinking")),
        ("qwen3", "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "a tag", Parsed("a tag")),
        ("qwen3", "<|im_start|>assistant\n", "<think>a</think>b", Parsed("b", "a")),
        ("qwen3", "<|im_start|>assistant\nOK! ", " yes", Parsed(" yes")),
        ("qwen3", "<|im_start|>assistant\nOK!\n", "\nyes", Parsed("\nyes")),
        ("qwen3", "<|im_start|>assistant\nOK! <thi", "nk>", Parsed("nk>")),
        ("qwen3", "[INST] hi [/INST]<think>", "a</think>b", Parsed("b", "a")),
        ("gemma4", "<|turn>user\nx<turn|>\n<|turn>model\n<|channel>thought\n<channel|>", "hi", Parsed("hi")),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "a<channel|>b", Parsed("b", "a")),
        ("harmony", "<|start|>user<|message|>x<|end|><|start|>assistant", "<|channel|>final<|message|>b", Parsed("b")),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>It is", " so", Parsed(" so")),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", "a<|end|>", Parsed("", "a")),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(reasoning: str, prompt: str, text: str, expected: Parsed):
    calls = "harmony" if reasoning == "harmony" else "hermes"
    assert Parsed.of(events_of(new_parser(reasoning, calls, prompt), [text])) == expected
    assert Parsed.of(events_of(new_parser(reasoning, calls, prompt), list(text))) == expected


def test_a_forced_call_is_read_whatever_the_prompt_has_written():
    text = '[{"name": "f", "parameters": {"a": 1}}]'
    for prompt in ("<|im_start|>assistant\n<think>", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "[/INST] Sure"):
        parser = Formats().parser(tools=TOOLS, reads_calls=True, is_plain=True, prompt=prompt)
        assert Parsed.of(events_of(parser, [text])) == Parsed(calls=[("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, '{"x": 1}', '{"x":1}'),
        ({"allOf": [{"$ref": "#/$defs/point"}]}, '{"x": 1}', '{"x":1}'),
        ({"oneOf": [{"$ref": "#/$defs/nothing"}, 5]}, "5", '"5"'),
        ({"type": 5}, "5", '"5"'),
        ({"type": {"a": 1}}, "5", '"5"'),
        ({"type": ["integer", 3, None]}, "5", "5"),
        ({"anyOf": 5, "enum": 5}, "5", '"5"'),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "array"}, "[1, -1e999]", "[1, -1e999]"),
        (True, "5", '"5"'),
    ],
)
def test_values_of_any_schema(schema: object, value: str, expected: str):
    """Schemas are what requests bring: nothing has checked them."""
    defs = {"point": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": defs}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parser = Formats.choose(calls="qwen3_coder").parser(tools=tools, reads_calls=True)
    text = f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call>"
    assert Parsed.of(events_of(parser, [text])).calls == [("f", f'{{"a":{expected}}}')]


def test_long_answers_are_read_in_time_that_grows_with_their_length():
    """Many characters in small pieces; anything quadratic would take minutes."""
    long = "x" * 40_000
    for reasoning, calls, text in (
        ("qwen3", "hermes", f'<think>{long}</think>{long}<tool_call>{{"name":"f","arguments":{{"a":"{long}"}}}}</tool_call>'),
        ("none", "qwen3_coder", f"<tool_call><function=weather><parameter=place>{long}</parameter></function></tool_call>"),
        ("none", "gemma4", f'<|tool_call>call:f{{a:<|"|>{long}<|"|>}}<tool_call|>'),
        ("harmony", "harmony", f"<|channel|>analysis<|message|>{long}"),
        ("none", "hermes", "<tool_call>" + "[" * 40_000),
        ("none", "gemma4", "<|tool_call>call:f{a:" + "[" * 40_000),
        ("none", "qwen3_coder", "<tool_call><function=weather><parameter=tags>" + "[" * 40_000),
    ):  # fmt: skip
        pieces = [text[start : start + 5] for start in range(0, len(text), 5)]
        events_of(new_parser(reasoning, calls), pieces)
