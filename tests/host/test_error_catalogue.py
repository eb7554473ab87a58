"""docs/errors.md lists every reason that the code gives, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POSITIONS = {"InvalidRequest": 2, "HttpError": 2, "by_phrase": 2, "unavailable": 1, "conflict": 1, "_body": 2}
"""Where each of these takes its reason among its positional arguments."""
DEFAULTS = {"InvalidRequest": "invalid_value"}
ROW = re.compile(r"^\| `(\w+)` \| ([\d, ]+) \| (.+?) \|$", re.MULTILINE)


def strings(node: ast.expr) -> Iterator[str]:
    """The texts that an expression can be: both sides of a choice; nothing of names, which are read where they come from."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from strings(node.body)
        yield from strings(node.orelse)


def reasons_of(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in POSITIONS:
            continue
        place = POSITIONS[name]
        given = node.args[place : place + 1] or [word.value for word in node.keywords if word.arg == "reason"]
        found.update(text for argument in given for text in strings(argument))
        if not given and name in DEFAULTS:
            found.add(DEFAULTS[name])
    return found


def reasons_in_the_code() -> set[str]:
    sources = [path.read_text() for path in (ROOT / "tpu_serve").rglob("*.py")]
    return set().union(*(reasons_of(text) for text in sources if any(f"{name}(" in text for name in POSITIONS)))


def test_the_page_lists_every_reason_and_no_other():
    page = (ROOT / "docs" / "errors.md").read_text()
    listed = [reason for reason, _, _ in ROW.findall(page)]
    assert len(set(listed)) == len(listed)
    assert set(listed) == reasons_in_the_code()
    assert listed == sorted(listed)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("InvalidRequest(None, 'x')", {"invalid_value"}),
        ("errors.InvalidRequest(None, 'x', 'a', 404)", {"a"}),
        ("InvalidRequest(p, m, 'a' if x else 'b')", {"a", "b"}),
        ("InvalidRequest(p, m, reason='c')", {"c"}),
        ("InvalidRequest(error.param, error.message, error.reason)", set()),
        ("HttpError(500, m, 'd', type='t')", {"d"}),
        ("unavailable(m, 'e', 5)", {"e"}),
        ("other('f', 'f', 'f')", set()),
    ],
)
def test_reasons_are_found_in_code(source: str, expected: set[str]):
    assert reasons_of(source) == expected
