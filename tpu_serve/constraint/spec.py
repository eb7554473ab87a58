"""What a request may ask its answer to look like, and the limits that need no compiler."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from tpu_serve.request import InvalidRequest

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "lark"]
MAX_NESTING = 64
"""Most objects and lists within each other in a schema."""
MAX_CHARACTERS = 262_144
"""Longest grammar, and longest schema written as JSON."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A form that an answer must have.

    Attributes:
      kind: what `value` is.
      value: `json_schema`: a schema as a dict, a boolean or JSON text; `json_object`: ignored; `regex`: a pattern that the whole
        answer matches; `choice`: a list of texts; `grammar`: Lark or GBNF; `structural_tag`: a dict or JSON text;
        `lark`: Lark of the server's own.
    """

    kind: Kind
    value: Any = None

    def key(self, param: str) -> str:
        """The same for equal specs; the order of keys counts, for it is the order of the answer's.

        Raises:
          InvalidRequest: `param` is too long, nests too deeply or is not what its kind asks for.
        """
        check_nesting(self.value, param)
        try:
            text = self.value if isinstance(self.value, str) else json.dumps(self.value, ensure_ascii=False)
            text.encode()
        except (TypeError, ValueError) as error:  # a lone surrogate is a ValueError too
            raise InvalidRequest(param, f"{param} is not valid JSON or Unicode: {error}.", "invalid_grammar") from error
        if len(text) > MAX_CHARACTERS:
            raise InvalidRequest(
                param,
                f"{param} is {len(text):,} characters long; at most {MAX_CHARACTERS:,} are allowed.",
                "grammar_too_large",
            )
        return f"{self.kind} {'text' if isinstance(self.value, str) else 'value'} {text}"


def parsed(value: object, param: str) -> Any:
    """The value, or what it says where it is JSON text. Raises `InvalidRequest`."""
    if not isinstance(value, str):
        return value
    try:
        result = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(param, f"{param} is not valid JSON: {error}.", "invalid_grammar") from error
    check_nesting(result, param)
    return result


def check_nesting(value: object, param: str) -> None:
    """Raises `InvalidRequest` for more objects and lists within each other than are allowed. No value is too deep to be looked at."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list | tuple)]:
        depth += 1
        if depth > MAX_NESTING:
            raise InvalidRequest(
                param,
                f"{param} nests more than {MAX_NESTING} objects and lists, the most allowed.",
                "grammar_too_large",
            )
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
