"""Forced calls: random answers under their grammar are read back by the parser of the same format, and are valid for the tools' schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from constraint_walks import Model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpu_serve.constraint.tools import forced_calls
from tpu_serve.parsing.events import CallArguments, CallStart, ContentText, ReasoningText
from tpu_serve.parsing.registry import Formats
from tpu_serve.request import InvalidRequest

FORMATS = {
    "hermes": ("qwen3", (448, 450)),
    "qwen3_coder": ("qwen3_5_moe", (448, 450)),
    "gemma4": ("gemma4", (1, 16, 9)),
    "harmony": ("gpt_oss", (449, 450, 456)),
    "json": ("qwen2_moe", (448, 450)),
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "hours": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "minItems": 2, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {"north": {"type": "number"}, "here": {"type": "boolean"}},
            "required": ["north"],
            "additionalProperties": False,
        },
        "which": {"anyOf": [{"const": 1.5}, {"type": "null"}]},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a place", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
SAY = {
    "type": "function",
    "function": {"name": "say", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}},
}


def is_weather(value: Any) -> bool:
    place = value.get("place", {"north": 1})
    return (
        {"unit", "days"} <= value.keys() <= WEATHER["properties"].keys()
        and value["unit"] in ("C", "F")
        and type(value["days"]) is int
        and 1 <= value["days"] <= 9
        and 2 <= len(value.get("hours", [0, 0])) <= 3
        and all(type(hour) is int and 0 <= hour <= 23 for hour in value.get("hours", [0]))
        and {"north"} <= place.keys() <= {"north", "here"}
        and type(place["north"]) in (int, float)
        and type(place.get("here", True)) is bool
        and value.get("which") in (None, 1.5)
    )


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Model]]:
    made = {name: Model(fixture, eos) for name, (fixture, eos) in FORMATS.items()}
    yield made
    for model in made.values():
        model.compiler.close()


def read(name: str, text: str, tools: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The calls in a text, in which there is nothing else but perhaps reasoning."""
    parser = Formats.choose(reasoning="harmony" if name == "harmony" else "none", calls=name).parser(
        tools=tools, reads_calls=True
    )
    calls: list[tuple[str, Any]] = []
    for event in [*parser.feed(text), *parser.finish()]:
        match event:
            case CallStart(called):
                calls.append((called, ""))
            case CallArguments(piece):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
            case ContentText(words):
                assert not words.strip(), f"{words!r} of {text!r}"
            case ReasoningText():
                assert name == "harmony"
    return [(called, json.loads(arguments)) for called, arguments in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_are_read_back(models: dict[str, Model], name: str) -> None:
    model = models[name]
    spec = forced_calls(name if name != "json" else None, TOOLS, model.tokenizer, parallel=True)
    seen: set[str] = set()
    num_calls: set[int] = set()
    num_ended = 0
    for seed in range(16):
        token_ids, ended = model.walk(model.compiler.compile_now(spec, "tools"), seed, 400)
        if not ended:  # in the middle of a thought
            assert name == "harmony"
            continue
        num_ended += 1
        calls = read(name, model.text(token_ids), TOOLS)
        assert calls
        num_calls.add(len(calls))
        for called, arguments in calls:
            seen.add(called)
            assert is_weather(arguments) if called == "weather" else (called, arguments) == ("now", {})
    assert seen == {"weather", "now"}
    assert num_ended >= 8
    assert num_calls == {1} if name == "harmony" else len(num_calls) > 1, "a call ends the turn of Harmony"


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_and_no_more(models: dict[str, Model], name: str) -> None:
    model = models[name]
    spec = forced_calls(name, TOOLS[1:], model.tokenizer, parallel=False)
    for seed in range(6):
        token_ids, ended = model.walk(model.compiler.compile_now(spec, "tools"), seed, 400)
        if ended:
            assert read(name, model.text(token_ids), TOOLS) == [("now", {})]


TEXTS = {
    "hermes": '<tool_call>\n{"name": "say", "arguments": {"text": "a\\n</tool_call> b"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=say>\n<parameter=text>\na\n</tool_cal b\n</parameter>\n</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:say{text:<|"|>a\n"} b<|"|>}<tool_call|>',
    "harmony": '<|channel|>analysis<|message|>Hm, {"<|end|><|start|>assistant<|channel|>commentary to=functions.say <|constrain|>json<|message|>{"text": "a b"}',
    "json": '[{"name": "say", "parameters": {"text":"a b"}}]',
}  # fmt: skip
SAID = {"hermes": "a\n</tool_call> b", "qwen3_coder": "a\n</tool_cal b", "gemma4": 'a\n"} b'}


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_that_a_model_writes_is_allowed(models: dict[str, Model], name: str) -> None:
    model = models[name]
    spec = forced_calls(name, [*TOOLS, SAY], model.tokenizer, parallel=True)
    text = TEXTS[name]
    assert read(name, text, [SAY]) == [("say", {"text": SAID.get(name, "a b")})]
    assert model.taken(spec, text) == -1
    assert 0 <= model.taken(spec, text.replace("say", "sing")) < len(text)
    assert model.taken(spec, "Hello") == 0


def test_special_tokens_are_meant_where_a_format_has_them(models: dict[str, Model]) -> None:
    model = models["gemma4"]
    spec = forced_calls("gemma4", TOOLS, model.tokenizer, parallel=False)
    assert model.allowed(model.compiler.compile_now(spec, "tools")) == {model.tokenizer.token_id("<|tool_call>")}


def test_what_the_compiler_does_not_know_is_an_error_of_strict_tools(models: dict[str, Model]) -> None:
    model = models["hermes"]
    parameters = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "unevaluatedProperties": False,
    }
    for strict, refused in ((None, False), (False, False), (True, True)):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        spec = forced_calls("hermes", [tool], model.tokenizer, parallel=False)
        if refused:
            with pytest.raises(InvalidRequest, match="unevaluatedProperties") as caught:
                model.compiler.compile_now(spec, "tools")
            assert caught.value.param == "tools"
        else:
            assert model.compiler.compile_now(spec, "tools").mask is not None


RECURSIVE = {
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/node"}},
    "required": ["tree"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "any key": {"enum": ["x", [1, {"y": None}]]}},
        }
    },
}


def test_gemmas_notation_of_schemas_that_refer_to_themselves(models: dict[str, Model]) -> None:
    model = models["gemma4"]
    tool = {"type": "function", "function": {"name": "grow", "parameters": RECURSIVE}}
    spec = forced_calls("gemma4", [tool], model.tokenizer, parallel=False)

    def is_node(value: Any) -> bool:
        return (
            value.keys() <= {"left", "any key"}
            and value.get("any key") in (None, "x", [1, {"y": None}])
            and ("left" not in value or is_node(value["left"]))
        )

    for seed in range(12):
        token_ids, ended = model.walk(model.compiler.compile_now(spec, "tools"), seed, 900)
        assert ended
        (call,) = read("gemma4", model.text(token_ids), [tool])
        assert call[0] == "grow"
        assert is_node(call[1]["tree"])


def test_gemmas_free_values(models: dict[str, Model]) -> None:
    model = models["gemma4"]
    tool = {
        "type": "function",
        "function": {"name": "put", "parameters": {"properties": {"value": {}}, "required": ["value"]}},
    }
    spec = forced_calls("gemma4", [tool], model.tokenizer, parallel=False)
    kinds = set()
    for seed in range(40):
        token_ids, ended = model.walk(model.compiler.compile_now(spec, "tools"), seed, 300)
        if ended:
            (call,) = read("gemma4", model.text(token_ids), [tool])
            kinds.add(type(call[1]["value"]))
    assert {str, list, dict} <= kinds


KEYS = st.sampled_from(
    ["type", "properties", "required", "items", "enum", "const", "anyOf", "$ref", "$defs", "minItems", "a"]
)
SCALARS = st.sampled_from(["object", "string", "array", "integer", "#/$defs/a", "a", -1, 2, 1.5, None, True])
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parameters=st.dictionaries(KEYS, JSON, max_size=5), name=st.sampled_from(["qwen3_coder", "gemma4", "hermes"]))
def test_whatever_a_schema_is_it_is_a_grammar_or_refused(models: dict[str, Model], parameters: Any, name: str) -> None:
    model = models[name]
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    refusals = []
    try:
        model.compiler.compile_now(forced_calls(name, [tool], model.tokenizer, parallel=False), "tools")
    except InvalidRequest as error:
        refusals.append((error.param, error.status))
    assert refusals in ([], [("tools", 400)])


@pytest.mark.parametrize("name", FORMATS)
def test_schemas_that_nest_too_deeply(models: dict[str, Model], name: str) -> None:
    schema: Any = {}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    with pytest.raises(InvalidRequest, match="nests more than 64"):
        forced_calls(name, [tool], models[name].tokenizer, parallel=False)


@pytest.mark.parametrize("name", FORMATS)
def test_schemas_that_are_none(models: dict[str, Model], name: str) -> None:
    chain = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(3000)}
    refused = {"hermes": 1, "harmony": 1, "json": 1, "qwen3_coder": 1, "gemma4": 3}
    messages = []
    for parameters in (
        {"required": "ab"},
        {"properties": {"a": {"type": "array", "minItems": math.inf}}},
        {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": chain},
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        try:
            forced_calls(name, [tool], models[name].tokenizer, parallel=False)
        except InvalidRequest as error:
            messages.append(error.message)
    assert messages == ["The parameters of a tool are not a JSON schema."] * refused[name]


@pytest.mark.parametrize("name", FORMATS)
def test_grammars_that_get_too_large_are_not_written_to_their_end(models: dict[str, Model], name: str) -> None:
    properties = {f"p{index}": {"type": "string", "enum": ["x" * 50]} for index in range(20_000)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    with pytest.raises(InvalidRequest) as caught:
        forced_calls(name, [tool], models[name].tokenizer, parallel=False).key("tools")
    assert (caught.value.param, caught.value.reason) == ("tools", "grammar_too_large")


def test_keys_that_are_required_and_not_described(models: dict[str, Model]) -> None:
    for name in ("qwen3_coder", "gemma4"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"required": ["a"]}}}
        spec = forced_calls(name, [tool], models[name].tokenizer, parallel=False)
        texts = {
            "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
            "gemma4": '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>',
        }
        assert models[name].taken(spec, texts[name]) == -1
        assert read(name, texts[name], [tool]) == [("f", {"a": "x"})]
        assert 0 <= models[name].taken(spec, "<tool_call>\n<function=f>\n</function>\n</tool_call>") < 30


@pytest.mark.parametrize(("least", "most"), [(0, 0), (0, 2), (1, 1), (2, 3), (2, None)])
def test_lengths_of_gemmas_lists(models: dict[str, Model], least: int, most: int | None) -> None:
    limits = {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
    schema = {"properties": {"a": {"type": "array", "items": {"type": "integer"}, **limits}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    spec = forced_calls("gemma4", [tool], models["gemma4"].tokenizer, parallel=False)
    for num in range(6):
        text = f"<|tool_call>call:f{{a:[{','.join('1' * num)}]}}<tool_call|>"
        assert (models["gemma4"].taken(spec, text) == -1) == (least <= num <= (99 if most is None else most)), num


@pytest.mark.parametrize("tag", ["<parameter=b>", "</function>", "</tool_call>"])
def test_text_between_tags_holds_none_that_would_end_it(models: dict[str, Model], tag: str) -> None:
    spec = forced_calls("qwen3_coder", [SAY], models["qwen3_coder"].tokenizer, parallel=False)
    text = TEXTS["qwen3_coder"]
    assert models["qwen3_coder"].taken(spec, text) == -1
    assert models["qwen3_coder"].taken(spec, text.replace("</tool_cal ", tag)) >= 0
    assert models["qwen3_coder"].taken(spec, text.replace("</tool_cal ", "<tag>")) == -1
