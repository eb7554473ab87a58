"""Token ids, bytes and text: byte-level and SentencePiece-style vocabularies built here, and the embedded one."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tpu_serve.config import EMBEDDED_MODEL, ConfigError
from tpu_serve.request import InvalidRequest
from tpu_serve.text.tokenizer import Tokenizer

MERGED = ("ABC", "DEF", "HI", " Alice", "!", "?\n", '[{"', "}\n", " N", " O", " P", " Q", " R")
"""Tokens of more than one byte, so that characters and stop strings straddle tokens on purpose."""


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE: token b is byte b for every byte, then MERGED, then a special token and a visible added one."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def spelled(text: str) -> str:
        return alphabet.pre_tokenize_str(text)[0][0]

    # Printable bytes stand for themselves, the others take the alphabet's further characters in order.
    letters = pre_tokenizers.ByteLevel.alphabet()
    further = iter(sorted(letter for letter in letters if ord(letter) > 255))
    vocabulary = {chr(byte) if chr(byte) in letters else next(further): byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for text in MERGED:
        token = spelled(text)
        for end in range(2, len(token) + 1):
            if token[:end] not in vocabulary:
                vocabulary[token[:end]] = len(vocabulary)
                merges.append((token[: end - 1], token[end - 1]))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = alphabet
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("｜▁", special=False)])
    return backend


def sentence_piece_backend(*, drops_leading_space: bool) -> tokenizers.Tokenizer:
    """SentencePiece-style BPE with byte fallback: Mixtral's decoder drops one leading space, Gemma's none."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij.,!<>0x"]
    merged = ["▁a", "ab", "▁ab", "▁▁", "▁▁▁▁", "cd", "▁cd"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *merged])}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁"), ("▁▁", "▁▁"), ("c", "d"), ("▁", "cd")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if drops_leading_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return backend


BACKENDS = {
    "byte_level": byte_level_backend(),
    "mixtral": sentence_piece_backend(drops_leading_space=True),
    "gemma": sentence_piece_backend(drops_leading_space=False),
    "embedded": tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json")),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}

texts = st.text(st.sampled_from("abcd ▁.<0x>é“😀漢\n") | st.characters(exclude_categories=["Cs"]), max_size=20)


def random_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_text_of_encoded_text_is_the_librarys(name, data):
    tokenizer, backend = TOKENIZERS[name], BACKENDS[name]
    ids = tokenizer.encode(data.draw(texts))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "embedded"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_text_of_any_byte_level_ids_is_the_librarys(name, data):
    tokenizer, backend = TOKENIZERS[name], BACKENDS[name]
    ids = data.draw(random_ids(tokenizer))
    assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_joined_token_bytes_are_the_utf8_of_the_text(name, data):
    tokenizer = TOKENIZERS[name]
    text = data.draw(texts)
    ids = tokenizer.encode(text)
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert joined == (b" " if name == "mixtral" and ids else b"") + shown.encode()


def test_split_characters_have_bytes_though_no_text():
    """Alternatives shown next to a token are often part of a character: their bytes must not be lost."""
    for name in ("byte_level", "gemma"):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode("“")
        assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"\xe2", b"\x80", b"\x9c"]
        assert [tokenizer.token_text(token_id) for token_id in ids] == ["\ufffd"] * 3


def test_token_texts_of_a_prompt_join_to_the_prompt():
    tokenizer = TOKENIZERS["embedded"]
    prompt = "\n1. Carol has 20"
    assert "".join(tokenizer.token_text(token_id) for token_id in tokenizer.encode(prompt)) == prompt


def test_spellings_are_those_of_the_vocabulary():
    tokenizer = TOKENIZERS["embedded"]
    ids = tokenizer.encode("Bob has 20é<|im_end|>")
    spellings = [tokenizer.token_spelling(token_id) for token_id in ids]
    assert [tokenizer.token_id(spelling) for spelling in spellings] == ids
    assert "".join(spellings) == "BobĠhasĠ20Ã©<|im_end|>"


def test_added_tokens_are_literal_text():
    backend = byte_level_backend()
    backend.add_tokens(["naïve"])  # every letter is also one of the byte alphabet, yet the token is not six bytes
    tokenizer = Tokenizer(backend)
    text = "a<think>｜▁naïve<|im_end|>"
    ids = tokenizer.encode(text)
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "a<think>｜▁naïve"
    assert tokenizer.token_text(ids[-1]) == "<|im_end|>"
    assert tokenizer.special_ids == {ids[-1]} == {tokenizer.token_id("<|im_end|>")}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_outside_the_vocabulary_give_no_text(name):
    tokenizer = TOKENIZERS[name]
    inside = tokenizer.encode("ab")
    outside = [-1, tokenizer.vocab_size, 2**31, 2**63, 2**70]
    assert tokenizer.decode([*outside, *inside, *outside]) == "ab"
    assert {tokenizer.token_text(token_id) for token_id in outside} == {""}
    assert {tokenizer.token_spelling(token_id) for token_id in outside} == {""}


def test_one_leading_space_is_dropped_only_where_the_decoder_says_so():
    for name, expected in (("mixtral", " ab"), ("gemma", "  ab")):
        tokenizer = TOKENIZERS[name]
        assert tokenizer.decode([tokenizer.token_id("▁"), tokenizer.token_id("▁ab")]) == expected
        assert tokenizer.decode([tokenizer.token_id("<s>"), tokenizer.token_id("▁▁"), 90]) == expected[:-2] + "W"


def test_a_tokenizer_without_decoder_joins_words_with_spaces():
    backend = tokenizers.Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    assert Tokenizer(backend).decode([0, 1, 1]) == backend.decode([0, 1, 1]) == "one two two"


def test_truncation_and_padding_of_the_file_are_off():
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    assert len(Tokenizer(backend).encode("x" * 50)) == 50


def test_lone_surrogates_are_refused():
    with pytest.raises(InvalidRequest, match="surrogate"):
        TOKENIZERS["embedded"].encode("a\ud83d")


def test_threads_share_a_tokenizer():
    tokenizer = TOKENIZERS["embedded"]
    text = "The quick brown fox. 漢字 😀\n" * 500
    expected = tokenizer.encode(text)
    with ThreadPoolExecutor(4) as pool:
        assert all(ids == expected for ids in pool.map(tokenizer.encode, [text] * 8))
    assert tokenizer.decode(expected) == text


def test_loading_the_embedded_folder():
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    assert tokenizer.vocab_size == 1536
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", None)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert len(tokenizer.special_ids) == 3  # <think> and the tool tags stay visible
    assert isinstance(tokenizer.chat_template_source, str)


def _folder(path: Path, **files: object) -> Path:
    byte_level_backend().save(str(path / "tokenizer.json"))
    for name, value in files.items():
        file = path / name.replace("__", "/").replace("_jinja", ".jinja")
        file.parent.mkdir(exist_ok=True)
        if isinstance(value, str):
            file.write_text(value)
        else:
            file.with_suffix(".json").write_text(json.dumps(value))
    return path


def test_special_tokens_may_be_objects_and_in_either_file(tmp_path):
    folder = _folder(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<s>"},
            "eos_token": "<|im_end|>",
            "pad_token": None,
            "add_bos_token": True,
        },
        special_tokens_map={"eos_token": "</s>", "unk_token": {"content": "<unk>"}},
    )
    assert Tokenizer.load(folder).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config": {"chat_template": [{"name": "default", "template": "A"}]}}, {"default": "A"}),
        ({"tokenizer_config": {"chat_template": "A"}, "chat_template": {"chat_template": "B"}}, "B"),
        ({"chat_template": {"chat_template": "B"}, "chat_template_jinja": "C"}, "C"),
        (
            {"chat_template_jinja": "C", "additional_chat_templates__tool_use_jinja": "D"},
            {"default": "C", "tool_use": "D"},
        ),
    ],
)
def test_where_chat_templates_are_found(tmp_path, files, expected):
    assert Tokenizer.load(_folder(tmp_path, **files)).chat_template_source == expected


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(ConfigError, match=rf"{tmp_path} has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    _folder(tmp_path, tokenizer_config={"chat_template": 3})
    with pytest.raises(ConfigError, match="chat template"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match=rf"{tmp_path}/tokenizer\.json cannot be used"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "decoder", [decoders.WordPiece(), decoders.CTC(), decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()])]
)
def test_decoders_that_are_not_about_bytes_are_refused(decoder):
    backend = byte_level_backend()
    backend.decoder = decoder
    with pytest.raises(ConfigError, match=r"decoder step .* is not supported"):
        Tokenizer(backend)
