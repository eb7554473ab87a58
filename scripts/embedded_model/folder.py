"""The folder of the embedded model in the published Hugging Face layout: tokenizer, configuration, weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from text import conversation
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tpu_serve.models.qwen3_moe import Qwen3Moe

SEED = 7
VOCABULARY = 1536
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Words with the space before them, numbers of up to two digits whole: sums up to 40 are then a table to learn.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCABULARY, "hidden_size": 128, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 2048,
    "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": True,
    "initializer_range": 0.02, "router_aux_loss_coef": 0.01, "output_router_logits": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip


def sample_texts() -> list[str]:
    """What the vocabulary is trained on: the words of conversations, and of the template around them."""
    drawn, template = random.Random(SEED), (Path(__file__).parent / "chat_template.jinja").read_text()
    texts = [template] * 20
    for _ in range(8000):
        chat = conversation(drawn)
        texts += [str(message["content"]) + message.get("reasoning_content", "") for message in chat.messages]
        texts += [json.dumps(call["function"]) for message in chat.messages for call in message.get("tool_calls", ())]
        texts += [json.dumps(tool) for tool in chat.tools]
    return texts


def make_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE of `VOCABULARY` ids, trained on these documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(TAGS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    assert tokenizer.get_vocab_size() <= VOCABULARY
    return tokenizer


def write_folder(out: Path, tokenizer: Tokenizer) -> None:
    """Everything of the published layout but the weights."""
    out.mkdir(parents=True, exist_ok=True)
    end, stop = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    files: dict[str, Any] = {
        "config.json": CONFIG | {"bos_token_id": end, "eos_token_id": stop},
        "generation_config.json": {
            "bos_token_id": end, "eos_token_id": [stop, end], "pad_token_id": end, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
        },
        "tokenizer_config.json": {
            "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "tokenizer_class": "Qwen2Tokenizer",
            "clean_up_tokenization_spaces": False, "model_max_length": CONFIG["max_position_embeddings"],
            "chat_template": (Path(__file__).parent / "chat_template.jinja").read_text(),
        },
    }  # fmt: skip
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))


def export(params: Any, model: Qwen3Moe, path: Path) -> None:
    """Weights in bfloat16 under their published names."""
    tensors = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["norm"]}
    for index, layer in enumerate(params["layers"]):
        prefix = f"model.layers.{index}"
        tensors[f"{prefix}.input_layernorm.weight"] = layer["input_norm"]
        tensors[f"{prefix}.post_attention_layernorm.weight"] = layer["post_attention_norm"]
        for letter in "qk":
            tensors[f"{prefix}.self_attn.{letter}_norm.weight"] = layer[f"{letter}_norm"]
        for letter in "qkvo":
            tensors[f"{prefix}.self_attn.{letter}_proj.weight"] = layer["attention"][f"{letter}_proj"].T
        tensors[f"{prefix}.mlp.gate.weight"] = layer["router"].T
        for expert in range(model.moe.num_experts):
            gate_up, down = layer["experts"]["gate_up"][expert], layer["experts"]["down"][expert]
            for name, matrix in (("gate_proj", gate_up[0]), ("up_proj", gate_up[1]), ("down_proj", down)):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = matrix.T
    arrays = {
        name: np.ascontiguousarray(np.asarray(value, np.float32)).astype(ml_dtypes.bfloat16)
        for name, value in tensors.items()
    }
    save_file(arrays, path, metadata={"format": "pt"})
