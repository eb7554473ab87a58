"""Values of arguments that are written without quotes: what a tool's JSON schema makes of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_serve.parsing.json_text import strict_json

_MAX_LITERAL = 100_000
"""Longest text that is read as a Python literal, characters: reading one is slow."""
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def properties_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Schemas of a tool's arguments by name; nothing for a tool that is not there."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties"), Mapping):
                return {}
            properties = parameters["properties"]
            return {key: _resolved(schema, parameters) for key, schema in properties.items()}
    return {}


def kinds_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema names; none at all when it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kinds: set[str] = set()
    given = schema.get("type")
    named = given if isinstance(given, list | tuple) else [given]
    kinds.update(kind for kind in named if isinstance(kind, str))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            for part in schema[key]:
                kinds |= kinds_of(part)
    values = [*schema["enum"]] if isinstance(schema.get("enum"), list) else []
    values += [schema["const"]] if "const" in schema else []
    if not kinds:
        kinds.update(kind for kind in _KINDS for value in values if _is_kind(value, kind))
    return frozenset(kinds & _KINDS.keys())


def is_text(schema: Any) -> bool:
    """Whether every value is a string, so that it can be passed on before it is complete. What a schema does not mention is one."""
    return kinds_of(schema) <= {"string"}


def json_of(text: str, schema: Any) -> str:
    """The JSON text of the value that was written as `text`; a string where it is nothing that the schema asks for."""
    kinds = kinds_of(schema)
    for value in _readings(text.strip()):
        if any(kind != "string" and _is_kind(value, kind) for kind in kinds):
            try:
                return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            except (ValueError, RecursionError):  # a number that is too large for this program is one all the same
                return text.strip()
        if "integer" in kinds and isinstance(value, float) and value.is_integer():
            return str(int(value))
    return json.dumps(text, ensure_ascii=False)


def _readings(text: str) -> list[Any]:
    """What a text may mean, the likeliest first."""
    try:
        return [strict_json(text)]
    except ValueError:
        pass
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return [words[text.lower()]]
    if text[:1] in ("{", "[", "(") and len(text) <= _MAX_LITERAL:  # as Python writes it, with single quotes and True
        try:
            value = json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return []
        return [value]
    return []


def _is_kind(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind]) and (isinstance(value, bool) == (kind == "boolean"))


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema behind a reference within its own tool, one step deep; so are the alternatives that a schema has."""
    if not isinstance(schema, Mapping):
        return schema
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            schema = {**schema, key: [_referred(part, root) for part in schema[key]]}
    return _referred(schema, root)


def _referred(schema: Any, root: Mapping[str, Any]) -> Any:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    place: Any = root
    for step in reference[2:].split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place
