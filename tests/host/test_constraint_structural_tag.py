"""Texts that structural tags allow, and texts that they do not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from constraint_walks import Model

from tpu_serve.constraint.compiler import GrammarSpec
from tpu_serve.constraint.source import lark_of
from tpu_serve.request import InvalidRequest


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    model = Model("qwen3", (448, 450))
    yield model
    model.compiler.close()


STRUCTURES = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": [True]}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAGS = [{"type": "tag", "begin": "<t>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</t>"}]
STRUCTURAL_TAGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (STRUCTURES, ["", "hello", "say <f=a>12</f> and <f=b>true</f>.", "<f", "<g=a>"], ["<f=c", "<f=a>x", "<f=a>1</g", "<f=b>1"]),
    ({"format": {"type": "triggered_tags", "triggers": ["<t"], "tags": TAGS}}, ["", "a <t>1</t> b"], ["<t>x", "a <tt"]),
    (
        {"format": {"type": "triggered_tags", "triggers": ["<t"], "tags": TAGS, "at_least_one": True, "stop_after_first": True}},
        ["a <t>1</t>"],
        ["a <t>1</t> b"],
    ),
    ({"format": {"type": "tags_with_separator", "tags": TAGS, "separator": ", "}}, ["", "<t>1</t>, <t>2</t>"], ["<t>1</t><", "a"]),
    (
        {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "<x>"}, {"type": "any_text"}]}},
        ["<x>", "<x>anything"],
        ["y"],
    ),
    (
        {
            "format": {
                "type": "or",
                "elements": [
                    {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
                    {"type": "json_schema", "json_schema": {"const": {"b": 1}}},
                ],
            }
        },
        ["<a>x < y </b> </a>", '{"b": 1}'],
        ["<a>x</a>y", '{"c'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("value", "good", "bad"), STRUCTURAL_TAGS)
def test_structural_tags(model: Model, value: dict[str, Any], good: list[str], bad: list[str]) -> None:
    spec = GrammarSpec("structural_tag", value)
    for text in good:
        assert model.taken(spec, text) == -1, text
    for text in bad:
        assert 0 <= model.taken(spec, text) < len(text), text
    assert model.taken(GrammarSpec("structural_tag", json.dumps(value)), good[0]) == -1


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"format": {"type": ["x"]}}, "format.type"),
        ({"format": {"type": {}}}, "format.type"),
        ({"format": {"type": "any_text", "excludes": ["x"]}}, "format.excludes"),
        ({"format": {**TAG, "content": {"type": "any_text", "excludes": ["x"]}}}, "format.content.excludes"),
        ({"format": {**TAG, "x": 1}}, "format.x"),
        ({"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [{**TAG, "x": 1}]}}, "format.tags[0].x"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "format.style"),
        ({**STRUCTURES, "x": 1}, "structural_tag.x"),
        ({"structures": [{**STRUCTURES["structures"][0], "x": 1}], "triggers": ["<"]}, "structures[0].x"),
    ],
)
def test_what_nobody_would_heed_is_refused(value: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(place)):
        lark_of(GrammarSpec("structural_tag", value), "p")


def test_what_asks_for_nothing_is_taken() -> None:
    content = {"type": "json_schema", "json_schema": {}, "style": "json"}
    tags = [{**TAG, "content": content, "x": None}]
    value = {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "excludes": [], "stop_after_first": False}
    lark_of(GrammarSpec("structural_tag", {"type": "structural_tag", "format": value}), "p")


def test_grammars_that_get_too_large_are_refused() -> None:
    many = {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {}}] * 5000}
    with pytest.raises(InvalidRequest, match="longer than") as caught:
        lark_of(GrammarSpec("structural_tag", {"format": many}), "p")
    assert caught.value.reason == "grammar_too_large"
