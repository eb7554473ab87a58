"""Pieces of llguidance's Lark, written."""

from __future__ import annotations

import json
from collections.abc import Iterable

import llguidance

from tpu_serve.constraint.spec import MAX_CHARACTERS
from tpu_serve.text.tokenizer import Tokenizer

WHITESPACE = "[ \\t\\n\\r]{1,80}"
"""Between the tokens of JSON. Bounded, for a model that has nothing to say would fill its answer with blanks for ever."""
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Behind every grammar, so that line numbers of errors stay: text about which there is no choice may be cut into tokens in any way."""
ANY_TEXT = "/(?s:.*)/"


class GrammarTooLarge(Exception):
    """It has more than `MAX_CHARACTERS`."""


class Rules:
    """The rules of a grammar, named as they come."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._num_characters = 0

    def add(self, body: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = self.reserve()
        self.fill(name, body, attributes)
        return name

    def reserve(self) -> str:
        """The name of a rule that is still to be filled, once."""
        self._rules.append("")
        return f"r{len(self._rules) - 1}"

    def fill(self, name: str, body: str, attributes: str = "") -> None:
        """Raises `GrammarTooLarge`."""
        self._num_characters += len(body)
        if self._num_characters > MAX_CHARACTERS:
            raise GrammarTooLarge
        self._rules[int(name[1:])] = f"{name}{attributes}: {body}"

    def until(self, end: str) -> str:
        """A rule: any text up to the first `end`, and this. An `end` that is a special token ends what is no text by itself."""
        if end.startswith("<["):
            return self.add(f"{ANY_TEXT} {end}")
        return self.add(f"{ANY_TEXT} {end}", "[lazy]")

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])


def quoted(text: str) -> str:
    """A text as a literal; the empty text too."""
    return json.dumps(text, ensure_ascii=False)


def alternatives(parts: Iterable[str]) -> str:
    """One of these expressions."""
    return "(" + " | ".join(parts) + ")"


def regex_of(pattern: str) -> str:
    """Texts that match a pattern as a whole. Digits and letters are those of ASCII, which every dialect of patterns knows as such."""
    return f"/{llguidance.regex_to_lark(pattern, 'dw')}/"


def json_of(schema: object, *, lenient: bool = False) -> str:
    """JSON valid for the schema, with bounded white space. `lenient`: what the compiler does not know of JSON Schema is left out."""
    options: dict[str, object] = {"whitespace_pattern": WHITESPACE}
    if lenient:
        options["lenient"] = True
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": options}
    elif schema is True:
        schema = {"x-guidance": options}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def marker(tokenizer: Tokenizer, text: str) -> str:
    """A mark of a model family: its token where it is a special one, which is no text in a grammar; otherwise its text."""
    token_id = tokenizer.token_id(text)
    return f"<[{token_id}]>" if token_id in tokenizer.special_ids else quoted(text)
