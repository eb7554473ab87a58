"""Fixtures of Gemma 3 and Gemma 4, for make_goldens.py."""

from __future__ import annotations

from golden_chat_tokenizers import train_gemma3, train_gemma4
from golden_checkpoints import Variant
from golden_layers import Config, Shapes, attention, fused_experts, mlp, norms, outer

GEMMA3 = """{
"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"attn_logit_softcapping": null, "cache_implementation": "hybrid", "final_logit_softcapping": null, "head_dim": 16,
"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
"max_position_embeddings": 512, "model_type": "gemma3_text", "num_attention_heads": 8, "num_hidden_layers": 4,
"num_key_value_heads": 2, "query_pre_attn_scalar": 40, "rms_norm_eps": 0.01, "rope_local_base_freq": 100,
"rope_scaling": null, "rope_theta": 1000000, "sliding_window": 16, "sliding_window_pattern": 3,
"torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": true
}"""
"""The config.json of a published text-only Gemma 3, with small sizes, a window so small that it matters, a local base
that few would guess, and an epsilon so large that a wrong one shows. It does not say that the head is tied."""
GEMMA4 = """{
"architectures": ["Gemma4ForConditionalGeneration"], "audio_config": null, "dtype": "bfloat16",
"initializer_range": 0.02, "model_type": "gemma4",
"text_config": {
    "attention_bias": false, "attention_dropout": 0.0, "attention_k_eq_v": true, "dtype": "bfloat16",
    "enable_moe_block": true, "final_logit_softcapping": 10.0, "global_head_dim": 32, "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64, "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02, "intermediate_size": 80,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 512, "model_type": "gemma4_text", "moe_intermediate_size": 24,
    "num_attention_heads": 4, "num_experts": 8, "num_global_key_value_heads": 1, "num_hidden_layers": 5,
    "num_key_value_heads": 2, "num_kv_shared_layers": 0, "rms_norm_eps": 0.01,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
    "sliding_window": 16, "tie_word_embeddings": true, "top_k_experts": 2,
    "use_bidirectional_attention": "vision", "use_cache": true, "use_double_wide_mlp": false,
    "vocab_size_per_layer_input": 512},
"tie_word_embeddings": true, "transformers_version": "5.5.0.dev0",
"vision_config": {
    "attention_bias": false, "attention_dropout": 0.0, "default_output_length": 4, "dtype": "bfloat16",
    "global_head_dim": 8, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 16,
    "intermediate_size": 24, "max_position_embeddings": 512, "model_type": "gemma4_vision", "num_attention_heads": 2,
    "num_hidden_layers": 1, "num_key_value_heads": 2, "patch_size": 4, "pooling_kernel_size": 3,
    "position_embedding_size": 16, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": true,
    "use_clipped_linears": false},
"vision_soft_tokens_per_image": 4
}"""
"""The config.json of a published Gemma 4 with experts, with small sizes, a window and a cap so small that they matter,
and an epsilon so large that a wrong one shows."""
VISION = """
vision_tower.std_bias 16
vision_tower.std_scale 16
vision_tower.patch_embedder.position_embedding_table 2 16 16
vision_tower.patch_embedder.input_proj.weight 16 48
vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight 16 16
vision_tower.encoder.layers.0.self_attn.k_proj.linear.weight 16 16
vision_tower.encoder.layers.0.self_attn.v_proj.linear.weight 16 16
vision_tower.encoder.layers.0.self_attn.o_proj.linear.weight 16 16
vision_tower.encoder.layers.0.self_attn.q_norm.weight 8
vision_tower.encoder.layers.0.self_attn.k_norm.weight 8
vision_tower.encoder.layers.0.mlp.gate_proj.linear.weight 24 16
vision_tower.encoder.layers.0.mlp.up_proj.linear.weight 24 16
vision_tower.encoder.layers.0.mlp.down_proj.linear.weight 16 24
vision_tower.encoder.layers.0.input_layernorm.weight 16
vision_tower.encoder.layers.0.post_attention_layernorm.weight 16
vision_tower.encoder.layers.0.pre_feedforward_layernorm.weight 16
vision_tower.encoder.layers.0.post_feedforward_layernorm.weight 16
embed_vision.embedding_projection.weight 64 16
"""
"""What a text model skips: name after `model.`, shape."""
AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
BESIDE = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")


def gemma3_shapes(config: Config) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    shapes = outer(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= norms(prefix, hidden, *AROUND)
        shapes |= attention(
            f"{prefix}.self_attn", hidden, config["num_attention_heads"], config["num_key_value_heads"], head
        )
        shapes |= norms(f"{prefix}.self_attn", head, "q_norm", "k_norm")
        shapes |= mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    return shapes


def gemma4_shapes(config: Config) -> Shapes:
    """A dense MLP and experts in every layer; global layers have other heads and no v_proj."""
    hidden, num_experts = config["hidden_size"], config["num_experts"]
    shapes = outer(config, "model.language_model")
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.language_model.layers.{layer}"
        is_global = kind == "full_attention"
        num_kv_heads = config["num_global_key_value_heads" if is_global else "num_key_value_heads"]
        head = config["global_head_dim" if is_global else "head_dim"]
        shapes |= norms(prefix, hidden, *AROUND, *BESIDE)
        shapes |= attention(f"{prefix}.self_attn", hidden, config["num_attention_heads"], num_kv_heads, head)
        if is_global:
            del shapes[f"{prefix}.self_attn.v_proj.weight"]
        shapes |= norms(f"{prefix}.self_attn", head, "q_norm", "k_norm")
        shapes |= mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
        shapes |= fused_experts(f"{prefix}.experts", num_experts, hidden, config["moe_intermediate_size"])
        shapes |= {
            f"{prefix}.layer_scalar": (1,),
            f"{prefix}.router.proj.weight": (num_experts, hidden),
            f"{prefix}.router.scale": (hidden,),
            f"{prefix}.router.per_expert_scale": (num_experts,),
        }
    for line in VISION.split("\n")[1:-1]:
        name, *shape = line.split()
        shapes[f"model.{name}"] = tuple(map(int, shape))
    return shapes


MLP_GAINS = {"gate_proj": 1.5, "up_proj": 1.5, "down_proj": 2.0}
SAMPLING = {"do_sample": True, "top_k": 64, "top_p": 0.95}
VARIANTS = {
    "gemma4": Variant(
        GEMMA4,
        gemma4_shapes,
        train_gemma4,
        gains=MLP_GAINS | {"gate_up_proj": 1.5, "proj": 22.0},  # the router's input has a deviation of 1 / 8
        values={
            "q_norm.weight": (0.8, 0.25),  # attention divides by nothing
            "k_norm.weight": (0.8, 0.25),
            "post_attention_layernorm.weight": (2.5, 0.4),  # the tied embedding must not drown the layers
            "post_feedforward_layernorm.weight": (2.5, 0.4),
            "layer_scalar": (0.85, 0.15),
            "per_expert_scale": (1.0, 0.4),
        },
        sampling=SAMPLING | {"temperature": 1.0},
        named_ids={
            "eos_token_id": ("<eos>", "<turn|>"),
            "image_token_id": "<|image|>",
            "audio_token_id": "<|audio|>",
            "video_token_id": "<|video|>",
        },
    ),
    "gemma3": Variant(
        GEMMA3,
        gemma3_shapes,
        train_gemma3,
        gains=MLP_GAINS,
        values={  # one more than stands here is what multiplies
            "q_norm.weight": (0.7, 0.4),
            "k_norm.weight": (0.7, 0.4),
            "post_attention_layernorm.weight": (4.0, 0.4),
            "post_feedforward_layernorm.weight": (4.0, 0.4),
            "norm.weight": (0.0, 0.3),
        },
        sampling=SAMPLING,
        named_ids={"eos_token_id": ("<eos>", "<end_of_turn>")},
        quiet_added=True,
    ),
}
