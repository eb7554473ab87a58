"""Grammars of calls of tools that a request insists on, in the form that the model's family writes and the parser of answers reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.constraint.gemma4_calls import Gemma4Arguments
from tpu_serve.constraint.lark import ANY_TEXT, GrammarTooLarge, Rules, alternatives, json_of, marker, quoted
from tpu_serve.constraint.schema import kinds_of, properties_of, resolved, texts_of
from tpu_serve.constraint.spec import MAX_CHARACTERS, GrammarSpec, check_nesting
from tpu_serve.request import InvalidRequest
from tpu_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Tool:
    """A function that may be called. What its schema says beyond the compiler's reach is an error only where it is strict."""

    name: str
    schema: Mapping[str, Any]
    is_strict: bool

    def arguments(self) -> str:
        return json_of(dict(self.schema), lenient=not self.is_strict)


def forced_calls(
    format_name: str | None, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, parallel: bool
) -> GrammarSpec:
    """An answer that is one call of one of the tools, or several in a row if `parallel`, and nothing else.

    Arguments have their properties in the order of the schema.

    Args:
      format_name: `hermes`, `qwen3_coder`, `gemma4` or `harmony`; None and any other name give a JSON list of objects with `name`
        and `parameters`. Harmony's answer may begin with a message of the channel analysis.
      tools: in the form of the chat API, one at least.

    Raises:
      InvalidRequest: the parameters of a tool are no schema, as far as that is seen without the compiler, or nest too deeply.
    """
    rules = Rules()
    write = _FORMATS.get(format_name or "", _json_list)
    check_nesting(list(tools), "tools")
    try:
        start = write(rules, [_read(tool) for tool in tools], tokenizer, parallel)
    except GrammarTooLarge as error:
        raise InvalidRequest(
            "tools",
            f"The grammar of the calls is longer than {MAX_CHARACTERS:,} characters, the most allowed.",
            "grammar_too_large",
        ) from error
    except (
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:  # a schema may be anything that JSON can be
        raise InvalidRequest("tools", "The parameters of a tool are not a JSON schema.", "invalid_grammar") from error
    return GrammarSpec("lark", rules.grammar(start))


def _read(tool: Mapping[str, Any]) -> _Tool:
    function = tool["function"]
    parameters = function.get("parameters")
    # Without parameters there is nothing to say, and arguments are an object whatever the schema forgets to mention.
    schema = {"additionalProperties": False} if parameters is None else parameters
    if isinstance(schema.get("required"), str):
        raise ValueError("its letters are no keys")
    return _Tool(function["name"], {"type": "object", **schema}, bool(function.get("strict")))


def _in_a_row(rules: Rules, calls: Sequence[str], separator: str, parallel: bool) -> str:
    call = rules.add(alternatives(calls))
    return f"{call} ({separator} {call})*" if parallel else call


def _json_list(rules: Rules, tools: Sequence[_Tool], tokenizer: Tokenizer, parallel: bool) -> str:
    calls = [
        f"{quoted(_object_start(tool.name, 'parameters'))} {rules.add(tool.arguments())} {quoted('}')}"
        for tool in tools
    ]
    return f"{quoted('[')} {_in_a_row(rules, calls, quoted(', '), parallel)} {quoted(']')}"


def _hermes(rules: Rules, tools: Sequence[_Tool], tokenizer: Tokenizer, parallel: bool) -> str:
    start, end = marker(tokenizer, "<tool_call>"), marker(tokenizer, "</tool_call>")
    calls = [
        f"{start} {quoted(chr(10) + _object_start(tool.name, 'arguments'))} {rules.add(tool.arguments())} {quoted('}' + chr(10))} {end}"
        for tool in tools
    ]
    return _in_a_row(rules, calls, quoted("\n"), parallel)


def _object_start(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '


def _qwen_xml(rules: Rules, tools: Sequence[_Tool], tokenizer: Tokenizer, parallel: bool) -> str:
    start, end = marker(tokenizer, "<tool_call>"), marker(tokenizer, "</tool_call>")
    calls = []
    for tool in tools:
        required = tool.schema.get("required") or ()
        parts = [quoted(f"\n<function={tool.name}>\n")]
        for key, schema in properties_of(tool.schema).items():
            value = _qwen_xml_value(rules, schema, tool)
            part = f"({quoted(f'<parameter={key}>' + chr(10))} {value} {quoted(chr(10))})"
            parts.append(part if key in required else part + "?")
        calls.append(" ".join([start, *parts, quoted("</function>\n"), end]))
    return _in_a_row(rules, calls, quoted("\n"), parallel)


def _qwen_xml_value(rules: Rules, schema: Any, tool: _Tool) -> str:
    """A value and its closing tag: text is written as it is, everything else as JSON."""
    end = "\n</parameter>"
    schema = resolved(schema, tool.schema)
    texts, kinds = texts_of(schema), kinds_of(schema)
    if texts:
        return f"({alternatives(map(quoted, texts))} {quoted(end)})"
    if kinds and "string" not in kinds:
        # References are to the tool's own definitions.
        homes = {name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}
        return f"({rules.add(json_of({**homes, **schema}, lenient=not tool.is_strict))} {quoted(end)})"
    others = r"/(?s:.*)(<parameter=|<\/function>|<\/tool_call>)(?s:.*)/"
    return rules.add(f'({ANY_TEXT} & ~{others}) "</parameter>"', "[lazy]")


def _gemma4(rules: Rules, tools: Sequence[_Tool], tokenizer: Tokenizer, parallel: bool) -> str:
    start, end = marker(tokenizer, "<|tool_call>"), marker(tokenizer, "<tool_call|>")
    calls = [
        f"{start} {quoted(f'call:{tool.name}')} {Gemma4Arguments(rules, tool.schema, tokenizer).object(tool.schema)} {end}"
        for tool in tools
    ]
    call = rules.add(alternatives(calls))
    return f"{call}+" if parallel else call


def _harmony(rules: Rules, tools: Sequence[_Tool], tokenizer: Tokenizer, parallel: bool) -> str:
    channel, message, constrain, end, start = (
        marker(tokenizer, f"<|{name}|>") for name in ("channel", "message", "constrain", "end", "start")
    )
    thought = f"{channel} {quoted('analysis')} {message} {rules.until(end)} {start} {quoted('assistant')}"
    calls = [
        f"{quoted(f'commentary to=functions.{tool.name} ')} {constrain} {quoted('json')} {message} {rules.add(tool.arguments())}"
        for tool in tools
    ]
    return f"({thought})? {channel} {alternatives(calls)}"  # a call ends the turn: there are never two


_FORMATS: dict[str, Callable[[Rules, Sequence[_Tool], Tokenizer, bool], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen_xml,
    "gemma4": _gemma4,
    "harmony": _harmony,
}
