"""Structural tags: free text in which some beginnings oblige to what must follow, in Lark.

Both spellings that clients use are read: `structures` with `triggers`, and `format`, a tree of typed parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tpu_serve.constraint.lark import ANY_TEXT, Rules, alternatives, json_of, quoted, regex_of
from tpu_serve.request import InvalidRequest


def structural_tag(value: Any, param: str) -> str:
    """Raises `InvalidRequest` for what is not a structural tag, or a part of one that is not served, with the place of the fault."""
    if not isinstance(value, dict):
        raise InvalidRequest(param, f"{param} must be an object.", "invalid_grammar")
    writer = _Writer(param)
    writer.check_keys(value, ("format",) if "format" in value else ("structures", "triggers"), "structural_tag")
    if "format" in value:
        return writer.rules.grammar(writer.part(value["format"], "format"))
    structures = writer.items(value, "structures", "structural_tag")
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema")},
            "end": one.get("end"),
        }
        for one in structures
        if isinstance(one, dict)
    ]
    if len(tags) != len(structures):
        raise writer.error("structures", "must hold objects")
    for index, one in enumerate(structures):
        writer.check_keys(one, ("begin", "schema", "end"), f"structures[{index}]")
    return writer.rules.grammar(writer.triggered({"triggers": value.get("triggers"), "tags": tags}, "structures"))


_KEYS: Mapping[str, Collection[str]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
"""What a part of each type may hold besides its type."""
_NEUTRAL: tuple[object, ...] = (None, False, [], {}, "json")
"""What clients write where they ask for nothing; the last one is a style of arguments."""


class _Writer:
    """Every method returns an expression for the part that it is given; `place` is where the part lies, for errors."""

    def __init__(self, param: str):
        self.rules = Rules()
        self._param = param
        self._writers: dict[str, Callable[[dict[str, Any], str], str]] = {
            "const_string": lambda part, place: quoted(self._text(part, "value", place)),
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": lambda part, place: ANY_TEXT,
            "sequence": lambda part, place: "(" + " ".join(self._elements(part, place)) + ")",
            "or": lambda part, place: alternatives(self._elements(part, place)),
            "tag": self.tag,
            "triggered_tags": self.triggered,
            "tags_with_separator": self._separated,
        }

    def error(self, place: str, what: str) -> InvalidRequest:
        return InvalidRequest(self._param, f"{self._param} is not a structural tag: {place} {what}.", "invalid_grammar")

    def items(self, part: dict[str, Any], name: str, place: str) -> list[Any]:
        value = part.get(name)
        if not isinstance(value, list) or not value:
            raise self.error(f"{place}.{name}", "must be a list that is not empty")
        return value

    def part(self, part: Any, place: str) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in self._writers:
            raise self.error(f"{place}.type", f"is {repr(kind)[:60]}; known are {', '.join(self._writers)}")
        self.check_keys(part, _KEYS[kind], place)
        return self._writers[kind](part, place)

    def check_keys(self, part: dict[str, Any], known: Collection[str], place: str) -> None:
        """Refuses what nobody would heed."""
        for name, value in part.items():
            if name not in known and name != "type" and value not in _NEUTRAL:
                raise self.error(f"{place}.{name[:60]}", "is not served")

    def tag(self, part: dict[str, Any], place: str, begun: str = "") -> str:
        """`begun` is the start of `begin` that has been written already."""
        begin, end = self._text(part, "begin", place), self._text(part, "end", place)
        content = part.get("content")
        rest = quoted(begin.removeprefix(begun))
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            self.check_keys(content, _KEYS["any_text"], f"{place}.content")
            return f"({rest} {self.rules.until(quoted(end))})"
        return f"({rest} {self.part(content, place + '.content')} {quoted(end)})"

    def triggered(self, part: dict[str, Any], place: str) -> str:
        triggers, tags = self.items(part, "triggers", place), self.items(part, "tags", place)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise self.error(f"{place}.triggers", "must hold texts that are not empty")
        by_trigger: dict[str, list[str]] = {}
        for index, tag in enumerate(tags):
            here = f"{place}.tags[{index}]"
            if not isinstance(tag, dict):
                raise self.error(here, "must be an object")
            self.check_keys(tag, _KEYS["tag"], here)
            begin = self._text(tag, "begin", here)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise self.error(f"{here}.begin", "begins with none of the triggers")
            by_trigger.setdefault(trigger, []).append(self.tag(tag, here, trigger))
        calls = [f"{self.rules.until(quoted(trigger))} {alternatives(rests)}" for trigger, rests in by_trigger.items()]
        call = self.rules.add(alternatives(calls))
        many = f"{call}" if part.get("stop_after_first") else f"{call}+" if part.get("at_least_one") else f"{call}*"
        if part.get("stop_after_first"):
            return f"({many})" if part.get("at_least_one") else f"({many} | {ANY_TEXT})"
        return f"({many} {ANY_TEXT})"

    def _separated(self, part: dict[str, Any], place: str) -> str:
        separator = quoted(self._text(part, "separator", place))
        tags = self.items(part, "tags", place)
        tag = alternatives(
            self.part({"type": "tag", **tag} if isinstance(tag, dict) else tag, f"{place}.tags[{index}]")
            for index, tag in enumerate(tags)
        )
        name = self.rules.add(tag)
        many = name if part.get("stop_after_first") else f"{name} ({separator} {name})*"
        return f"({many})" if part.get("at_least_one") else f"({many})?"

    def _json_schema(self, part: dict[str, Any], place: str) -> str:
        schema = part.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise self.error(f"{place}.json_schema", "must be a JSON schema")
        return self.rules.add(json_of(schema))

    def _regex(self, part: dict[str, Any], place: str) -> str:
        return regex_of(self._text(part, "pattern", place))

    def _elements(self, part: dict[str, Any], place: str) -> Sequence[str]:
        return [
            self.part(one, f"{place}.elements[{index}]")
            for index, one in enumerate(self.items(part, "elements", place))
        ]

    def _text(self, part: dict[str, Any], name: str, place: str) -> str:
        value = part.get(name)
        if not isinstance(value, str):
            raise self.error(f"{place}.{name}", "must be a text")
        return value
