"""Prompts of benchmarks: lengths, sharing, and files that are wrong."""

import json

import numpy as np
import pytest
from fakes import byte_tokenizer

from tpu_serve.bench.serving.datasets import make_prompts
from tpu_serve.bench.serving.prompts import DatasetOptions, Texts
from tpu_serve.config import EMBEDDED_MODEL, ConfigError
from tpu_serve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(EMBEDDED_MODEL)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "data"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_random_prompts_have_the_length_asked_for(tokenizer):
    options = DatasetOptions(name="random", input_len=50, output_len=20, prefix_len=16)
    prompts = make_prompts(options, 20, tokenizer, seed=1)
    lengths = [len(tokenizer.encode(prompt.text)) for prompt in prompts]
    assert lengths == [prompt.num_tokens for prompt in prompts]
    assert sum(abs(length - 66) <= 2 for length in lengths) >= 18, lengths
    assert {prompt.output_len for prompt in prompts} == {20}
    assert len({prompt.text for prompt in prompts}) == 20
    shared = tokenizer.decode(tokenizer.encode(prompts[0].text)[:10])
    assert all(prompt.text.startswith(shared) for prompt in prompts)
    assert prompts == make_prompts(options, 20, tokenizer, seed=1)
    assert prompts != make_prompts(options, 20, tokenizer, seed=2)


def test_tokens_that_are_read_back_as_fewer_are_filled_up(tokenizer):
    texts = Texts(tokenizer, np.random.default_rng(0))
    letters = [tokenizer.token_id(letter) for letter in "theandthethatwithhave"]
    assert len(tokenizer.encode(tokenizer.decode(letters), add_special_tokens=False)) < len(letters)
    text, num_tokens = texts.of_length(letters)
    assert num_tokens == len(letters) == len(tokenizer.encode(text, add_special_tokens=False))
    assert text.startswith("theandthe")


def test_a_spread_of_lengths():
    prompts = make_prompts(DatasetOptions(input_len=100, output_len=10, range_ratio=0.5), 400, byte_tokenizer(), 0)
    assert (min(prompt.num_tokens for prompt in prompts), max(prompt.num_tokens for prompt in prompts)) == (50, 150)
    assert {prompt.output_len for prompt in prompts} == set(range(5, 16))
    with pytest.raises(ConfigError, match="--random-range-ratio"):
        make_prompts(DatasetOptions(range_ratio=1.0), 1, byte_tokenizer(), 0)


def test_repeated_prefixes():
    options = DatasetOptions(
        name="prefix_repetition", repetition_prefix_len=12, repetition_suffix_len=8, repetition_num_prefixes=3
    )
    prompts = make_prompts(options, 10, byte_tokenizer(), 0)
    starts = [prompt.text[:12] for prompt in prompts]
    assert sorted(starts.count(start) for start in set(starts)) == [3, 3, 4]
    assert len({prompt.text for prompt in prompts}) == 10
    with pytest.raises(ConfigError, match="--prefix-repetition-num-prefixes 3"):
        make_prompts(options, 2, byte_tokenizer(), 0)


def test_sharegpt(write):
    def talk(question, answer):
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}

    path = write(
        json.dumps(
            [talk("how are you", "very well"), talk("a", "b"), {"conversations": []}, talk("again?", "no no no")]
        )
    )
    options = DatasetOptions(name="sharegpt", path=path, output_len=None, shuffles=False)
    prompts = make_prompts(options, 3, byte_tokenizer(), 0)
    assert [(prompt.text, prompt.output_len) for prompt in prompts] == [
        ("how are you", 9), ("again?", 8), ("how are you", 9),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="holds 2 usable requests, and --num-prompts is 3"):
        make_prompts(
            DatasetOptions(name="sharegpt", path=path, output_len=None, oversamples=False), 3, byte_tokenizer(), 0
        )


def test_custom(write):
    path = write('{"prompt": "one", "output_tokens": 4}\n\n{"prompt": "two"}\n')
    first, second = make_prompts(
        DatasetOptions(name="custom", path=path, output_len=9, shuffles=False), 2, byte_tokenizer(), 0
    )
    assert (first.text, first.output_len, second.text, second.output_len) == ("one", 9, "two", 9)
    with pytest.raises(ConfigError, match="line 2 has no output_tokens"):
        make_prompts(DatasetOptions(name="custom", path=path, output_len=None, shuffles=False), 2, byte_tokenizer(), 0)


def test_timed_trace(write):
    lines = [
        {"timestamp": 5000, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 5500, "input_length": 24, "output_length": 4, "hash_ids": [1, 3]},
        {"timestamp": 7000, "input_length": 10, "output_length": 5},
    ]
    path = write("\n".join(map(json.dumps, lines)))
    options = DatasetOptions(name="timed_trace", path=path, output_len=None, block_tokens=16, is_self_timed=True)
    prompts = make_prompts(options, 3, byte_tokenizer(), 0)
    assert [(prompt.num_tokens, prompt.output_len, prompt.at) for prompt in prompts] == [
        (20, 3, 0),
        (24, 4, 0.5),
        (10, 5, 2),
    ]
    assert prompts[0].text[:16] == prompts[1].text[:16], "the block of hash 1"
    assert prompts[0].text[16:] != prompts[1].text[16:20]
    lines[1]["timestamp"] = 1
    with pytest.raises(ConfigError, match="not in order"):
        make_prompts(
            DatasetOptions(name="timed_trace", path=write("\n".join(map(json.dumps, lines))), is_self_timed=True),
            3,
            byte_tokenizer(),
            0,
        )


def test_sonnet(write):
    path = write("\n".join(f"line number {number} of the poem" for number in range(30)))
    options = DatasetOptions(name="sonnet", path=path, input_len=300, sonnet_prefix_len=100, output_len=5)
    prompts = make_prompts(options, 4, byte_tokenizer(), 0)
    assert all(abs(prompt.num_tokens - 300) < 30 for prompt in prompts)
    assert len({prompt.text[:150] for prompt in prompts}) == 1
    assert len({prompt.text for prompt in prompts}) == 4
    with pytest.raises(ConfigError, match="--sonnet-input-len 60 has no room"):
        make_prompts(DatasetOptions(name="sonnet", path=path, input_len=60), 4, byte_tokenizer(), 0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sharegpt", "{", "is not JSON"),
        ("sharegpt", "{}", "no JSON list"),
        ("custom", '{"prompt": "x"}\n{', "line 2: not JSON"),
        ("custom", '{"text": "x"}', "line 1: prompt is missing"),
        ("timed_trace", '{"timestamp": 1, "input_length": true, "output_length": 2}', "line 1: input_length"),
        ("sonnet", "\n\n", "no lines of text"),
        ("custom", "", "holds 0 usable requests"),
    ],
)
def test_files_that_are_wrong(write, name, text, message):
    with pytest.raises(ConfigError, match=message):
        make_prompts(DatasetOptions(name=name, path=write(text)), 2, byte_tokenizer(), 0)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_prompts(DatasetOptions(name=name, path=write(text).with_name("none")), 2, byte_tokenizer(), 0)
