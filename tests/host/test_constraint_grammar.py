"""Masks of grammars against a brute force, and random texts under them against what they had to be."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from constraint_walks import Model

from tpu_serve.constraint.compiler import GrammarCompiler, GrammarSpec
from tpu_serve.constraint.masks import ids_of
from tpu_serve.request import Constraint

EOS = {"qwen3": (448, 450), "gemma4": (1, 106), "mixtral": (2,)}


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Model]]:
    made = {name: Model(name, eos) for name, eos in EOS.items()}
    yield made
    for model in made.values():
        model.compiler.close()


def compiled(model: Model, kind: Any, value: Any = None) -> Constraint:
    return model.compiler.compile_now(GrammarSpec(kind, value), "form")


WORDS = ["abc", "abd", "the cat", "é", "日本", "a", ""]


@pytest.mark.parametrize("name", EOS)
def test_masks_are_all_tokens_that_go_on_as_a_choice(models: dict[str, Model], name: str) -> None:
    """At every place of every text: exactly the tokens whose bytes some text goes on with, and the ends where one is complete."""
    model = models[name]
    data = [word.encode() for word in WORDS]
    start = compiled(model, "choice", WORDS)
    waiting: list[tuple[bytes, Constraint]] = [(b"", start)]
    num_places = 0
    while waiting:
        so_far, constraint = waiting.pop()
        wanted = {
            token_id
            for token_id in model.text_ids
            if any(word.startswith(so_far + model.pieces[token_id]) for word in data)
        }
        finished = so_far in data
        assert model.allowed(constraint) == (wanted | set(model.eos) if finished else wanted), so_far
        assert constraint.is_finished == (not wanted)
        num_places += 1
        for token_id in wanted:
            further = constraint.copy()
            further.accept(token_id)
            waiting.append((so_far + model.pieces[token_id], further))
    assert num_places > 12


def is_number_prefix(text: bytes) -> bool:
    """Begins a text of -?[0-9]{1,4}(\\.[0-9]+)?, written without a regular expression."""
    text = text.removeprefix(b"-")
    whole, point, fraction = text.partition(b".")
    digits = b"0123456789"
    if not all(byte in digits for byte in whole + fraction):
        return False
    return len(whole) <= 4 and (not point or bool(whole))


@pytest.mark.parametrize("name", EOS)
def test_masks_of_a_regex(models: dict[str, Model], name: str) -> None:
    model = models[name]
    constraint = compiled(model, "regex", r"-?\d{1,4}(\.\d+)?")
    so_far = b""
    for piece in (b"-", b"1", b"2", b".", b"0", b"5"):
        wanted = {i for i in model.text_ids if is_number_prefix(so_far + model.pieces[i])}
        complete = bool(re.fullmatch(rb"-?[0-9]{1,4}(\.[0-9]+)?", so_far))
        assert model.allowed(constraint) == (wanted | set(model.eos) if complete else wanted)
        constraint.accept(next(i for i in model.text_ids if model.pieces[i] == piece))
        so_far += piece
    assert not constraint.is_finished


def test_digits_are_those_of_ascii(models: dict[str, Model]) -> None:
    model = models["qwen3"]
    allowed = model.allowed(compiled(model, "regex", r"\d"))
    assert {model.pieces[i] for i in allowed} == {b"%d" % digit for digit in range(10)}


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "😀"]}, "minItems": 1, "maxItems": 3},
        "mood": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "number"}]},
        "child": {"$ref": "#/$defs/child"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {
        "child": {"type": "object", "properties": {"x": {"const": 7}}, "required": ["x"], "additionalProperties": False}
    },
}


def is_person(value: Any) -> bool:
    allowed = {"name", "age", "tags", "mood", "child"}
    return (
        isinstance(value, dict)
        and {"name", "age"} <= value.keys() <= allowed
        and isinstance(value["name"], str)
        and 2 <= len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 130
        and ("tags" not in value or 1 <= len(value["tags"]) <= 3)
        and all(tag in ("red", "grün", "😀") for tag in value.get("tags", ()))
        and (value.get("mood") is None or isinstance(value["mood"], bool | int | float))
        and ("child" not in value or value["child"] == {"x": 7})
    )


@pytest.mark.parametrize("name", EOS)
def test_random_texts_are_valid_for_the_schema(models: dict[str, Model], name: str) -> None:
    model = models[name]
    seen: set[frozenset[str]] = set()
    for seed in range(12):
        token_ids, ended = model.walk(compiled(model, "json_schema", SCHEMA), seed)
        assert ended
        value = json.loads(model.text(token_ids))
        assert is_person(value), value
        seen.add(frozenset(value))
    assert len(seen) > 1, "all texts are of one shape: the walks show too little"


def texts(model: Model, constraint: Callable[[], Constraint], num: int = 15) -> list[str]:
    found = []
    for seed in range(num):
        token_ids, ended = model.walk(constraint(), seed)
        assert ended
        found.append(model.text(token_ids))
    return found


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_random_json_objects(models: dict[str, Model], name: str) -> None:
    model = models[name]
    for text in texts(model, lambda: compiled(model, "json_object")):
        assert isinstance(json.loads(text), dict)
        assert not re.search(r"\s{81}", re.sub(r'"(\\.|[^"\\])*"', "", text))


@pytest.mark.parametrize(
    "pattern",
    ["[a-c]{2,5}", "^(cat|dog)s?$", r"\w{1,4}@[a-z]{1,4}\.(com|org)", "(?i)yes|no", "a/b|c\nd", "[^a-z]{1,3}", "日+"],
)
def test_random_texts_match_the_regex(models: dict[str, Model], pattern: str) -> None:
    for name in ("qwen3", "gemma4"):
        model = models[name]
        for text in texts(model, lambda: compiled(model, "regex", pattern), 6):  # noqa: B023 (called at once)
            assert re.fullmatch(pattern, text), text


def test_blanks_come_to_an_end(models: dict[str, Model]) -> None:
    """A model that has nothing to say could write them for ever."""
    model = models["qwen3"]
    brace, blank, line = (next(i for i in model.text_ids if model.pieces[i] == piece) for piece in (b"{", b" ", b"\n"))
    for kind, value in (("json_object", None), ("json_schema", {"type": "object"}), ("json_schema", True)):
        constraint = compiled(model, kind, value)
        constraint.accept(brace)
        for index in range(80):
            assert {blank, line} <= model.allowed(constraint)
            constraint.accept(blank if index % 2 else line)
        assert not any(model.pieces[i][:1].isspace() for i in model.allowed(constraint))


SUMS = 'start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"'


@pytest.mark.parametrize("grammar", [SUMS, 'root ::= term ("+" term)*\nterm ::= [0-9] [0-9]? | "(" root ")"'])
def test_random_texts_of_a_grammar_can_be_computed(models: dict[str, Model], grammar: str) -> None:
    for text in texts(models["qwen3"], lambda: compiled(models["qwen3"], "grammar", grammar)):
        assert re.fullmatch(r"[0-9+()]+", text)
        eval(re.sub(r"\b0+(?=[0-9])", "", text))  # Python has no numbers with zeros in front


@pytest.mark.parametrize(
    "schema", [True, {}, {"type": ["string", "null"]}, {"enum": [1, "a", None]}, '{"type": "integer"}']
)
def test_schemas_that_are_not_objects(models: dict[str, Model], schema: Any) -> None:
    for text in texts(models["qwen3"], lambda: compiled(models["qwen3"], "json_schema", schema), 5):
        json.loads(text)


def test_keys_come_in_the_order_of_the_schema(models: dict[str, Model]) -> None:
    model = models["qwen3"]
    for keys in (["a", "b"], ["b", "a"]):
        schema = {
            "type": "object",
            "properties": {key: {"const": 1} for key in keys},
            "required": keys,
            "additionalProperties": False,
        }
        (text,) = texts(model, lambda: compiled(model, "json_schema", schema), 1)  # noqa: B023
        assert list(json.loads(text)) == keys


def test_special_tokens_are_no_text(models: dict[str, Model]) -> None:
    for name, model in models.items():
        allowed = model.allowed(compiled(model, "regex", "(?s:.*)"))
        assert allowed & set(model.tokenizer.special_ids) <= model.eos, name
        assert model.eos <= allowed
        assert max(allowed) < model.tokenizer.vocab_size
        # A part of a character may come where the rest still can.
        assert {i for i in model.text_ids if _is_text(model.pieces[i])} <= allowed


def _is_text(piece: bytes) -> bool:
    try:
        return bool(piece.decode())
    except UnicodeDecodeError:
        return False


def test_a_special_token_by_its_name(models: dict[str, Model]) -> None:
    model = models["qwen3"]
    start = model.tokenizer.token_id("<|im_start|>")
    constraint = compiled(model, "grammar", 'start: <|im_start|> "a"')
    assert model.allowed(constraint) == {start}


def test_the_end_is_allowed_only_where_the_grammar_ends(models: dict[str, Model]) -> None:
    model = models["qwen3"]
    constraint = compiled(model, "regex", "ab?")
    first, second = (next(i for i in model.text_ids if model.pieces[i] == piece) for piece in (b"a", b"b"))
    assert not model.allowed(constraint) & model.eos
    with pytest.raises(ValueError, match="not what the grammar allows"):
        constraint.copy().accept(448)
    constraint.accept(first)
    assert model.allowed(constraint) == {second, *model.eos}
    assert not constraint.is_finished
    ended = constraint.copy()
    ended.accept(450)
    assert ended.is_finished
    with pytest.raises(ValueError):
        ended.accept(second)
    constraint.accept(second)
    assert constraint.is_finished
    assert model.allowed(constraint) == set(model.eos)


def test_copies_go_their_own_ways(models: dict[str, Model]) -> None:
    model = models["qwen3"]
    ids = {piece: next(i for i in model.text_ids if model.pieces[i] == piece) for piece in (b"a", b"b", b"c")}
    constraint = compiled(model, "regex", "a(b|c)a")
    constraint.accept(ids[b"a"])
    other = constraint.copy()
    before = other.mask
    constraint.accept(ids[b"b"])
    assert other.mask == before != constraint.mask
    other.accept(ids[b"c"])
    other.accept(ids[b"a"])
    assert other.is_finished
    assert not constraint.is_finished
    again = compiled(model, "regex", "a(b|c)a")
    assert ids[b"a"] in model.allowed(again), "a compiled grammar was kept at another place than its start"
    with pytest.raises(ValueError):
        again.accept(ids[b"b"])
    assert again.mask is not None


def test_a_model_without_an_end(models: dict[str, Model]) -> None:
    """The constraint says by itself that the text is finished; no bit stands for the end that the library needs."""
    tokenizer = models["qwen3"].tokenizer
    whole_words = (tokenizer.vocab_size + 31) // 32 * 32
    for vocab_size in (tokenizer.vocab_size, whole_words):
        compiler = GrammarCompiler(tokenizer, vocab_size, ())
        constraint = compiler.compile_now(GrammarSpec("choice", ["a", "ab"]), "form")
        compiler.close()
        assert constraint.mask is not None
        for piece in (b"a", b"b"):
            assert len(constraint.mask) == whole_words // 8
            allowed = ids_of(constraint.mask)
            assert {tokenizer.token_bytes(i) for i in allowed} - {b"ab"} == {piece}
            assert not constraint.is_finished
            constraint.accept(next(i for i in allowed if tokenizer.token_bytes(i) == piece))
        assert constraint.is_finished
        assert ids_of(constraint.mask) == []


def test_text_may_be_cut_into_tokens_in_any_way(models: dict[str, Model]) -> None:
    model = models["qwen3"]
    text = b"the time"
    for cuts in itertools.islice(itertools.product([False, True], repeat=len(text) - 1), 0, None, 7):
        pieces, last = [], 0
        for index, cut in enumerate([*cuts, True], 1):
            if cut:
                pieces.append(text[last:index])
                last = index
        ids = [next((i for i in model.text_ids if model.pieces[i] == piece), None) for piece in pieces]
        if None in ids:
            continue
        constraint = compiled(model, "choice", [text.decode()])
        for token_id in ids:
            assert token_id is not None
            constraint.accept(token_id)
        assert constraint.is_finished
