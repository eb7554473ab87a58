"""Tiny random checkpoints in the published layout, for make_goldens.py: which there are, and every tensor of them."""

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
from golden_tokenizers import TrainedTokenizer, train_byte_fallback, train_byte_level

Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]

QWEN3_MOE = """{
"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "decoder_sparse_step": 1,
"head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
"max_position_embeddings": 512, "max_window_layers": 3, "mlp_only_layers": [], "model_type": "qwen3_moe",
"moe_intermediate_size": 32, "norm_topk_prob": true, "num_attention_heads": 8, "num_experts": 8,
"num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 2, "output_router_logits": false,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
"sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
"use_cache": true, "use_sliding_window": false
}"""
"""The config.json of a published Qwen3-MoE, with small sizes."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
TIED = {
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "mlp_only_layers": [1],
    "rope_theta": 1e4,
    "rope_scaling": YARN,
}
MIXTRAL = """{
"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 64,
"initializer_range": 0.02, "intermediate_size": 48, "max_position_embeddings": 512, "model_type": "mixtral",
"num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 2,
"num_local_experts": 6, "output_router_logits": false, "rms_norm_eps": 0.01, "rope_theta": 10000.0,
"router_aux_loss_coef": 0.02, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.36.0.dev0", "use_cache": true
}"""
"""The config.json of a published Mixtral, with small sizes. The epsilon is so large that a wrong one shows."""


def qwen3_moe_layer(prefix: str, layer: int, config: Config) -> Shapes:
    """What a layer holds besides plain attention and its two norms."""
    hidden = config["hidden_size"]
    shapes: Shapes = {f"{prefix}.self_attn.{name}.weight": (config["head_dim"],) for name in ("q_norm", "k_norm")}

    def add_mlp(name: str, inner: int) -> None:
        shapes[f"{name}.gate_proj.weight"] = shapes[f"{name}.up_proj.weight"] = (inner, hidden)
        shapes[f"{name}.down_proj.weight"] = (hidden, inner)

    if layer in config["mlp_only_layers"]:
        add_mlp(f"{prefix}.mlp", config["intermediate_size"])
        return shapes
    shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        add_mlp(f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])
    return shapes


def mixtral_layer(prefix: str, layer: int, config: Config) -> Shapes:
    """What a layer holds besides plain attention and its two norms."""
    hidden, inner, moe = config["hidden_size"], config["intermediate_size"], f"{prefix}.block_sparse_moe"
    shapes: Shapes = {f"{moe}.gate.weight": (config["num_local_experts"], hidden)}
    for expert in range(config["num_local_experts"]):
        for name, shape in {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}.items():
            shapes[f"{moe}.experts.{expert}.{name}.weight"] = shape
    return shapes


@dataclass(frozen=True)
class Variant:
    """One fixture.

    Attributes:
      base: config.json of the family.
      layer: tensors of a layer: (name prefix, number, config) -> shapes by name.
      gains: by projection, the deviation of its output where the input's is 1; 1 for the others.
      train: makes the tokenizer.
      changes: what differs from `base`.
      sampling: the sampling part of generation_config.json.
    """

    base: str
    layer: Callable[[str, int, Config], Shapes]
    gains: Mapping[str, float]
    train: Callable[[], TrainedTokenizer]
    changes: Config = field(default_factory=dict)
    sampling: Config = field(default_factory=dict)


QWEN3_MOE_GAINS = {"gate": 2.0, "gate_proj": 1.5, "up_proj": 1.5, "down_proj": 2.0}
MIXTRAL_GAINS = {"q_proj": 1.5, "k_proj": 1.5, "gate": 2.0, "w1": 1.5, "w3": 1.5, "w2": 2.0}
VARIANTS = {
    "qwen3_moe": Variant(
        QWEN3_MOE,
        qwen3_moe_layer,
        QWEN3_MOE_GAINS,
        train_byte_level,
        sampling={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
    "qwen3_moe_tied": Variant(
        QWEN3_MOE,
        qwen3_moe_layer,
        QWEN3_MOE_GAINS,
        train_byte_level,
        changes=TIED,
        sampling={"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05},
    ),
    "mixtral": Variant(MIXTRAL, mixtral_layer, MIXTRAL_GAINS, train_byte_fallback),
}


def tensor_shapes(variant: Variant, config: Config) -> Shapes:
    """Every tensor of the published layout: one per expert and projection."""
    hidden, vocab, num_heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // num_heads
    queries, keys = num_heads * head, config["num_key_value_heads"] * head
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
        attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        for name, shape in (attention | {"o_proj": (hidden, queries)}).items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = shape
        shapes |= variant.layer(prefix, layer, config)
    return shapes


def random_tensor(
    name: str, shape: tuple[int, ...], seed: int, tokenizer_size: int, tied: bool, gains: Mapping[str, float]
) -> torch.Tensor:
    """Values of a tensor, from its name and the seed alone."""
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        values = 1.4 + 0.4 * normal  # attention that is neither flat nor stuck on one key
    elif len(shape) == 1:
        values = 1.0 + 0.3 * normal
    elif name == "model.embed_tokens.weight" and not tied:
        values = normal
    elif name in ("model.embed_tokens.weight", "lm_head.weight"):
        values = normal * 3 / shape[1] ** 0.5  # logits with a deviation of about 3
        values[tokenizer_size:] *= 0.1  # ids that no text has are never the best
    else:
        values = normal * gains.get(name.split(".")[-2], 1.0) / shape[1] ** 0.5
    return torch.from_numpy(values).to(torch.bfloat16)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(folder: Path, variant: Variant, seed: int, tokenizer: TrainedTokenizer) -> None:
    """Replaces `folder` by a checkpoint of the variant, all but the golden values."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "v5_style").mkdir(parents=True)
    ids = tokenizer.model_ids | {"vocab_size": (tokenizer.size // 64 + 1) * 64}
    config = json.loads(variant.base) | ids | variant.changes
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", tokenizer.generation_ids | variant.sampling)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer.config)
    tied = config["tie_word_embeddings"]
    tensors = {
        name: random_tensor(name, shape, seed, tokenizer.size, tied, variant.gains)
        for name, shape in tensor_shapes(variant, config).items()
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
