"""Incremental text on vocabularies of the real sizes: no character lost, doubled, broken or late, wherever tokens end.

Qwen3, Qwen3.5 and o200k are real, and skipped (saying so) where they cannot be downloaded; `gemma_like` is built with
random words. What a text must be is computed from the bytes that vocabularies.py knows of each token, never asked of
the code under test.
"""

import random
import unicodedata
from itertools import accumulate

import pytest
from test_text_detokenizer import num_settled
from vocabularies import Vocabulary, gemma_like, o200k, qwen3, qwen3_5

from tpu_serve.text.detokenizer import Detokenizer

pytestmark = pytest.mark.timeout(900)

MAKERS = {"qwen3": qwen3, "qwen3_5": qwen3_5, "o200k": o200k, "gemma_like": gemma_like}

TEXTS = {
    "english": "The quick brown fox jumps over the lazy dog; it's 3.14159 and 1,000,000 times   faster!",
    "leading spaces": "   three spaces, then\u00a0none, and trailing ones   ",
    "vietnamese": "Tiếng Việt có dấu: Nguyễn Thị Phượng đọc sách ở Huế.",
    "decomposed": unicodedata.normalize("NFD", "Ấn Độ, Ṩ, ǖ, ñandú, 한국어, が") + " A\u030a\u0323\u0301 ﬁ Å K Ω",
    "stacked marks": "Z̴̨͎a̸͇͑l̶̰̈́g̷̱̽o̵͉͗ q̣̇ q̣̇ \u0301alone",
    "emoji": "👨‍👩‍👧‍👦🏳️‍🌈🏴‍☠️👍🏽1️⃣🇩🇪🇯🇵👩🏿‍🚀🧑‍🤝‍🧑☺︎☺️🫠 👨‍\u200d",
    "flag of tags": "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f.",
    "hebrew": "בְּרֵאשִׁית בָּרָא אֱלֹהִים \u200f(א)\u200e 12:30",
    "arabic": "بِسْمِ ٱللَّهِ \u202bمرحبا\u202c\u2066abc\u2069 ﷽ ۱۲۳ لا",
    "indic": "क्षत्रिय ज़िंदगी — தமிழ் நிகண்டு বাংলা ক্ষ മലയാളം\u200dൻ ಕನ್ನಡ",
    "south-east asian": "กำลังทดสอบภาษาไทย ສະບາຍດີ မြန်မာဘာသာ ភាសាខ្មែរ",
    "chinese": "漢字測試：久久夜色，人之初性本善。𠜎𠝹𡃁𪚥 㐀 〇",
    "japanese": "日本語のトークナイザー、ﾊﾝｶｸとカ゚と𛀁。",
    "korean": "한국어 토크나이저 ᄒᆞᆫ글 ㅋㅋㅋ 뷁",
    "old scripts": "𒀀𒁀 𓂀𓆣 𐎠𐎼 ᚠᛇᚻ ⲁⲃ Ⴀ ꙮ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕏",
    "code": 'def f(x):\n\treturn {"a": [x**2 for _ in range(10)]}  # ∀x∈ℝ\r\n\r\n\n\n    <div class="a">&amp;</div>\n',
    "control characters": "".join(chr(code) for code in range(0xA1) if code not in (0x20,)) + "\x00\x00 \x1b[31m",
    "invisible": "\ufeffBOM \u200b\u200c\u200d\u2060 \u2028\u2029\u0085 \u00ad soft \u034f",
    "not characters": "\ufffe\uffff\U0001ffff\U0010ffff \ue000\U000f0000 \ufffd\ufffd and \ufffd",
    "looks like tokens": "<0x41><0xE2> ▁▁a ▁ Ġ Ċ âĢľ <|im|> <| think> <unk ></s",
    "many spaces": " " * 70 + "\n" * 40 + "\t" * 33 + "\r\n \n" * 5,
    "long word": "Donau" + "dampfschiff" * 40 + "𠜎" * 40 + "ﷺ" * 30,
    "random bytes": random.Random(1).randbytes(150).decode("utf-8", "replace"),
    "random bytes of few values": bytes(random.Random(2).choices(b"\xe2\x80\x9c\xf0\x9f\x98\x80a", k=150)).decode(
        "utf-8", "replace"
    ),
    "empty": "",
}

ALPHABET = [
    # Assigned so early that every edition of Unicode composes them alike.
    *(chr(code) for code in range(0x30000) if unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Cs")),
    *("😀", "👩", "\u200d", "\ufe0f", "🏽", "🇩", "\u0301", "\u0323", " ", "a", "\n") * 3000,
]


NAMES = [*(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "qwen3_5", "o200k")), "gemma_like"]
"""The real ones are downloaded."""


@pytest.fixture(scope="module", params=NAMES)
def vocabulary(request) -> Vocabulary:
    return MAKERS[request.param]()


def chunks(vocabulary: Vocabulary, pieces: list[list[int]], **options) -> list[str]:
    """Text of every push, and of a last empty one that says that it is the last."""
    detokenizer = Detokenizer(vocabulary.tokenizer, **options)
    return [detokenizer.push(piece, finished=False).text for piece in pieces] + [
        detokenizer.push([], finished=True).text
    ]


def check_everywhere(vocabulary: Vocabulary, ids: list[int], *, skip: bool = False) -> str:
    """The text of a sequence, which its bytes give at once, token by token, and cut in two at every position."""
    options = {"skip_special_tokens": skip}
    expected = vocabulary.data(ids, skip).decode("utf-8", "replace")
    assert vocabulary.tokenizer.decode(ids, **options) == expected, ids

    one_by_one = chunks(vocabulary, [[token_id] for token_id in ids], **options)
    assert "".join(one_by_one) == expected, ids
    shown, data = "", b""
    for token_id, text in zip(ids, one_by_one, strict=False):
        shown += text
        data += vocabulary.data([token_id], skip)
        # a whole character is shown at once, and nothing that might still become another one
        assert shown == expected[: num_settled(data)], ids

    for cut in range(len(ids) + 1):
        assert "".join(chunks(vocabulary, [ids[:cut], ids[cut:]], **options)) == expected, (ids, cut)
    return expected


def is_utf8(data: bytes) -> bool:
    try:
        return data.decode() is not None
    except UnicodeDecodeError:
        return False


def test_every_token_is_its_bytes(vocabulary):
    """Also the rows beyond the tokenizer: models have more of them than there are tokens."""
    tokenizer = vocabulary.tokenizer
    assert tokenizer.vocab_size < len(vocabulary.pieces)
    assert tokenizer.special_ids == vocabulary.special
    rows = range(len(vocabulary.pieces))
    assert [tokenizer.token_bytes(token_id) for token_id in rows] == list(vocabulary.pieces)
    assert not any(vocabulary.pieces[tokenizer.vocab_size :])
    assert all(vocabulary.pieces[: tokenizer.vocab_size])


def test_a_long_answer_of_random_tokens(vocabulary):
    ids = random.Random(0).sample(range(len(vocabulary.pieces)), k=60_000)
    texts = chunks(vocabulary, [[token_id] for token_id in ids])
    assert "".join(texts) == vocabulary.data(ids, True).decode("utf-8", "replace")


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_comes_back(vocabulary, name):
    normal = vocabulary.normalise(TEXTS[name])
    ids = vocabulary.tokenizer.encode(TEXTS[name], add_special_tokens=False)
    assert check_everywhere(vocabulary, ids) == normal
    assert vocabulary.backend.decode(ids, skip_special_tokens=False) == normal
    # the text up to a token has a U+FFFD only where the text itself has one
    detokenizer, shown = Detokenizer(vocabulary.tokenizer), ""
    for token_id in ids:
        shown += detokenizer.push([token_id]).text
        assert normal.startswith(shown)


@pytest.mark.parametrize("name", TEXTS)
def test_an_answer_may_end_inside_a_character(vocabulary, name):
    """The text as single bytes, ended after each: whole characters, and one U+FFFD at the end for a part of one."""
    data = vocabulary.normalise(TEXTS[name]).encode()[:200]
    detokenizer, shown = Detokenizer(vocabulary.tokenizer), ""
    for count, byte in enumerate(data, start=1):
        shown += detokenizer.push([vocabulary.byte_ids[byte]]).text
        whole = data[:count].decode("utf-8", "ignore")
        assert shown == whole
        part = "\ufffd" if len(whole.encode()) < count else ""
        ids = [vocabulary.byte_ids[byte] for byte in data[:count]]
        assert "".join(chunks(vocabulary, [ids[:-1], ids[-1:]])) == vocabulary.tokenizer.decode(ids) == whole + part


def test_bytes_that_can_be_no_character_are_shown_at_once(vocabulary):
    """Among them the first two of a surrogate, which Python's decoder keeps for a third one."""
    for first in range(0xC0, 0x100):
        for second in (*range(0x80, 0xC0, 4), 0x41, 0x7F, 0xBF, 0xC2, 0xED):
            data = bytes([first, second])
            texts = chunks(vocabulary, [[vocabulary.byte_ids[first]], [vocabulary.byte_ids[second]]])
            expected = data.decode("utf-8", "replace")
            assert "".join(texts[:2]) == expected[: num_settled(data)], data
            assert "".join(texts) == expected, data


def test_random_texts_come_back(vocabulary):
    generator = random.Random(3)
    for _ in range(300):
        text = "".join(generator.choices(ALPHABET, k=generator.randrange(1, 60)))
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)
        shown = "".join(chunks(vocabulary, [[token_id] for token_id in ids]))
        assert shown == vocabulary.tokenizer.decode(ids) == vocabulary.normalise(text), repr(text)


@pytest.mark.parametrize("kind", ["any row", "parts of characters", "with special tokens", "nowhere"])
def test_random_tokens(vocabulary, kind):
    """Tokens as no text has them."""
    num_rows, tokenizer = len(vocabulary.pieces), vocabulary.tokenizer
    parts = [token_id for token_id, piece in enumerate(vocabulary.pieces) if not is_utf8(piece)]
    assert len(parts) >= 128, "every vocabulary has at least the bytes that are no characters"
    added = [*vocabulary.special, *range(min(vocabulary.special), min(vocabulary.special) + 20)]
    sources = {
        "any row": [range(num_rows)],
        "parts of characters": [parts],
        "with special tokens": [added, parts, range(num_rows)],
        "nowhere": [parts, range(tokenizer.vocab_size, num_rows), (-1, -(2**40), num_rows, 2**31, 2**63, 2**70)],
    }[kind]
    generator = random.Random(kind)
    for _ in range(60):
        ids = [generator.choice(generator.choice(sources)) for _ in range(generator.randrange(30))]
        check_everywhere(vocabulary, ids, skip=generator.random() < 0.5)


def test_stop_strings_are_found_across_tokens(vocabulary):
    """Random ends of random pieces of the texts, against a search in the finished text."""
    generator = random.Random(5)
    num_found_across = 0
    for text in TEXTS.values():
        normal = vocabulary.normalise(text)
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)
        ends = list(accumulate((len(vocabulary.data([token_id])) for token_id in ids), initial=0))
        for _ in range(10 if normal else 0):
            starts = [generator.randrange(len(normal)) for _ in range(generator.randrange(1, 4))]
            stop = [normal[start : start + generator.randrange(1, 13)] for start in starts] + ["never \u0378"]
            end, matched = min(((normal.find(s) + len(s), s) for s in stop[:-1]), key=lambda found: found[0])
            cut = normal[: end - len(matched)]
            num_tokens = next(count for count, size in enumerate(ends) if size >= len(normal[:end].encode()))
            num_found_across += ends[num_tokens - 1] > len(cut.encode())

            for include in (False, True):
                size = generator.randrange(1, 5)
                detokenizer = Detokenizer(vocabulary.tokenizer, stop=stop, include_stop_str_in_output=include)
                deltas = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
                shown = "".join(delta.text for delta in deltas)
                assert (shown, deltas[-1].stop) == (cut + matched * include, matched), (text, stop)
                assert sum(delta.num_tokens for delta in deltas) == num_tokens, (text, stop)
    assert num_found_across > 50


@pytest.mark.parametrize("name", TEXTS)
def test_a_stop_string_that_never_comes_loses_nothing(vocabulary, name):
    """Every beginning of it that the text has is held back, and let out again."""
    normal = vocabulary.normalise(TEXTS[name])
    ids = vocabulary.tokenizer.encode(TEXTS[name], add_special_tokens=False)
    stop = [normal[start : start + 6] + "\u0378" for start in range(0, len(normal), 7)][:20] or ["x"]
    assert "".join(chunks(vocabulary, [[token_id] for token_id in ids], stop=stop)) == normal


KNOWN_IDS = {
    "qwen3": (
        "8002 944 21975 25 220 16 17 18 19 20 220 26068 331 6567 120 95 18600 61804 102 146530 378 235 145836 271 10225"
    ),
    "qwen3_5": (
        "7751 914 21297 25 220 16 17 18 19 20 220 202985 220 101306 96356 59720 102 9008 237 123 373 235 9008 248 222 271 9921"
    ),
    "o200k": ("31559 40130 25 220 7633 2548 220 3065 332 82867 95 8134 61138 102 52622 123 2524 112927 222 279 21395"),
}
"""What tiktoken 0.14.0 makes of the text below with the same ranks and pattern."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN_IDS)
def test_the_real_vocabularies_are_made_right(name):
    ids = MAKERS[name]().tokenizer.encode("Don't panic: 12345 ếch 漢字 👩🏿\u200d🚀\n\n\tx")
    assert ids == [int(word) for word in KNOWN_IDS[name].split()]


CONTROL = {
    "qwen3": ("<think>a b</think><tool_call>{}</tool_call><|im_end|>", [151667, 151668, 151657, 151658, 151645]),
    "qwen3_5": ("<think>a b</think><tool_call>{}</tool_call><|im_end|>", [248068, 248069, 248058, 248059, 248046]),
    "o200k": ("<|channel|>final<|message|>a 漢<|return|>", [200005, 200008, 200002]),
    "gemma_like": ("<|turn>a 漢<unused99>  <turn|>", [105, 106, 256001]),
}
"""A text, and the control tokens that are in it."""


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_are_shown_or_not_and_stop(name):
    vocabulary = MAKERS[name]()
    text, control = CONTROL[name]
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    assert {*control} <= {*ids}
    assert check_everywhere(vocabulary, ids) == text
    visible = text
    for token_id in vocabulary.special & {*ids}:
        visible = visible.replace(vocabulary.pieces[token_id].decode(), "")
    assert check_everywhere(vocabulary, ids, skip=True) == visible != text

    # a character that the last control token cuts short is one U+FFFD, and what follows the token is not shown
    last = text[text.rindex("<") :]
    open_character = [vocabulary.byte_ids[byte] for byte in "😀".encode()[:3]]
    longer = [*ids[:-1], *open_character, ids[-1], *ids]
    for cut in range(len(longer) + 1):
        detokenizer = Detokenizer(vocabulary.tokenizer, stop=[last])
        deltas = [detokenizer.push(longer[:cut]), detokenizer.push(longer[cut:], finished=True)]
        assert "".join(delta.text for delta in deltas) == visible + "\ufffd"
        assert (deltas[-1].stop, sum(delta.num_tokens for delta in deltas)) == (last, len(ids) + 3)
