"""Options that say which prompts a benchmark sends, and the tokenizer that makes them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.options import positive
from tpu_serve.config import ConfigError

if TYPE_CHECKING:
    from tpu_serve.bench.serving.prompts import DatasetOptions
    from tpu_serve.text.tokenizer import Tokenizer

NAMES = ("random", "sharegpt", "custom", "prefix_repetition", "timed_trace", "sonnet")
FROM_FILE = -1
"""A length that the file decides."""
LENGTHS: dict[str, tuple[str, int, str]] = {
    "random_input_len": ("random", 1024, "tokens of a prompt after the prefix"),
    "random_output_len": ("random", 128, "tokens of an answer"),
    "random_prefix_len": ("random", 0, "tokens that all prompts begin with"),
    "sharegpt_output_len": ("sharegpt", FROM_FILE, "tokens of an answer; -1 takes the length of the file's answer"),
    "custom_output_len": ("custom", 256, "tokens of an answer; -1 takes output_tokens of each line"),
    "prefix_repetition_prefix_len": ("prefix_repetition", 256, "tokens of a prefix"),
    "prefix_repetition_suffix_len": ("prefix_repetition", 256, "tokens of a prompt after its prefix"),
    "prefix_repetition_num_prefixes": ("prefix_repetition", 10, "different prefixes"),
    "prefix_repetition_output_len": ("prefix_repetition", 128, "tokens of an answer"),
    "sonnet_input_len": ("sonnet", 550, "tokens of a prompt, about"),
    "sonnet_output_len": ("sonnet", 150, "tokens of an answer"),
    "sonnet_prefix_len": ("sonnet", 200, "tokens that all prompts share, about"),
    "timed_trace_chunk_hash_size": ("timed_trace", 512, "tokens that one hash of the trace stands for"),
}
"""Flag -> dataset that it belongs to, default, help."""
OTHERS = {"random_range_ratio": "random", "timed_trace_sec_multiplier": "timed_trace", "self_timed": "timed_trace"}
FILES = ("sharegpt", "custom", "timed_trace", "sonnet")
SHUFFLED = ("sharegpt", "custom")


def add_dataset_options(parser: argparse.ArgumentParser, *, count: int, name: str, has_seed: bool = True) -> None:
    """Adds which prompts and how many: `count` of the dataset `name` unless told otherwise. `has_seed` is False where the engine has one."""
    group = parser.add_argument_group("prompts")
    add, unset = group.add_argument, argparse.SUPPRESS
    add("--dataset-name", choices=NAMES, default=name, help="(default: %(default)s)")
    add("--dataset-path", metavar="FILE", type=Path,
        help="sharegpt: JSON list of conversations; custom: lines of JSON with prompt; timed_trace: lines of JSON with timestamp, input_length, "
        "output_length, hash_ids; sonnet: lines of text")  # fmt: skip
    add("--num-prompts", metavar="N", type=positive, default=count, help="requests of a run (default: %(default)s)")
    if has_seed:
        add("--seed", metavar="N", type=_count, default=0, help="of everything random here (default: 0)")
    add("--input-len", metavar="N", type=positive, help="tokens of a prompt, whatever the dataset calls it")
    add("--output-len", metavar="N", type=positive, help="tokens of an answer, whatever the dataset calls it")
    for flag, (_, default, help) in LENGTHS.items():
        kind = _length if default == FROM_FILE or flag == "custom_output_len" else _count if default == 0 else positive
        add(f"--{flag.replace('_', '-')}", metavar="N", type=kind, default=unset, help=f"{help} (default: {default})")
    add("--random-range-ratio", metavar="R", type=float, default=unset,
        help="lengths of random prompts and answers lie within this share around the mean, 0 to below 1 (default: 0)")  # fmt: skip
    add("--self-timed", action="store_true", default=unset, help="requests leave when the trace says")
    add("--timed-trace-sec-multiplier", metavar="S", type=float, default=unset,
        help="seconds that one unit of the trace's times stands for (default: 0.001)")  # fmt: skip
    add("--disable-shuffle", action="store_true", help="requests of a file in its order")
    add("--no-oversample", action="store_true", help="an error, not a second round, when a file has too few requests")


def dataset_options(arguments: argparse.Namespace) -> DatasetOptions:
    """What the options ask for.

    Raises:
      ConfigError: an option belongs to another dataset, or two contradict each other.
    """
    from tpu_serve.bench.serving.prompts import DatasetOptions

    name = arguments.dataset_name
    homes = {**{flag: home for flag, (home, _, _) in LENGTHS.items()}, **OTHERS}
    for flag, home in homes.items():
        if hasattr(arguments, flag) and home != name:
            raise ConfigError(f"--{flag.replace('_', '-')} belongs to --dataset-name {home}, not {name}.")
    if arguments.dataset_path is not None and name not in FILES:
        raise ConfigError(f"--dataset-path has no meaning for --dataset-name {name}.")
    if arguments.dataset_path is None and name in FILES:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path FILE.")
    if name not in SHUFFLED and arguments.disable_shuffle and name != "timed_trace":
        raise ConfigError(f"--disable-shuffle has no meaning for --dataset-name {name}.")
    if arguments.no_oversample and name not in ("sharegpt", "custom", "timed_trace"):
        raise ConfigError(f"--no-oversample has no meaning for --dataset-name {name}.")

    def length(flag: str) -> int:
        value = getattr(arguments, flag, LENGTHS[flag][1])
        return int(value)

    output = _output_len(arguments, name, length)
    multiplier = getattr(arguments, "timed_trace_sec_multiplier", 0.001)
    if not multiplier > 0:
        raise ConfigError(f"--timed-trace-sec-multiplier must be above 0, got {multiplier:g}.")
    return DatasetOptions(
        name=name,
        path=arguments.dataset_path,
        input_len=_input_len(arguments, name, length),
        output_len=output,
        range_ratio=getattr(arguments, "random_range_ratio", 0.0),
        prefix_len=length("random_prefix_len"),
        sonnet_prefix_len=length("sonnet_prefix_len"),
        repetition_prefix_len=length("prefix_repetition_prefix_len"),
        repetition_suffix_len=length("prefix_repetition_suffix_len"),
        repetition_num_prefixes=length("prefix_repetition_num_prefixes"),
        block_tokens=length("timed_trace_chunk_hash_size"),
        seconds_per_unit=multiplier,
        is_self_timed=getattr(arguments, "self_timed", False),
        shuffles=not arguments.disable_shuffle and name in SHUFFLED,
        oversamples=not arguments.no_oversample and not getattr(arguments, "self_timed", False),
    )


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a folder or hub id.

    Raises:
      ConfigError: there is none; the message says how to name another.
    """
    from tpu_serve.checkpoint.folder import resolve
    from tpu_serve.text.tokenizer import Tokenizer

    try:
        return Tokenizer.load(resolve(source, weights=False))
    except ConfigError as error:
        raise ConfigError(f"{error} Prompts need the model's tokenizer: --tokenizer FOLDER names it.") from None


def _input_len(arguments: argparse.Namespace, name: str, length: Any) -> int:
    flag = {"random": "random_input_len", "sonnet": "sonnet_input_len"}.get(name)
    if arguments.input_len is None:
        return int(length(flag or "random_input_len"))
    if flag is None:
        raise ConfigError(
            f"--input-len has no meaning for --dataset-name {name}: its prompts have lengths of their own."
        )
    if hasattr(arguments, flag):
        raise ConfigError(f"--input-len and --{flag.replace('_', '-')} say the same: leave one of them out.")
    return int(arguments.input_len)


def _output_len(arguments: argparse.Namespace, name: str, length: Any) -> int | None:
    flag = f"{name}_output_len"
    if arguments.output_len is not None:
        if hasattr(arguments, flag):
            raise ConfigError(f"--output-len and --{flag.replace('_', '-')} say the same: leave one of them out.")
        return int(arguments.output_len)
    value = length(flag) if flag in LENGTHS else FROM_FILE
    return None if value == FROM_FILE else int(value)


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _length(text: str) -> int:
    return FROM_FILE if text == str(FROM_FILE) else positive(text)
