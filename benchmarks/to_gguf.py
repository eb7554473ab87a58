"""A Qwen3-MoE checkpoint in bfloat16 as GGUF, for llama.cpp: weights as they are, with the tokenizer of the folder (byte-level BPE).

python benchmarks/to_gguf.py FOLDER FILE.gguf      # needs gguf, which the extra `test` installs
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from ml_dtypes import bfloat16
from safetensors import safe_open

NAMES = {
    r"model\.embed_tokens\.weight": "token_embd.weight",
    r"model\.norm\.weight": "output_norm.weight",
    r"lm_head\.weight": "output.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.weight": r"blk.\1.attn_norm.weight",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": r"blk.\1.ffn_norm.weight",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.weight": r"blk.\1.attn_\2_norm.weight",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.weight": r"blk.\1.attn_\2.weight",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight": r"blk.\1.attn_output.weight",
    r"model\.layers\.(\d+)\.mlp\.gate\.weight": r"blk.\1.ffn_gate_inp.weight",
}
FLOAT32 = re.compile(r".*(norm|ffn_gate_inp)\.weight")
"""llama.cpp keeps norms and routers so."""


def write(folder: Path, file: Path) -> None:
    """Converts; raises KeyError for a tensor that Qwen3-MoE does not have."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen3moe")
    _add_sizes(writer, config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    with safe_open(folder / "model.safetensors", "np") as tensors:
        names = set(tensors.keys())
        for layer in range(config["num_hidden_layers"]):
            for part in ("gate", "up", "down"):
                own = [
                    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                    for expert in range(config["num_experts"])
                ]
                _add(
                    writer, f"blk.{layer}.ffn_{part}_exps.weight", np.stack([tensors.get_tensor(name) for name in own])
                )
                names -= set(own)
        for name in sorted(names):
            _add(writer, renamed(name), tensors.get_tensor(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renamed(name: str) -> str:
    """A tensor's name in GGUF."""
    for pattern, there in NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, there, name)
    raise KeyError(f"{name} is not a tensor of Qwen3-MoE")


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
    if FLOAT32.fullmatch(name):
        writer.add_tensor(name, values.astype(np.float32))
        return
    bits = np.ascontiguousarray(values.astype(bfloat16)).view(np.uint8)
    writer.add_tensor(name, bits, raw_shape=bits.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    tokens = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens |= {number: token["content"] for number, token in added.items()}
    size = config["vocab_size"]
    kinds = [
        gguf.TokenType.UNUSED if number not in tokens
        else gguf.TokenType.CONTROL if number in added and added[number]["special"]
        else gguf.TokenType.USER_DEFINED if number in added
        else gguf.TokenType.NORMAL
        for number in range(size)
    ]  # fmt: skip
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    end = config["eos_token_id"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokens.get(number, f"[unused {number}]") for number in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(end[0] if isinstance(end, list) else end)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.file)


if __name__ == "__main__":
    main()
