"""Incremental text: the same for any split of the tokens, whole characters only, cut where a brute-force search cuts."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_text_tokenizer import TOKENIZERS

from tpu_serve.text.detokenizer import Detokenizer
from tpu_serve.text.tokenizer import Tokenizer

BYTE_LEVEL = TOKENIZERS["byte_level"]


def forced(text: str, tokenizer: Tokenizer = BYTE_LEVEL) -> list[int]:
    """Token ids of "A|BC": one token for each piece between bars."""
    ids = [tokenizer.encode(piece) for piece in text.split("|")]
    assert all(len(piece) == 1 for piece in ids)
    return [piece[0] for piece in ids]


def run(tokenizer: Tokenizer, pieces: list[list[int]], **options) -> tuple[list[str], str | None, int]:
    """Texts of all pushes, the stop string, the number of tokens of the answer. The last push says that it is the last."""
    detokenizer = Detokenizer(tokenizer, **options)
    deltas = [detokenizer.push(piece, finished=piece is pieces[-1]) for piece in pieces]
    return [delta.text for delta in deltas], deltas[-1].stop, sum(delta.num_tokens for delta in deltas)


def at_once(ids: list[int], tokenizer: Tokenizer = BYTE_LEVEL, **options) -> tuple[str, str | None, int]:
    texts, stop, num_tokens = run(tokenizer, [ids], **options)
    return texts[0], stop, num_tokens


def one_by_one(ids: list[int], tokenizer: Tokenizer = BYTE_LEVEL, **options) -> tuple[str, str | None, int]:
    texts, stop, num_tokens = run(tokenizer, [*([token_id] for token_id in ids), []], **options)
    return "".join(texts), stop, num_tokens


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        ("ABC|DEF|G", ["DE"], ("ABC", "DE", 2)),
        ("DEF|G|HI|J|K", ["DEFGHIJ"], ("", "DEFGHIJ", 4)),
        (" Alice|!|\n", ["\n", "Alice:"], (" Alice!", "\n", 3)),
        (" N| O| P| Q| R", ["O P Q"], (" N ", "O P Q", 4)),
        ("ABC|DEF", ["CDEF", "BCD"], ("A", "BCD", 2)),  # completed first, though it starts and is listed otherwise
        ("ABC|DEF", ["D", "CD"], ("ABC", "D", 2)),  # completed by the same character: the list decides
        ("ABC|DEF", ["CD", "D"], ("AB", "CD", 2)),
        ("ABC|DEF", ["ABCDEFG"], ("ABCDEF", None, 2)),  # never completed: nothing is lost
        ("a|a|a|a|b", ["aab"], ("aa", "aab", 5)),  # a beginning that fails hides a later one
        ("ABC|<think>|ABC", ["<think>"], ("ABC", "<think>", 2)),
    ],
)
def test_stop_strings_cut_the_text(tokens, stop, expected):
    ids = forced(tokens)
    assert at_once(ids, stop=stop) == one_by_one(ids, stop=stop) == expected


def test_the_stop_string_may_be_included_but_nothing_after_it():
    ids = forced("ABC|DEF|G")
    assert at_once(ids, stop=["DE"], include_stop_str_in_output=True) == ("ABCDE", "DE", 2)


def test_only_a_possible_beginning_of_a_stop_string_is_held_back():
    texts, _, _ = run(BYTE_LEVEL, [[token_id] for token_id in forced("ABC|DEF|G|HI|ABC|DEF|!")], stop=["FGHX", "DEF!"])
    assert texts == ["ABC", "", "DE", "FGHI", "ABC", "", ""]


def test_without_stop_strings_nothing_is_held_back():
    texts, _, _ = run(BYTE_LEVEL, [[token_id] for token_id in forced("ABC|DEF|G")])
    assert texts == ["ABC", "DEF", "G"]


@pytest.mark.parametrize(
    ("tokens", "stop", "min_tokens", "expected"),
    [
        ("a|a|a|a|a|b|a", ["a"], 5, ("aaaaab", "a", 7)),
        ("a|a|a|a|a", ["a"], 5, ("aaaaa", None, 5)),
        ("ABC|DEF|G", ["CDE"], 1, ("AB", "CDE", 2)),  # it may begin in the first tokens
        ("ABC|DEF|G", ["CDE"], 2, ("ABCDEFG", None, 3)),
        # what was passed over is held for a longer one, and does not stop later
        ("a|b|a|b|b", ["ab", "ababb"], 4, ("", "ababb", 5)),
        ("a|b|a|b|a", ["ab", "ababb"], 4, ("ababa", None, 5)),
    ],
)
def test_stop_strings_that_the_first_tokens_complete_are_text(tokens, stop, min_tokens, expected):
    ids = forced(tokens)
    assert at_once(ids, stop=stop, min_tokens=min_tokens) == expected
    assert one_by_one(ids, stop=stop, min_tokens=min_tokens) == expected


def test_a_special_token_among_the_first_tokens_does_not_stop():
    end = BYTE_LEVEL.token_id("<|im_end|>")
    ids = [end, *forced("ABC"), end]
    for texts in (at_once, one_by_one):
        assert texts(ids, stop=["<|im_end|>"], min_tokens=2) == ("ABC", "<|im_end|>", 3)
        assert texts(ids, stop=["<|im_end|>"], min_tokens=3) == ("ABC", None, 3)


def test_special_tokens_that_are_asked_for_are_text():
    end = BYTE_LEVEL.token_id("<|im_end|>")
    ids = [*forced("ABC"), end]
    for texts in (at_once, one_by_one):
        assert texts(ids, shown_token_ids={end}) == ("ABC<|im_end|>", None, len(ids))
        assert texts(ids, shown_token_ids={end}, stop=["C<|im"])[:2] == ("AB", "C<|im")
        assert texts(ids, shown_token_ids={end}, stop=["<|im_end|>"])[:2] == ("ABC", "<|im_end|>")


def test_a_special_token_stops_by_its_text():
    end = BYTE_LEVEL.token_id("<|im_end|>")
    ids = [*forced("ABC|<"), end, *forced("DEF")]
    for texts in (at_once, one_by_one):
        assert texts(ids, stop=["<|im_end|>"]) == ("ABC<", "<|im_end|>", 3)
        assert texts(ids, stop=["<|im_end|>"], skip_special_tokens=False) == ("ABC<", "<|im_end|>", 3)
        assert texts(ids, stop=["<|im_end|>"], include_stop_str_in_output=True) == ("ABC<<|im_end|>", "<|im_end|>", 3)
        assert texts(ids, stop=["never"]) == ("ABC<DEF", None, 4)
        assert texts(ids, stop=["never"], skip_special_tokens=False) == ("ABC<<|im_end|>DEF", None, 4)
        # spelled out by ordinary tokens it is text like any other
        assert texts(list(b"a<|im_end|>b"), stop=["<|im_end|>"]) == ("a", "<|im_end|>", 11)
        # it also closes the character before it, which may complete another stop string
        assert texts([0xF0, 0x9F, end], stop=["<|im_end|>"]) == ("\ufffd", "<|im_end|>", 3)
        assert texts([0xF0, 0x9F, end], stop=["<|im_end|>", "\ufffd"]) == ("", "\ufffd", 3)


def test_characters_are_whole_in_every_chunk():
    text = "é😀x漢"
    data = list(text.encode())
    texts, _, _ = run(BYTE_LEVEL, [[byte] for byte in data])
    assert texts == ["", "é", "", "", "", "😀", "x", "", "", "漢"]


@pytest.mark.parametrize("name", ["byte_level", "gemma", "mixtral"])
def test_a_character_cut_by_the_end_is_one_replacement(name):
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer.token_id("a"), *(tokenizer.encode("😀")[-4:-1])]
    assert at_once(ids, tokenizer) == one_by_one(ids, tokenizer) == ("a\ufffd", None, 4)
    assert tokenizer.decode(ids) == "a\ufffd"


def test_random_bytes_never_fail():
    generator = random.Random(0)
    for _ in range(500):
        ids = [generator.choice((0xC3, 0x28, 0xF0, 0x9F, 0x98, 0x80, 0x41, 0xED, 0xFF)) for _ in range(20)]
        assert at_once(ids)[0] == one_by_one(ids)[0] == bytes(ids).decode("utf-8", "replace") == BYTE_LEVEL.decode(ids)


def test_ids_outside_the_vocabulary_give_no_text_and_split_no_character():
    assert at_once([-1, 0xC3, BYTE_LEVEL.vocab_size, 2**70, 0xA9], stop=["x"]) == ("é", None, 5)


def test_the_first_token_after_a_prompt_keeps_its_space():
    mixtral, gemma = TOKENIZERS["mixtral"], TOKENIZERS["gemma"]
    word, begin = mixtral.token_id("▁ab"), mixtral.token_id("<s>")
    prompt = mixtral.encode("cd")
    assert at_once([word, word], mixtral)[0] == mixtral.decode([word, word]) == "ab ab"
    assert at_once([word], mixtral, prompt_token_ids=[begin])[0] == "ab"
    assert at_once([word], mixtral, prompt_token_ids=[begin], skip_special_tokens=False)[0] == " ab"
    assert mixtral.decode(prompt) + at_once([word], mixtral, prompt_token_ids=prompt)[0] == "cd ab"
    assert at_once([word], gemma)[0] == " ab"


def test_a_character_left_open_by_the_prompt_is_not_joined():
    tokenizer = TOKENIZERS["mixtral"]
    first, last = tokenizer.token_id("<0xC3>"), tokenizer.token_id("<0xA9>")
    assert tokenizer.decode([first, last]) == "é"
    assert at_once([last], tokenizer, prompt_token_ids=[first])[0] == "\ufffd"


def test_after_the_end_pushes_are_ignored():
    detokenizer = Detokenizer(BYTE_LEVEL, stop=["DE"])
    assert detokenizer.push(forced("ABC|DEF")).stop == "DE"
    late = detokenizer.push(forced("G"), finished=True)
    assert (late.text, late.stop, late.num_tokens) == ("", "DE", 0)
    detokenizer = Detokenizer(BYTE_LEVEL)
    detokenizer.push([], finished=True)
    assert detokenizer.push(forced("G")).num_tokens == 0


def num_settled(data: bytes) -> int:
    """Characters of `data` that no further byte can change. Found by trying whether a continuation byte joins the last one."""
    lengths = [len((data + more).decode("utf-8", "replace")) for more in (b"", b"\x80", b"\x90", b"\xa0")]
    return lengths[0] - (lengths[0] in lengths[1:])


def brute_force(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], include: bool, min_tokens: int = 0
) -> tuple[str, str | None, int]:
    """Looks at every end in the finished text, in order, for every stop string, in order; then for the token that settles it."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    for end in range(1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                data, num_tokens = b"", 0
                while num_tokens < len(ids):
                    data += tokenizer.token_bytes(ids[num_tokens])
                    num_tokens += 1
                    if num_settled(data.removeprefix(b" " * tokenizer.num_leading_spaces_dropped)) >= end:
                        break
                if num_tokens <= min_tokens:
                    continue
                return text[: end if include else end - len(string)], string, num_tokens
    return text, None, len(ids)


@st.composite
def splits(draw, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def dense_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Few different tokens, so that stop strings overlap themselves and each other, and characters break."""
    tokenizer = TOKENIZERS[name]
    words = ["a", "b", "ab", "é", "😀", "<s>", "<|im_end|>", "<think>", "▁a", "▁ab", " Alice", "ABC"]
    found = {token_id for word in words for token_id in tokenizer.encode(word)} - {0}
    return st.lists(st.sampled_from([*sorted(found), 2**40]), max_size=16)


@pytest.mark.parametrize("name", ["byte_level", "mixtral", "gemma", "embedded"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_text_of_one_piece(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(dense_ids(name) | st.lists(st.integers(-1, tokenizer.vocab_size + 1), max_size=16))
    skip = data.draw(st.booleans())
    texts, stop, num_tokens = run(tokenizer, data.draw(splits(ids)), skip_special_tokens=skip)
    assert ("".join(texts), stop, num_tokens) == (tokenizer.decode(ids, skip_special_tokens=skip), None, len(ids))


@pytest.mark.parametrize("name", ["byte_level", "mixtral", "gemma"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_where_brute_force_does(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(dense_ids(name))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assume(text)
    inside = st.integers(0, len(text) - 1).flatmap(
        lambda start: st.integers(1, 6).map(lambda length: text[start : start + length])
    )
    stop = data.draw(st.lists(inside | st.text("ab\ufffd<", min_size=1, max_size=5), min_size=1, max_size=4))
    include, min_tokens = data.draw(st.booleans()), data.draw(st.sampled_from([0, 0, 1, 2, 5]))
    texts, matched, num_tokens = run(
        tokenizer,
        data.draw(splits(ids)),
        stop=stop,
        include_stop_str_in_output=include,
        skip_special_tokens=False,
        min_tokens=min_tokens,
    )
    assert ("".join(texts), matched, num_tokens) == brute_force(tokenizer, ids, stop, include, min_tokens)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_special_tokens_as_stop_strings_give_the_same_for_any_split(data):
    ids = data.draw(dense_ids("byte_level"))
    stop = data.draw(
        st.lists(st.sampled_from(["<|im_end|>", "<|", "ab", "\ufffd"]), min_size=1, max_size=3, unique=True)
    )
    texts, matched, num_tokens = run(BYTE_LEVEL, data.draw(splits(ids)), stop=stop)
    assert ("".join(texts), matched, num_tokens) == at_once(ids, stop=stop)
    if matched is None:
        assert "".join(texts) == BYTE_LEVEL.decode(ids)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_text_is_shown_as_early_as_possible(data):
    """After each push the hidden text is the longest end that a stop string begins with, and an incomplete character."""
    ids = data.draw(st.lists(st.sampled_from([*b"ab", *"é".encode()]), max_size=16))
    stop = data.draw(st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=3))
    detokenizer, shown = Detokenizer(BYTE_LEVEL, stop=stop), ""
    for count, token_id in enumerate(ids, start=1):
        delta = detokenizer.push([token_id])
        shown += delta.text
        if delta.stop is not None:
            return
        data_so_far = bytes(ids[:count])
        settled = data_so_far.decode("utf-8", "replace")[: num_settled(data_so_far)]
        held = max(
            n for n in range(len(settled) + 1) if any(s[:n] == settled[len(settled) - n :] and n < len(s) for s in stop)
        )
        assert shown == settled[: len(settled) - held]
