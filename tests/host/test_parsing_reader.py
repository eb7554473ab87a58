"""The reader: what comes first is found first, and nothing is held back that need not be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_serve.parsing.reader import Reader, Steps, num_held


def read_until(pieces: Sequence[str], markers: Sequence[str]) -> tuple[str, str | None]:
    reader, shown = Reader(), []

    def program() -> Steps[str | None]:
        return (yield from reader.until(markers, shown.append))

    steps = program()
    for piece in [*pieces, None]:
        if piece is None:
            reader.is_closed = True
        else:
            reader.append(piece)
        try:
            next(steps)
        except StopIteration as end:
            return "".join(shown), end.value
    raise AssertionError("it waits for more than there is")


@pytest.mark.parametrize(
    ("text", "markers", "expected"),
    [
        ("abcabd", ["abd"], ("abc", "abd")),
        ("xabcdey", ["abcde", "bc"], ("xa", "bc")),  # the one that is complete first, as a stream would find it
        ("xabc", ["abcd"], ("xabc", None)),
        ("aab", ["ab"], ("a", "ab")),
        ("", ["a"], ("", None)),
        ("abc", [], ("abc", None)),
        ("<<a>", ["<a>", "<b>"], ("<", "<a>")),
    ],
)
def test_text_up_to_the_first_marker(text: str, markers: list[str], expected: tuple[str, str | None]):
    assert read_until([text], markers) == expected
    assert read_until(list(text), markers) == expected


@given(st.text("ab<", max_size=12), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
def test_what_is_held_back_is_the_longest_beginning_of_a_marker(text: str, markers: list[str]):
    beginnings = {marker[:size] for marker in markers for size in range(len(marker))}
    expected = max((size for size in range(len(text) + 1) if text[len(text) - size :] in beginnings), default=0)
    assert num_held(text, markers) == expected
