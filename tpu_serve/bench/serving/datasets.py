"""Datasets by name, and those that are files of requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpu_serve.bench.serving.arrivals import check_delays
from tpu_serve.bench.serving.prompts import DRAWN, DatasetOptions, Maker, Prompt, Texts, read_lines, sonnets
from tpu_serve.config import ConfigError
from tpu_serve.text.tokenizer import Tokenizer

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""Conversations of ShareGPT outside these numbers of tokens are left out, as usual with this dataset."""


def make_prompts(options: DatasetOptions, count: int, tokenizer: Tokenizer, seed: int) -> list[Prompt]:
    """`count` prompts; equal seeds give equal ones.

    Raises:
      ConfigError: the file cannot be used or holds too few, or lengths are out of range.
    """
    prompts = DATASETS[options.name](options, count, Texts(tokenizer, np.random.default_rng(seed)))
    if len(prompts) < count:
        if not options.oversamples or not prompts:
            raise ConfigError(f"{options.path} holds {len(prompts)} usable requests, and --num-prompts is {count}.")
        prompts = [prompts[place % len(prompts)] for place in range(count)]
    return prompts


def sharegpt(options: DatasetOptions, count: int, texts: Texts) -> list[Prompt]:
    """First question of each conversation in a JSON file of ShareGPT's form; the first answer's length is what is generated."""
    conversations = [
        item["conversations"]
        for item in _json_list(options.path)
        if isinstance(item, dict) and isinstance(item.get("conversations"), list) and len(item["conversations"]) >= 2
    ]
    prompts: list[Prompt] = []
    for place in _order(len(conversations), options, texts):
        if len(prompts) == count:
            break
        question, answer = (str(turn.get("value", "")) for turn in conversations[place][:2])
        num_tokens = texts.count(question)
        output_len = options.output_len or texts.count(answer)
        if min(num_tokens, output_len) < SHORTEST or num_tokens > LONGEST_PROMPT or num_tokens + output_len > LONGEST:
            continue
        prompts.append(Prompt(question, num_tokens, output_len))
    return prompts


def custom(options: DatasetOptions, count: int, texts: Texts) -> list[Prompt]:
    """Lines of JSON with a `prompt` and perhaps `output_tokens`, which counts when no output length is given."""
    items = _json_lines(options.path, {"prompt": str})
    prompts = []
    for place in _order(len(items), options, texts)[:count]:
        said = items[place].get("output_tokens")
        output_len = options.output_len or (said if isinstance(said, int) and said > 0 else None)
        if output_len is None:
            raise ConfigError(
                f"--custom-output-len -1 takes lengths from the file, and line {place + 1} has no output_tokens."
            )
        text = items[place]["prompt"]
        prompts.append(Prompt(text, texts.count(text), output_len))
    return prompts


def timed_trace(options: DatasetOptions, count: int, texts: Texts) -> list[Prompt]:
    """Lines of JSON with `timestamp`, `input_length`, `output_length` and `hash_ids`: a log of which blocks of tokens prompts shared.

    Equal hashes become equal tokens, so that a prefix cache finds what it would have found. Without hashes every prompt is new.
    """
    items = _json_lines(options.path, {"timestamp": (int, float), "input_length": int, "output_length": int})[:count]
    start = items[0]["timestamp"] if items else 0
    delays = [(item["timestamp"] - start) * options.seconds_per_unit for item in items]
    if options.is_self_timed:
        check_delays(delays)
    blocks: dict[Any, list[int]] = {}
    prompts, special = [], texts.num_special()
    for item, delay in zip(items, delays, strict=True):
        length = max(1, item["input_length"] - special)
        ids: list[int] = []
        for key in item.get("hash_ids") or ():
            if key not in blocks:
                blocks[key] = texts.random_ids(options.block_tokens)
            ids += blocks[key]
        ids = ids[:length] + texts.random_ids(max(0, length - len(ids)))
        # Not mended to an exact length: prompts that shared tokens would no longer share them.
        text = texts.tokenizer.decode(ids)
        num_tokens = texts.count(text)
        output_len = options.output_len or max(1, item["output_length"])
        prompts.append(Prompt(text, num_tokens, output_len, delay if options.is_self_timed else None))
    return prompts


def _order(count: int, options: DatasetOptions, texts: Texts) -> list[int]:
    return texts.random.permutation(count).tolist() if options.shuffles else list(range(count))


def _json_list(path: Path | None) -> list[Any]:
    text = "\n".join(read_lines(path))
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} is not JSON: {error}.") from None
    if not isinstance(value, list):
        raise ConfigError(f"--dataset-path {path} is no JSON list of conversations.")
    return value


def _json_lines(path: Path | None, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Objects of a file, with `fields` of these types."""
    items = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--dataset-path {path}, line {number}: not JSON: {error}.") from None
        for name, kind in fields.items():
            if not isinstance(item, dict) or not isinstance(item.get(name), kind) or isinstance(item[name], bool):
                raise ConfigError(f"--dataset-path {path}, line {number}: {name} is missing or of the wrong type.")
        items.append(item)
    return items


DATASETS: Mapping[str, Maker] = {
    **DRAWN,
    "sharegpt": sharegpt,
    "custom": custom,
    "sonnet": sonnets,
    "timed_trace": timed_trace,
}
