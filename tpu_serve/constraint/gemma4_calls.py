"""Arguments in Gemma 4's notation: bare keys, strings between two marks, everything else as in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tpu_serve.constraint.lark import Rules, alternatives, json_of, marker, quoted
from tpu_serve.constraint.schema import KINDS, properties_of, resolved, values_of
from tpu_serve.text.tokenizer import Tokenizer

_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Gemma4Arguments:
    """Writes the rules of one tool's arguments.

    Kept are types, values named one by one, alternatives, references, the keys and their order, which of them must be there, lengths of
    lists and bounds of numbers. Patterns, formats and lengths of strings are not.
    """

    def __init__(self, rules: Rules, root: Mapping[str, Any], tokenizer: Tokenizer):
        self._rules, self._root = rules, root
        quote = marker(tokenizer, '<|"|>')
        self._quote = quote
        self._string = rules.add(f"{quote} {rules.until(quote)}")
        self._any = ""
        self._references: dict[str, str] = {}

    def object(self, schema: Mapping[str, Any]) -> str:
        """An expression: an object, in braces."""
        properties = properties_of(schema)
        others = schema.get("additionalProperties", not properties)
        if not properties:
            if others is False:
                return quoted("{}")
            value = self._value({} if others is True else others)
            return self._many(f'{self._key_rule()} ":" {value}', "{", "}")
        required = schema.get("required") or ()
        # From the last key to the first: what may follow once a key has been written, and before any has.
        after, before = '""', '""'
        for key, value in reversed(properties.items()):
            entry = f"{self._key(key)} {quoted(':')} {self._value(value)}"
            optional = key not in required
            begun = self._rules.add(f'"," {entry} {after}' + (f" | {after}" if optional else ""))
            before = self._rules.add(f"{entry} {after}" + (f" | {before}" if optional else ""))
            after = begun
        return f'("{{" {before} "}}")'

    def _value(self, schema: Any) -> str:
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            reference = schema["$ref"]
            if reference not in self._references:
                # Named before it is written, for it may refer to itself.
                name = self._references[reference] = self._rules.reserve()
                self._rules.fill(name, self._value(resolved(schema, self._root)))
            return self._references[reference]
        if not isinstance(schema, Mapping):
            return self._anything()
        values = values_of(schema)
        if values is not None:
            return alternatives(self._literal(value) for value in values)
        for name in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(name)
            if isinstance(parts, list) and parts and (name != "allOf" or len(parts) == 1):
                return alternatives(self._value(part) for part in parts)
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return alternatives(self._of_kind(str(kind), schema) for kind in kinds)
        return self._of_kind(kinds, schema) if isinstance(kinds, str) else self._anything()

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return self._string
            case "object":
                return self.object(schema)
            case "array":
                return self._array(schema)
            case _ if kind in KINDS:
                return self._rules.add(
                    json_of({"type": kind, **{name: schema[name] for name in _NUMERIC if name in schema}})
                )
        return self._anything()

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems") or 0, schema.get("maxItems")
        return self._many(self._value(schema.get("items")), "[", "]", int(least), None if most is None else int(most))

    def _many(self, item: str, start: str, end: str, least: int = 0, most: int | None = None) -> str:
        if most is not None and most < 1:
            return quoted(start + end)
        name = self._rules.add(item)
        further = f'("," {name}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        if most == 1:  # there is no repetition of nothing
            further = ""
        return f"({quoted(start)} ({name} {further}){'' if least else '?'} {quoted(end)})"

    def _anything(self) -> str:
        if not self._any:
            self._any = self._rules.reserve()
            scalar = self._rules.add(json_of({"type": ["number", "boolean", "null"]}))
            items = self._many(self._any, "[", "]")
            entries = self._many(f'{self._key_rule()} ":" {self._any}', "{", "}")
            self._rules.fill(self._any, f"{self._string} | {scalar} | {items} | {entries}")
        return self._any

    def _key_rule(self) -> str:
        return "/[A-Za-z_][A-Za-z0-9_]*/"

    def _key(self, key: str) -> str:
        return quoted(key) if re.fullmatch(r"[\w.-]+", key) else f"{self._quote} {quoted(key)} {self._quote}"

    def _literal(self, value: Any) -> str:
        """One value, in the notation."""
        match value:
            case str():
                return f"({self._quote} {quoted(value)} {self._quote})"
            case list():
                return "(" + ' "," '.join(map(self._literal, value)).join(['"[" ', ' "]"']) + ")"
            case dict():
                entries = (f'{self._key(key)} ":" {self._literal(one)}' for key, one in value.items())
                return "(" + ' "," '.join(entries).join(['"{" ', ' "}"']) + ")"
        return quoted(json.dumps(value))
