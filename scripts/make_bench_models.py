"""Two random Qwen3-MoE checkpoints to measure engines with, in bfloat16 with a vocabulary of 4096: `tiny` (10M parameters) and `small` (231M).

Run by hand: `python scripts/make_bench_models.py FOLDER` writes FOLDER/tiny and FOLDER/small. The seed decides their values. Every id is a token
of the tokenizer, and the context is 4096 tokens long, so that other engines can be given the same folders.
"""

import argparse
import json
import math
import random
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from golden_layers import Config, Shapes, attention, experts, norms, outer
from golden_tokenizers import MARKERS, SPECIAL, TrainedTokenizer, train_byte_level
from safetensors.numpy import save_file

SIZES: dict[str, Config] = {
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_experts": 16,
        "moe_intermediate_size": 128,
    },
    "small": {
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_experts": 32,
        "moe_intermediate_size": 256,
    },
}
COMMON: Config = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1,
    "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "intermediate_size": 512,
    "max_position_embeddings": 4096, "mlp_only_layers": [], "model_type": "qwen3_moe", "norm_topk_prob": True,
    "num_experts_per_tok": 4, "num_key_value_heads": 2, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 4096,
}  # fmt: skip


def train_tokenizer(seed: int) -> TrainedTokenizer:
    """Of made-up words, of which there are enough for the whole vocabulary.

    Raises:
      RuntimeError: there are not.
    """
    source, size = random.Random(seed), COMMON["vocab_size"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ("".join(source.choices(letters, k=source.randint(3, 8))) for _ in range(20_000))
    tokenizer = train_byte_level(size - len(SPECIAL) - len(MARKERS), " ".join(words))
    if tokenizer.size != size:
        raise RuntimeError(f"the tokenizer has {tokenizer.size} tokens, not {size}")
    return tokenizer


def shapes_of(config: Config) -> Shapes:
    """Every tensor of the published layout."""
    hidden, head = config["hidden_size"], config["head_dim"]
    shapes = outer(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= norms(prefix, hidden, "input_layernorm", "post_attention_layernorm")
        shapes |= attention(
            f"{prefix}.self_attn", hidden, config["num_attention_heads"], config["num_key_value_heads"], head
        )
        shapes |= norms(f"{prefix}.self_attn", head, "q_norm", "k_norm")
        shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        shapes |= experts(f"{prefix}.mlp.experts", config["num_experts"], hidden, config["moe_intermediate_size"])
    return shapes


def values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Of a tensor, from its name and the seed alone: what a projection makes of inputs with a deviation of 1 has one of 1."""
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if len(shape) == 1:
        drawn = 1 + 0.1 * normal
    elif name.endswith("embed_tokens.weight"):
        drawn = normal
    else:
        drawn = normal / shape[-1] ** 0.5 * (3 if name == "lm_head.weight" else 1)
    return drawn.astype(ml_dtypes.bfloat16)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(arguments.seed)
    for name, sizes in SIZES.items():
        config, folder = {**COMMON, **tokenizer.model_ids, **sizes}, arguments.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        shapes = shapes_of(config)
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", tokenizer.generation_ids)
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        write_json(
            folder / "tokenizer_config.json",
            tokenizer.config | {"model_max_length": config["max_position_embeddings"]},
        )
        tensors = {tensor: values(tensor, shape, arguments.seed) for tensor, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        print(f"{folder}: {sum(map(math.prod, shapes.values())) / 1e6:.1f}M parameters")


if __name__ == "__main__":
    main()
