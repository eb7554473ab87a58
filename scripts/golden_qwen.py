"""Fixtures of Qwen2-MoE, Qwen3-MoE and the dense Qwen3, for make_goldens.py."""

from __future__ import annotations

from dataclasses import replace

from golden_checkpoints import Variant
from golden_formats import store_fp8
from golden_layers import Config, Shapes, attention, experts, mlp, norms, outer, shared_expert
from golden_tokenizers import train_byte_level

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
QWEN2_MOE = """{
"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1, "hidden_act": "silu",
"hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 512,
"max_window_layers": 2, "model_type": "qwen2_moe", "moe_intermediate_size": 32, "norm_topk_prob": false,
"num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3,
"num_key_value_heads": 2, "output_router_logits": false, "rms_norm_eps": 0.01, "rope_theta": 1000000.0,
"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 48, "sliding_window": 16,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": true,
"use_sliding_window": false
}"""
"""The config.json of a published Qwen1.5-MoE, with small sizes; the window is one that nothing may use. The epsilon,
here and below, is so large that a wrong one shows."""
QWEN3 = """{
"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "head_dim": 16,
"hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
"max_position_embeddings": 512, "max_window_layers": 3, "model_type": "qwen3", "num_attention_heads": 8,
"num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 0.01, "rope_scaling": null,
"rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
"transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false
}"""
"""The config.json of a published small Qwen3, with smaller sizes."""


def qwen3_moe_shapes(config: Config) -> Shapes:
    """Layers with experts, or with an MLP where `mlp_only_layers` says so."""
    hidden, head = config["hidden_size"], config["head_dim"]
    shapes = outer(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= norms(prefix, hidden, "input_layernorm", "post_attention_layernorm")
        shapes |= attention(
            f"{prefix}.self_attn", hidden, config["num_attention_heads"], config["num_key_value_heads"], head
        )
        shapes |= norms(f"{prefix}.self_attn", head, "q_norm", "k_norm")
        if "num_experts" not in config or layer in config["mlp_only_layers"]:
            shapes |= mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        shapes |= experts(f"{prefix}.mlp.experts", config["num_experts"], hidden, config["moe_intermediate_size"])
    return shapes


def qwen2_moe_shapes(config: Config) -> Shapes:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    shapes = outer(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= norms(prefix, hidden, "input_layernorm", "post_attention_layernorm")
        shapes |= attention(
            f"{prefix}.self_attn", hidden, num_heads, config["num_key_value_heads"], hidden // num_heads, bias="qkv"
        )
        shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        shapes |= experts(f"{prefix}.mlp.experts", config["num_experts"], hidden, config["moe_intermediate_size"])
        shapes |= shared_expert(f"{prefix}.mlp", hidden, config["shared_expert_intermediate_size"])
    return shapes


HEAD_NORMS = dict.fromkeys(("q_norm.weight", "k_norm.weight"), (1.4, 0.4))
"""Attention that is neither flat nor stuck on one key."""
MLP_GAINS = {"gate_proj": 1.5, "up_proj": 1.5, "down_proj": 2.0}
THINKING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
PLAIN = Variant(
    QWEN3_MOE,
    qwen3_moe_shapes,
    train_byte_level,
    gains=MLP_GAINS | {"gate": 2.0},
    values=HEAD_NORMS,
    sampling=THINKING,
)
VARIANTS = {
    "qwen3_moe": PLAIN,
    "qwen3_moe_fp8": replace(PLAIN, store=store_fp8, quiet_added=True),
    "qwen3_moe_tied": replace(
        PLAIN,
        changes=TIED,
        sampling={"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05},
    ),
    "qwen2_moe": Variant(
        QWEN2_MOE,
        qwen2_moe_shapes,
        train_byte_level,
        gains={"q_proj": 1.4, "k_proj": 1.4, "gate": 2.0, "gate_proj": 1.5, "up_proj": 1.5, "down_proj": 2.5},
        values={"_proj.bias": (0.0, 0.5)},
        sampling={"do_sample": True, "repetition_penalty": 1.05, "top_k": 20, "top_p": 0.8},
    ),
    "qwen3": Variant(
        QWEN3,
        qwen3_moe_shapes,
        train_byte_level,
        gains=MLP_GAINS | {"down_proj": 3.0, "o_proj": 2.0},
        values=HEAD_NORMS,
        sampling=THINKING,
        quiet_added=True,
    ),
}
