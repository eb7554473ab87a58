"""Tiny random checkpoints in the published layout, for make_goldens.py: what describes one and how it is written."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from golden_layers import Config, Shapes
from golden_tokenizers import TrainedTokenizer

Tensors = dict[str, torch.Tensor]
UNUSED = (".visual.", ".vision_tower.", ".embed_vision.")
"""Parts of names of tensors that stand in a file and never reach a text model."""


@dataclass(frozen=True)
class Margins:
    """How far apart two things must be for their order to be no matter of rounding.

    Attributes:
      router: logits of the last expert taken and the first one left.
      argmax: the two best logits of a greedy step.
      top5: log probabilities of neighbours among a greedy step's best tokens.
      num_distinct: fewest different tokens in all greedy continuations: one token for ever would prove little.
    """

    router: float = 1e-3
    argmax: float = 5e-3
    top5: float = 2e-4
    num_distinct: int = 12


@dataclass(frozen=True)
class Variant:
    """One fixture.

    Attributes:
      base: config.json of the family; in a nested one the text model's part is `text_config`.
      shapes: every tensor of the published layout, from the text model's configuration.
      train: makes the tokenizer.
      gains: by projection, the deviation of its output where the input's is 1; 1 for the others.
      values: by ending of a name, (mean, deviation) of a tensor that is no projection; the first that fits.
      changes: what differs from `base`.
      sampling: the sampling part of generation_config.json.
      named_ids: ids outside `text_config`, by key of config.json: one text of a token, or several.
      float32: endings of the names of tensors that are float32 among the bf16 ones.
      transposed: endings of the names of tensors stored [..., in, out].
      store: (tensors of the plain layout, config) -> (tensors of the file, what config.json gets besides).
      quiet_added: the head gives the tokens added by name low logits, as a trained model does within ordinary text.
      num_files: over how many files the tensors are spread; more than one come with an index.
      margins: what make_goldens.py asks of the values.
    """

    base: str
    shapes: Callable[[Config], Shapes]
    train: Callable[[], TrainedTokenizer]
    gains: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    changes: Config = field(default_factory=dict)
    sampling: Config = field(default_factory=dict)
    named_ids: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    store: Callable[[Tensors, Config], tuple[Tensors, Config]] | None = None
    quiet_added: bool = False
    num_files: int = 1
    margins: Margins = Margins()


def text_config(config: Config) -> Config:
    """The text model's part of a config.json."""
    return config.get("text_config", config)


def make_config(variant: Variant, tokenizer: TrainedTokenizer) -> Config:
    """config.json before any quantisation."""
    config: Config = json.loads(variant.base)
    text = text_config(config)
    text |= tokenizer.model_ids | {"vocab_size": (tokenizer.size // 64 + 1) * 64}
    config |= variant.changes
    for key, texts in variant.named_ids.items():
        ids = [tokenizer.backend.token_to_id(one) for one in ([texts] if isinstance(texts, str) else texts)]
        config[key] = ids[0] if isinstance(texts, str) else ids
    return config


def random_tensor(
    name: str, shape: tuple[int, ...], seed: int, variant: Variant, tokenizer: TrainedTokenizer, tied: bool
) -> torch.Tensor:
    """Values of a tensor, from its name and the seed alone."""
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    rule = next((rule for ending, rule in variant.values.items() if name.endswith(ending)), None)
    if any(part in name for part in UNUSED):
        values = 0.05 * normal
    elif rule is not None:
        mean, deviation = rule
        values = mean + deviation * normal
    elif len(shape) == 1:
        values = 1.0 + 0.3 * normal
    elif name.endswith("embed_tokens.weight") and not tied:
        values = normal
    elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
        values = normal * 3 / shape[1] ** 0.5  # logits with a deviation of about 3
        values[tokenizer.size :] *= 0.1  # ids that no text has are never the best
        if variant.quiet_added:
            values[sorted(tokenizer.backend.get_added_tokens_decoder())] *= 0.1
    else:
        num_inputs = shape[-2] if name.endswith(variant.transposed or "\0") else shape[-1]
        values = normal * variant.gains.get(name.removesuffix(".weight").split(".")[-1], 1.0) / num_inputs**0.5
    tensor = torch.from_numpy(values).to(torch.bfloat16)
    return tensor.float() if name.endswith(variant.float32 or "\0") else tensor


def random_tensors(variant: Variant, config: Config, seed: int, tokenizer: TrainedTokenizer) -> Tensors:
    """Every tensor of the plain layout."""
    shapes = variant.shapes(text_config(config) | {"tie_word_embeddings": config.get("tie_word_embeddings", True)})
    tied = "lm_head.weight" not in shapes
    return {name: random_tensor(name, shape, seed, variant, tokenizer, tied) for name, shape in shapes.items()}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_file(path: Path, tensors: Tensors) -> None:
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_tensors(folder: Path, tensors: Tensors, num_files: int) -> None:
    """model.safetensors, or `num_files` files of about the same size with an index."""
    if num_files == 1:
        write_file(folder / "model.safetensors", tensors)
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    files: list[Tensors] = [{} for _ in range(num_files)]
    weight_map: dict[str, str] = {}
    done = 0
    for name in sorted(tensors):
        number = min(done * num_files // total, num_files - 1)
        files[number][name] = tensors[name]
        weight_map[name] = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        done += tensors[name].nbytes
    for number, part in enumerate(files):
        write_file(folder / f"model-{number + 1:05d}-of-{num_files:05d}.safetensors", part)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_checkpoint(folder: Path, variant: Variant, seed: int, tokenizer: TrainedTokenizer) -> None:
    """Replaces `folder` by a checkpoint of the variant, all but the golden values."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "v5_style").mkdir(parents=True)
    config = make_config(variant, tokenizer)
    tensors = random_tensors(variant, config, seed, tokenizer)
    if variant.store is not None:
        tensors, additions = variant.store(tensors, config)
        config |= additions
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", tokenizer.generation_ids | variant.sampling)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer.config)
    write_tensors(folder, tensors, variant.num_files)
