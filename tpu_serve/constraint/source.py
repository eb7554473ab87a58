"""A `GrammarSpec` written in Lark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpu_serve.constraint.lark import GrammarTooLarge, json_of, quoted, regex_of
from tpu_serve.constraint.spec import MAX_CHARACTERS, GrammarSpec, parsed
from tpu_serve.constraint.structural_tag import structural_tag
from tpu_serve.request import InvalidRequest


def lark_of(spec: GrammarSpec, param: str) -> tuple[str, bool]:
    """The grammar, and whether it may be in another dialect (GBNF) that has yet to be translated.

    Raises:
      InvalidRequest: the value is not what its kind asks for. Whether a grammar is right only the compiler says.
    """
    match spec.kind:
        case "grammar":
            return _text(spec.value, param), True
        case "lark":
            return _text(spec.value, param), False
        case kind:
            return _WRITERS[kind](spec.value, param), False


def _json_schema(value: Any, param: str) -> str:
    schema = parsed(value, param)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(param, f"{param} must be a JSON schema: an object or a boolean.", "invalid_grammar")
    return "start: " + json_of(schema)


def _json_object(value: Any, param: str) -> str:
    return "start: " + json_of({"type": "object"})


def _regex(value: Any, param: str) -> str:
    return "start: " + regex_of(_text(value, param))


def _choice(value: Any, param: str) -> str:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
        raise InvalidRequest(param, f"{param} must be a list of at least one text.", "invalid_grammar")
    return "start: " + " | ".join(map(quoted, dict.fromkeys(value)))


def _structural_tag(value: Any, param: str) -> str:
    try:
        return structural_tag(parsed(value, param), param)
    except GrammarTooLarge:
        raise InvalidRequest(
            param,
            f"The grammar of {param} is longer than {MAX_CHARACTERS:,} characters, the most allowed.",
            "grammar_too_large",
        ) from None


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(param, f"{param} must be a text that is not empty.", "invalid_grammar")
    return value


_WRITERS: dict[str, Callable[[Any, str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "structural_tag": _structural_tag,
}
