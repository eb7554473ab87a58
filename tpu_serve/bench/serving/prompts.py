"""Prompts of a benchmark: drawn at random, or read from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.text.tokenizer import Tokenizer

TRIES = 10
"""How often a text is mended until it has the tokens wanted."""
ENOUGH_WORDS = 100
"""So many different words make prompts that share nothing."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks.

    Attributes:
      text: of the prompt; the user's message for a chat.
      num_tokens: of the text, with the special tokens that the tokenizer adds and without a chat template.
      output_len: tokens to be generated at most.
      at: when it leaves, seconds after the start, for a trace that says so.
    """

    text: str
    num_tokens: int
    output_len: int
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """Which prompts; lengths are in tokens.

    Attributes:
      name: a key of `tpu_serve.bench.serving.datasets.DATASETS`.
      path: of the file, for datasets that are one.
      output_len: overrides what the dataset says, where it may.
      range_ratio: random lengths lie within this share around the mean, 0 to below 1.
      prefix_len: tokens that all prompts of `random` begin with.
      input_len: of `random` after the prefix, and of `sonnet` in whole.
      sonnet_prefix_len: of the lines of `sonnet` that all prompts share.
      repetition_*: of `prefix_repetition`.
      block_tokens, seconds_per_unit: of a trace: tokens that one hash stands for, and the unit of its times.
      is_self_timed: requests of a trace leave when it says.
      shuffles: requests of a file are drawn in random order.
      oversamples: a file with too few requests is begun again.
    """

    name: str = "random"
    path: Path | None = None
    input_len: int = 1024
    output_len: int | None = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    sonnet_prefix_len: int = 200
    repetition_prefix_len: int = 256
    repetition_suffix_len: int = 256
    repetition_num_prefixes: int = 10
    block_tokens: int = 512
    seconds_per_unit: float = 0.001
    is_self_timed: bool = False
    shuffles: bool = True
    oversamples: bool = True


@dataclass(frozen=True, slots=True)
class Texts:
    """Makes texts of a wanted number of tokens.

    Args:
      tokenizer: the server's.
      random: decides everything that is drawn.
    """

    tokenizer: Tokenizer
    random: np.random.Generator
    _plain: list[int] = field(default_factory=list)

    def num_special(self) -> int:
        """Tokens that the tokenizer adds to every text."""
        return len(self.tokenizer.encode(""))

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def random_ids(self, count: int) -> list[int]:
        """Ids of tokens that are words or at least have a text of their own."""
        if not self._plain:
            self._plain.extend(_plain_ids(self.tokenizer))
        places = self.random.integers(0, len(self._plain), count)
        return [self._plain[place] for place in places.tolist()]

    def of_length(self, ids: list[int]) -> tuple[str, int]:
        """A text that is encoded to as many tokens as `ids` has, or as near as it gets, and the number that it is encoded to.

        Joined tokens are read back as others, so ids are cut or further ones drawn until the number fits; special tokens are not counted.
        """
        wanted, best = len(ids), ("", 0)
        for _ in range(TRIES):
            text = self.tokenizer.decode(ids)
            back = self.tokenizer.encode(text, add_special_tokens=False)
            if abs(len(back) - wanted) < abs(best[1] - wanted) or not best[0]:
                best = (text, len(back))
            if len(back) == wanted:
                break
            ids = back[:wanted] if len(back) > wanted else back + self.random_ids(wanted - len(back))
        return best


def _plain_ids(tokenizer: Tokenizer) -> list[int]:
    """Beginnings of words where the vocabulary has enough of them, since a text of them is read back as it was written, and fast; otherwise
    all tokens whose text alone is valid and whole."""
    plain, words = [], []
    for token_id in range(tokenizer.vocab_size):
        text = "" if token_id in tokenizer.special_ids else tokenizer.token_text(token_id)
        if not text or "\ufffd" in text or not (text.isprintable() or text.isspace()):
            continue
        plain.append(token_id)
        if len(text) > 2 and text[0] == " " and text[1:].isascii() and text[1:].isalpha():
            words.append(token_id)
    if not plain:
        raise ConfigError("The tokenizer has no token with a text of its own; --tokenizer names another one.")
    return words if len(words) >= ENOUGH_WORDS else plain


def spread(mean: int, ratio: float, count: int, random: np.random.Generator) -> list[int]:
    """Lengths drawn evenly from mean * (1 - ratio) to mean * (1 + ratio), both rounded outwards and included."""
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {ratio:g}.")
    low, high = int(np.floor(mean * (1 - ratio))), int(np.ceil(mean * (1 + ratio)))
    return [int(length) for length in random.integers(max(1, low), max(1, high) + 1, count)]


def random_prompts(options: DatasetOptions, count: int, texts: Texts) -> list[Prompt]:
    """Random tokens, after a prefix that all prompts share."""
    special, random = texts.num_special(), texts.random
    prefix = texts.random_ids(options.prefix_len)
    inputs = spread(options.input_len, options.range_ratio, count, random)
    outputs = spread(options.output_len or 128, options.range_ratio, count, random)
    return [
        _prompt(texts, prefix + texts.random_ids(max(1, length - special)), output, special)
        for length, output in zip(inputs, outputs, strict=True)
    ]


def repeated_prefixes(options: DatasetOptions, count: int, texts: Texts) -> list[Prompt]:
    """Prompts in random order, as many for each of a few prefixes, which are all different after them."""
    num_prefixes, special = options.repetition_num_prefixes, texts.num_special()
    if count < num_prefixes:
        raise ConfigError(f"--num-prompts {count} is below --prefix-repetition-num-prefixes {num_prefixes}.")
    prompts = []
    for place in range(num_prefixes):
        prefix = texts.random_ids(options.repetition_prefix_len)
        for _ in range(count // num_prefixes + (place < count % num_prefixes)):
            ids = prefix + texts.random_ids(options.repetition_suffix_len)
            prompts.append(_prompt(texts, ids, options.output_len or 128, special))
    return [prompts[place] for place in texts.random.permutation(len(prompts))]


def sonnets(options: DatasetOptions, count: int, texts: Texts) -> list[Prompt]:
    """Lines of a text file: the first ones for all prompts alike, then others drawn for each."""
    lines = [line for line in read_lines(options.path) if line.strip()]
    if not lines:
        raise ConfigError(f"--dataset-path {options.path} has no lines of text.")
    lengths = [len(texts.tokenizer.encode(f"{line}\n", add_special_tokens=False)) for line in lines]
    average = max(1.0, sum(lengths) / len(lengths))
    intro = "Pick as many lines as you can from these poem lines:\n"
    room = options.input_len - texts.count(intro)
    num_prefix = round(options.sonnet_prefix_len / average)
    num_lines = round(room / average)
    if num_lines < 1 or num_prefix > num_lines:
        raise ConfigError(
            f"--sonnet-input-len {options.input_len} has no room for the introduction of {options.input_len - room} tokens and "
            f"--sonnet-prefix-len {options.sonnet_prefix_len}."
        )
    prompts = []
    for _ in range(count):
        drawn = texts.random.integers(0, len(lines), num_lines - num_prefix)
        shared = [lines[place % len(lines)] for place in range(num_prefix)]
        text = intro + "\n".join([*shared, *(lines[place] for place in drawn)])
        prompts.append(Prompt(text, texts.count(text), options.output_len or 150))
    return prompts


def read_lines(path: Path | None) -> list[str]:
    """Lines of a dataset's file.

    Raises:
      ConfigError: none is named, or it cannot be read.
    """
    if path is None:
        raise ConfigError("This dataset is a file: name it with --dataset-path FILE.")
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--dataset-path {path} is not UTF-8: {error.reason}.") from None


def _prompt(texts: Texts, ids: list[int], output_len: int, special: int) -> Prompt:
    text, num_tokens = texts.of_length(ids)
    return Prompt(text, num_tokens + special, output_len)


Maker = Callable[[DatasetOptions, int, Texts], list[Prompt]]
DRAWN: Mapping[str, Maker] = {"random": random_prompts, "prefix_repetition": repeated_prefixes}
"""Datasets that another seed makes different altogether."""
