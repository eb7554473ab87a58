"""Fixtures of Qwen3-Next and Qwen3.5-MoE, whose layers mostly hold a gated delta rule, for make_goldens.py."""

from __future__ import annotations

from golden_chat_tokenizers import train_marked_byte_level
from golden_checkpoints import Variant
from golden_layers import Config, Shapes, attention, experts, fused_experts, norms, outer, shared_expert
from golden_tokenizers import train_byte_level

QWEN3_NEXT = """{
"architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1,
"full_attention_interval": 2, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
"intermediate_size": 96, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
"linear_num_value_heads": 4, "linear_value_head_dim": 16, "max_position_embeddings": 512, "mlp_only_layers": [],
"model_type": "qwen3_next", "moe_intermediate_size": 32, "norm_topk_prob": true, "num_attention_heads": 4,
"num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 4, "num_key_value_heads": 2,
"output_router_logits": false, "partial_rotary_factor": 0.25, "rms_norm_eps": 0.01, "rope_scaling": null,
"rope_theta": 10000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 48,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": true,
"use_sliding_window": false
}"""
"""The config.json of a published Qwen3-Next, with small sizes, another interval, and an epsilon so large that a wrong
one shows. It does not say which layer is of which kind."""
QWEN3_5_MOE = """{
"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
"text_config": {
    "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16",
    "full_attention_interval": 4, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 16, "mamba_ssm_dtype": "float32", "max_position_embeddings": 512, "mlp_only_layers": [],
    "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 24, "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": false, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 3,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 0.01, "router_aux_loss_coef": 0.001,
    "rope_parameters": {"mrope_interleaved": true, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
        "rope_theta": 10000, "rope_type": "default"},
    "shared_expert_intermediate_size": 40, "use_cache": true},
"tie_word_embeddings": false, "transformers_version": "4.57.0.dev0",
"vision_config": {
    "deepstack_visual_indexes": [], "depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 16, "in_channels": 3,
    "initializer_range": 0.02, "intermediate_size": 24, "model_type": "qwen3_5_moe", "num_heads": 2,
    "num_position_embeddings": 16, "out_hidden_size": 64, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2}
}"""
"""The config.json of a published Qwen3.5-MoE, with small sizes and an epsilon so large that a wrong one shows."""
VISION = """
patch_embed.proj.weight 16 3 2 4 4
patch_embed.proj.bias 16
pos_embed.weight 16 16
blocks.0.norm1.weight 16
blocks.0.norm1.bias 16
blocks.0.norm2.weight 16
blocks.0.norm2.bias 16
blocks.0.attn.qkv.weight 48 16
blocks.0.attn.qkv.bias 48
blocks.0.attn.proj.weight 16 16
blocks.0.attn.proj.bias 16
blocks.0.mlp.linear_fc1.weight 24 16
blocks.0.mlp.linear_fc1.bias 24
blocks.0.mlp.linear_fc2.weight 16 24
blocks.0.mlp.linear_fc2.bias 16
merger.norm.weight 16
merger.norm.bias 16
merger.linear_fc1.weight 64 64
merger.linear_fc1.bias 64
merger.linear_fc2.weight 64 64
merger.linear_fc2.bias 64
"""
"""What a text model skips: name after `model.visual.`, shape."""


def gated_attention(prefix: str, config: Config) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    return attention(
        prefix, hidden, config["num_attention_heads"], config["num_key_value_heads"], head, gated=True
    ) | norms(prefix, head, "q_norm", "k_norm")


def delta_rule(prefix: str, config: Config, *, grouped: bool) -> Shapes:
    """One layer's tensors.

    Args:
      grouped: two projections whose rows are ordered by key head, instead of four plain ones.
    """
    hidden, num_values = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = num_values * config["linear_value_head_dim"]
    rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * num_values}
    if not grouped:
        rows = {"qkv": 2 * keys + values, "z": values, "b": num_values, "a": num_values}
    shapes: Shapes = {f"{prefix}.in_proj_{name}.weight": (num, hidden) for name, num in rows.items()}
    return shapes | {
        f"{prefix}.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        f"{prefix}.A_log": (num_values,),
        f"{prefix}.dt_bias": (num_values,),
        f"{prefix}.norm.weight": (config["linear_value_head_dim"],),
        f"{prefix}.out_proj.weight": (hidden, values),
    }


def qwen3_next_shapes(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    shapes = outer(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= norms(prefix, hidden, "input_layernorm", "post_attention_layernorm")
        if (layer + 1) % config["full_attention_interval"]:
            shapes |= delta_rule(f"{prefix}.linear_attn", config, grouped=True)
        else:
            shapes |= gated_attention(f"{prefix}.self_attn", config)
        shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        shapes |= experts(f"{prefix}.mlp.experts", config["num_experts"], hidden, config["moe_intermediate_size"])
        shapes |= shared_expert(f"{prefix}.mlp", hidden, config["shared_expert_intermediate_size"])
    return shapes


def qwen3_5_moe_shapes(config: Config) -> Shapes:
    """The text model, the vision tower and the layer that predicts one token further."""
    hidden = config["hidden_size"]
    shapes = outer(config, "model.language_model")

    def add_block(prefix: str, kind: str) -> None:
        nonlocal shapes
        shapes |= norms(prefix, hidden, "input_layernorm", "post_attention_layernorm")
        if kind == "linear_attention":
            shapes |= delta_rule(f"{prefix}.linear_attn", config, grouped=False)
        else:
            shapes |= gated_attention(f"{prefix}.self_attn", config)
        shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        shapes |= fused_experts(f"{prefix}.mlp.experts", config["num_experts"], hidden, config["moe_intermediate_size"])
        shapes |= shared_expert(f"{prefix}.mlp", hidden, config["shared_expert_intermediate_size"])

    for layer, kind in enumerate(config["layer_types"]):
        add_block(f"model.language_model.layers.{layer}", kind)
    for line in VISION.split("\n")[1:-1]:
        name, *shape = line.split()
        shapes[f"model.visual.{name}"] = tuple(map(int, shape))
    add_block("mtp.layers.0", "full_attention")
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    return shapes | norms("mtp", hidden, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


GAINS = {
    "gate": 2.0,
    "gate_proj": 1.5,
    "up_proj": 1.5,
    "gate_up_proj": 1.5,
    "down_proj": 2.5,
    "o_proj": 2.0,
    "out_proj": 1.5,
    "conv1d": 1.5,
}
VALUES = {
    "linear_attn.norm.weight": (1.0, 0.3),
    "q_norm.weight": (0.4, 0.4),  # one more than stands here is what multiplies
    "k_norm.weight": (0.4, 0.4),
    "norm.weight": (0.0, 0.3),
    "norm_embedding.weight": (0.0, 0.3),
    "norm_hidden.weight": (0.0, 0.3),
    "A_log": (-1.0, 0.7),
    "dt_bias": (-1.0, 0.7),
}
VARIANTS = {
    "qwen3_next": Variant(
        QWEN3_NEXT,
        qwen3_next_shapes,
        train_byte_level,
        gains=GAINS,
        values=VALUES,
        sampling={"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    ),
    "qwen3_5_moe": Variant(
        QWEN3_5_MOE,
        qwen3_5_moe_shapes,
        train_marked_byte_level,
        gains=GAINS | {"gate": 3.0},
        values=VALUES,
        sampling={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        named_ids={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        float32=("linear_attn.A_log", "linear_attn.norm.weight"),
        quiet_added=True,
        num_files=2,
    ),
}
