"""What models write, and what it means: (format of reasoning, format of calls, text, expected). Calls in `expected` are (name, arguments)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tpu_serve.parsing.events import CallArguments, CallStart, ContentText, Event, ReasoningText

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "celsius": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "place": {"type": "object"},
                    "wind": {"type": ["number", "null"]},
                    "level": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "unit": {"$ref": "#/$defs/unit"},
                    "mode": {"enum": [1, 2]},
                    "note": {"type": ["string", "null"]},
                },
                "$defs": {"unit": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@dataclass
class Parsed:
    """The sum of events. Arguments are JSON text."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, events: list[Event]) -> Parsed:
        result = cls()
        for event in events:
            match event:
                case ContentText(text):
                    result.content += text
                case ReasoningText(text):
                    result.reasoning += text
                case CallStart(name):
                    result.calls.append((name, ""))
                case CallArguments(text):
                    name, arguments = result.calls[-1]
                    result.calls[-1] = (name, arguments + text)
        return result


def call(name: str, arguments: dict[str, Any]) -> str:
    """A call in the form of Hermes."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def xml(name: str, **arguments: str) -> str:
    """A call in the form of Qwen3-Coder."""
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


Case = tuple[str, str, str, Parsed]

THOUGHTS: list[Case] = [
    ("qwen3", "none", "<think>\nWell, 2 + 2\nis 4.\n</think>\n\nIt is 4.\n", Parsed("It is 4.\n", "Well, 2 + 2\nis 4.")),
    ("qwen3", "none", "<think>\n\n</think>\n\nhi", Parsed("hi")),
    ("qwen3", "none", "<think></think>", Parsed()),
    ("qwen3", "none", "hello <think>no</think>", Parsed("hello <think>no</think>")),
    ("qwen3", "none", " \n<think>a</think> b", Parsed(" b", "a")),
    ("qwen3", "none", "<think>a\n\n\nb\n\n</think>c", Parsed("c", "a\n\n\nb")),
    ("qwen3", "none", "<think>never closed\n", Parsed("", "never closed\n")),
    ("qwen3", "none", "<think>a < b </thin </think>c", Parsed("c", "a < b </thin ")),
    ("qwen3", "none", "<thin", Parsed("<thin")),
    ("qwen3", "none", "", Parsed()),
    ("qwen3", "none", "<think><think>x</think>y</think>", Parsed("y</think>", "x")),
    ("deepseek_r1", "none", "a</think>b", Parsed("b", "a")),
    ("deepseek_r1", "none", "<think>\na</think>\nb", Parsed("b", "a")),
    ("gemma4", "none", "<|channel>thought\nHm.\n<channel|>Yes.", Parsed("Yes.", "Hm.")),
    ("gemma4", "none", "Yes.<|channel>thought\nOr no.<channel|> No.", Parsed("Yes. No.", "Or no.")),
    ("gemma4", "none", "<|channel>thought\nHm.<|channel>", Parsed("", "Hm.<|channel>")),
    ("gemma4", "none", "plain <channel|>", Parsed("plain <channel|>")),
    ("none", "none", "<think>a</think>b", Parsed("<think>a</think>b")),
]  # fmt: skip

HERMES: list[Case] = [
    ("none", "hermes", call("f", {"id": 42}), Parsed(calls=[("f", '{"id": 42}')])),
    ("none", "hermes", call("f", {"on": True}) + "\n" + call("g", {}), Parsed(calls=[("f", '{"on": true}'), ("g", "{}")])),
    ("none", "hermes", call("f", {"numbers": [{"a": 1}]}), Parsed(calls=[("f", '{"numbers": [{"a": 1}]}')])),
    ("none", "hermes", "Let me see.\n\n" + call("f", {}) + "\n", Parsed("Let me see.", calls=[("f", "{}")])),
    ("none", "hermes", call("f", {}) + "\n\nDone.", Parsed("Done.", calls=[("f", "{}")])),
    ("none", "hermes", "One. " + call("f", {}) + "\nTwo.", Parsed("One. \nTwo.", calls=[("f", "{}")])),
    ("none", "hermes", call("f", {"s": "</tool_call> } \" \\ \u00e9 😀"}), Parsed(calls=[("f", json.dumps({"s": "</tool_call> } \" \\ \u00e9 😀"}))])),
    ("none", "hermes", '<tool_call>{"arguments":{"a":{"b":[]}},"name":"f"}</tool_call>', Parsed(calls=[("f", '{"a":{"b":[]}}')])),
    ("none", "hermes", '<tool_call>{"name":"f","parameters":{"a":1}}</tool_call>', Parsed(calls=[("f", '{"a":1}')])),
    ("none", "hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', Parsed(calls=[("f", '{"a":1}')])),
    ("none", "hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', Parsed(calls=[("f", "{}")])),
    ("none", "hermes", '<tool_call>{"name":"f"}</tool_call>', Parsed(calls=[("f", "{}")])),
    ("none", "hermes", '<tool_call>{"id":7,"name":"f","arguments":{},"x":[1]}</tool_call>', Parsed(calls=[("f", "{}")])),
    ("none", "hermes", '<tool_call>{"name":"f","arguments":{"a":1}}}\n</tool_call>', Parsed(calls=[("f", '{"a":1}')])),
    ("none", "hermes", '<tool_call>{"name":"f","arguments":{"a":1}}', Parsed(calls=[("f", '{"a":1}')])),
    ("none", "hermes", '<tool_call>{"name":"f","arguments":{}}<tool_call>{"name":"g","arguments":{}}', Parsed(calls=[("f", "{}"), ("g", "{}")])),
    ("none", "hermes", '<tool_call>{"name":"f","arguments":{"a":[1,', Parsed(calls=[("f", '{"a":[1,')])),
    ("none", "hermes", '<tool_call>{"name":"f","argu', Parsed('<tool_call>{"name":"f","argu')),
    ("none", "hermes", "<tool_call>\nnot json</tool_call>", Parsed("<tool_call>\nnot json</tool_call>")),
    ("none", "hermes", '<tool_call>{"name": 3}</tool_call>', Parsed('<tool_call>{"name": 3}</tool_call>')),
    ("none", "hermes", '<tool_call>{"arguments": {}}</tool_call>', Parsed('<tool_call>{"arguments": {}}</tool_call>')),
    ("none", "hermes", "<tool_call><tool_call>" + call("f", {}), Parsed("<tool_call><tool_call>", calls=[("f", "{}")])),
    ("none", "hermes", "if a <tool b: <tool_cal", Parsed("if a <tool b: <tool_cal")),
    ("none", "hermes", "no calls \n\n", Parsed("no calls \n\n")),
    ("none", "hermes", "\n \n", Parsed("\n \n")),
    ("qwen3", "hermes", "<think>\nhm\n</think>\n\n" + call("f", {"a": 1}), Parsed("", "hm", [("f", '{"a": 1}')])),
    ("qwen3", "hermes", "<think>\nhm\n" + call("f", {"a": 1}), Parsed("", "hm", [("f", '{"a": 1}')])),
    ("qwen3", "hermes", "<think>write <tool_call> then JSON</think>ok", Parsed("ok", "write <tool_call> then JSON")),
]  # fmt: skip

XML: list[Case] = [
    ("none", "qwen3_coder", xml("now"), Parsed(calls=[("now", "{}")])),
    ("none", "qwen3_coder", xml("weather", city="Paris", days="3"), Parsed(calls=[("weather", '{"city":"Paris","days":3}')])),
    ("none", "qwen3_coder", xml("weather", city="42", celsius="True"), Parsed(calls=[("weather", '{"city":"42","celsius":true}')])),
    ("none", "qwen3_coder", xml("weather", city='a "b"\n\tc\\\n'), Parsed(calls=[("weather", json.dumps({"city": 'a "b"\n\tc\\\n'}, separators=(",", ":")))])),
    ("none", "qwen3_coder", xml("weather", tags='["a", "b"]', place="{'x': True}"), Parsed(calls=[("weather", '{"tags":["a","b"],"place":{"x":true}}')])),
    ("none", "qwen3_coder", xml("weather", wind="1.5", level="null", unit="7", mode="2"), Parsed(calls=[("weather", '{"wind":1.5,"level":null,"unit":7,"mode":2}')])),
    ("none", "qwen3_coder", xml("weather", wind="None", note="null"), Parsed(calls=[("weather", '{"wind":null,"note":null}')])),
    ("none", "qwen3_coder", xml("weather", days="soon", note="later"), Parsed(calls=[("weather", '{"days":"soon","note":"later"}')])),
    ("none", "qwen3_coder", xml("weather", days="NaN", other="1"), Parsed(calls=[("weather", '{"days":"NaN","other":"1"}')])),
    ("none", "qwen3_coder", xml("weather", days="3.0"), Parsed(calls=[("weather", '{"days":3}')])),
    ("none", "qwen3_coder", "Ok.\n" + xml("now") + "\n" + xml("weather", city=""), Parsed("Ok.", calls=[("now", "{}"), ("weather", '{"city":""}')])),
    ("none", "qwen3_coder", "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>", Parsed(calls=[("weather", '{"city":"Rome"}')])),
    ("none", "qwen3_coder", "<function=unknown>x</function>", Parsed("<function=unknown>x</function>")),
    ("none", "qwen3_coder", "<tool_call><function=unknown><parameter=x>1</parameter></function></tool_call>", Parsed(calls=[("unknown", '{"x":"1"}')])),
    ("none", "qwen3_coder", "<tool_call><function=weather><parameter=city>A<parameter=days>2</function></tool_call>", Parsed(calls=[("weather", '{"city":"A","days":2}')])),
    ("none", "qwen3_coder", "<tool_call><function=weather><parameter=city>A</tool_call>B", Parsed("B", calls=[("weather", '{"city":"A"}')])),
    ("none", "qwen3_coder", "<tool_call><function=weather><parameter=city>a < b</parameter></function></tool_call>", Parsed(calls=[("weather", '{"city":"a < b"}')])),
    ("none", "qwen3_coder", "<tool_call>{}</tool_call>", Parsed("<tool_call>{}</tool_call>")),
    ("none", "qwen3_coder", "<tool_call><function=\n></tool_call>", Parsed("<tool_call><function=\n></tool_call>")),
    ("none", "qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call> bye", Parsed("bye", calls=[("now", "{}")])),
    ("qwen3", "qwen3_coder", "<think>\nhm " + xml("now"), Parsed("", "hm ", [("now", "{}")])),
]  # fmt: skip

GEMMA: list[Case] = [
    ("none", "gemma4", '<|tool_call>call:todo{content:<|"|>Buy milk<|"|>}<tool_call|>', Parsed(calls=[("todo", '{"content":"Buy milk"}')])),
    ("none", "gemma4", '<|tool_call>:todo{content:<|"|>x<|"|>}<tool_call|>', Parsed(calls=[("todo", '{"content":"x"}')])),
    ("none", "gemma4", "<|tool_call>call:now{}<tool_call|><|tool_call>call:now<tool_call|>", Parsed(calls=[("now", "{}"), ("now", "{}")])),
    ("none", "gemma4", '<|tool_call>call:f{a:3,b:-1.5e3,c:true,d:null,e:[1,[2],{}],g:{h:{i:<|"|>}{<|"|>}}}<tool_call|>', Parsed(calls=[("f", '{"a":3,"b":-1.5e3,"c":true,"d":null,"e":[1,[2],{}],"g":{"h":{"i":"}{"}}}')])),
    ("none", "gemma4", '<|tool_call>call:f{s:<|"|>a "q", b\\n\nc<|"|>, t:[<|"|>x<|"|>,<|"|><|"|>]}<tool_call|>', Parsed(calls=[("f", json.dumps({"s": 'a "q", b\\n\nc', "t": ["x", ""]}, separators=(",", ":")))])),
    ("none", "gemma4", '<|tool_call>call:f{<|"|>a b<|"|>:1,"c":"d"}<tool_call|>', Parsed(calls=[("f", '{"a b":1,"c":"d"}')])),
    ("none", "gemma4", "<|tool_call>call:f{city:Paris,n:a1}<tool_call|>", Parsed(calls=[("f", '{"city":"Paris","n":"a1"}')])),
    ("none", "gemma4", "<|tool_call>call:f{a:[1,2<tool_call|>ok", Parsed("ok", calls=[("f", '{"a":[1,2]}')])),
    ("none", "gemma4", '<|tool_call>call:f{a:<|"|>x<tool_call|>', Parsed(calls=[("f", '{"a":"x"}')])),
    ("none", "gemma4", '<|tool_call>call:f{a:[<|"|>x<tool_call|>ok', Parsed("ok", calls=[("f", '{"a":["x"]}')])),
    ("none", "gemma4", "Sure. <|tool_call>call:now{}<tool_call|><|tool_response>", Parsed("Sure.", calls=[("now", "{}")])),
    ("none", "gemma4", "<|tool_call>nothing", Parsed("<|tool_call>nothing")),
    ("none", "gemma4", "<|tool_call>call:{}", Parsed("<|tool_call>call:{}")),
    ("none", "gemma4", "<|tool_call>call:f(1)<tool_call|>", Parsed("<|tool_call>call:f(1)<tool_call|>")),
    ("gemma4", "gemma4", "<|channel>thought\nhm\n<channel|><|tool_call>call:now{}<tool_call|>", Parsed("", "hm", [("now", "{}")])),
    ("gemma4", "gemma4", "<|channel>thought\nhm<|tool_call>call:now{}<tool_call|>", Parsed("", "hm", [("now", "{}")])),
]  # fmt: skip

_ANALYSIS = "<|channel|>analysis<|message|>We think.<|end|>"
HARMONY: list[Case] = [
    ("harmony", "harmony", _ANALYSIS + "<|start|>assistant<|channel|>final<|message|>Hi!", Parsed("Hi!", "We think.")),
    ("harmony", "harmony", "<|channel|>final<|message|>Hi!<|return|>", Parsed("Hi!")),
    ("harmony", "harmony", "<|channel|>final <|constrain|>json<|message|>{}", Parsed("{}")),
    ("harmony", "harmony", _ANALYSIS + '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', Parsed("", "We think.", [("f", '{"a": 1}')])),
    ("harmony", "harmony", _ANALYSIS + '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', Parsed("", "We think.", [("f", '{"a": 1}')])),
    ("harmony", "harmony", " to=functions.f<|channel|>commentary<|message|>{}<|call|>", Parsed(calls=[("f", "{}")])),
    ("harmony", "harmony", "<|channel|>analysis to=functions.f code<|message|>{}", Parsed(calls=[("f", "{}")])),
    ("harmony", "harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", Parsed(calls=[("f", "{}")])),
    ("harmony", "harmony", "<|channel|>commentary<|message|>First I look.<|end|><|start|>assistant<|channel|>final<|message|>Done.", Parsed("First I look.\nDone.")),
    ("harmony", "harmony", _ANALYSIS + "<|start|>assistant" + _ANALYSIS, Parsed("", "We think.\nWe think.")),
    ("harmony", "harmony", "<|channel|>analysis<|message|>cut in the mid", Parsed("", "cut in the mid")),
    ("harmony", "harmony", "no header at all", Parsed("no header at all")),
    ("harmony", "harmony", _ANALYSIS + "rest", Parsed("rest", "We think.")),
    ("harmony", "harmony", "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", Parsed("b", "a")),
    ("harmony", "none", "<|channel|>commentary to=functions.f<|message|>{}", Parsed("{}")),
]  # fmt: skip

JSON: list[Case] = [
    ("none", "json", '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]', Parsed(calls=[("f", '{"a": 1}'), ("g", "{}")])),
    ("none", "json", ' {"name": "f", "parameters": {"a": [1]}}\n', Parsed(calls=[("f", '{"a": [1]}')])),
    ("none", "json", "[1, 2]", Parsed("[1, 2]")),
    ("none", "json", "[]", Parsed("[]")),
    ("none", "json", "hello", Parsed("hello")),
]  # fmt: skip

CASES = THOUGHTS + HERMES + XML + GEMMA + HARMONY + JSON
