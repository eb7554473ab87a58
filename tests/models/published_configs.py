"""The config.json of published models, as far as it says what weights there are, and what is known of them.

`PUBLISHED` maps a model's name to its entry; test_published.py checks them all.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """Attributes:
    config: of config.json; for models that see or hear, of the text model.
    billions: of parameters, those of experts that a token does not reach included.
    kv_bytes: that all layers keep of a token in bfloat16, windows or not.
    """

    config: dict[str, Any]
    billions: float
    kv_bytes: int


QWEN15_MOE_A27B = {
    "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu",
    "max_position_embeddings": 8192, "max_window_layers": 21, "use_sliding_window": False, "sliding_window": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "decoder_sparse_step": 1,
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip
QWEN2_57B_A14B = QWEN15_MOE_A27B | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 65536,
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 40960, "use_sliding_window": False, "sliding_window": None,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "tie_word_embeddings": False,
    "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
QWEN3_30B_A3B_2507 = QWEN3_30B_A3B | {"rope_theta": 1e7, "max_position_embeddings": 262144}
QWEN3_235B_A22B = QWEN3_30B_A3B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}  # fmt: skip
QWEN3_CODER_480B_A35B = QWEN3_30B_A3B_2507 | {
    "hidden_size": 6144, "intermediate_size": 8192, "num_hidden_layers": 62, "num_attention_heads": 96,
    "num_key_value_heads": 8, "num_experts": 160, "moe_intermediate_size": 2560,
}  # fmt: skip
QWEN3_06B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 28, "use_sliding_window": False,
    "sliding_window": None, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None,
    "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT_80B_A3B = {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu",
    "max_position_embeddings": 262144, "use_sliding_window": False, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
    "rope_scaling": None, "partial_rotary_factor": 0.25, "tie_word_embeddings": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "norm_topk_prob": True, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_CODER_NEXT = QWEN3_NEXT_80B_A3B | {"rope_theta": 5e6}
QWEN35_35B_A3B = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "attn_output_gate": True,
    "attention_bias": False, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32", "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 1e7,
        "rope_type": "default",
    },
    "tie_word_embeddings": False, "mlp_only_layers": [], "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "mtp_num_hidden_layers": 1,
}  # fmt: skip
QWEN35_122B_A10B = QWEN35_35B_A3B | {
    "hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32, "linear_num_value_heads": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12, "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}  # fmt: skip
QWEN35_397B_A17B = QWEN35_122B_A10B | {
    "hidden_size": 4096, "num_hidden_layers": 60, "num_experts": 512, "num_experts_per_tok": 10,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
    "max_position_embeddings": 32768, "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "tie_word_embeddings": False, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "attention_bias": True, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 128, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False, "num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4,
    "swiglu_limit": 7.0,
}  # fmt: skip
GPT_OSS_20B = GPT_OSS_120B | {
    "num_hidden_layers": 24, "layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32,
}  # fmt: skip
GEMMA_4_26B_A4B = {
    "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
    "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
    "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "sliding_window": 1024,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
}  # fmt: skip
GEMMA_4_31B = GEMMA_4_26B_A4B | {
    "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "enable_moe_block": False,
    "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
}  # fmt: skip
GEMMA_3_1B = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6,
}  # fmt: skip
GEMMA_3_4B = {  # says nothing that the class has as a default
    "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip
GEMMA_3_27B = GEMMA_3_4B | {
    "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
}  # fmt: skip

PUBLISHED = {
    "Qwen1.5-MoE-A2.7B": Published(QWEN15_MOE_A27B, 14.32, 196_608),
    "Qwen2-57B-A14B": Published(QWEN2_57B_A14B, 57.41, 57_344),
    "Qwen3-30B-A3B": Published(QWEN3_30B_A3B, 30.53, 98_304),
    "Qwen3-30B-A3B-Instruct-2507": Published(QWEN3_30B_A3B_2507, 30.53, 98_304),
    "Qwen3-235B-A22B": Published(QWEN3_235B_A22B, 235.09, 192_512),
    "Qwen3-Coder-480B-A35B": Published(QWEN3_CODER_480B_A35B, 480.15, 253_952),
    "Qwen3-0.6B": Published(QWEN3_06B, 0.596, 114_688),
    "Qwen3-8B": Published(QWEN3_8B, 8.19, 147_456),
    "Qwen3-Next-80B-A3B": Published(QWEN3_NEXT_80B_A3B, 79.67, 24_576),
    "Qwen3-Coder-Next": Published(QWEN3_CODER_NEXT, 79.67, 24_576),
    "Qwen3.5-35B-A3B": Published(QWEN35_35B_A3B, 34.66, 20_480),
    "Qwen3.5-122B-A10B": Published(QWEN35_122B_A10B, 122.11, 24_576),
    "Qwen3.5-397B-A17B": Published(QWEN35_397B_A17B, 396.35, 30_720),
    "Mixtral-8x7B": Published(MIXTRAL_8X7B, 46.70, 131_072),
    "gpt-oss-20b": Published(GPT_OSS_20B, 20.91, 49_152),
    "gpt-oss-120b": Published(GPT_OSS_120B, 116.83, 73_728),
    "gemma-4-26B-A4B": Published(GEMMA_4_26B_A4B, 25.23, 225_280),
    "gemma-4-31B": Published(GEMMA_4_31B, 30.70, 901_120),
    "gemma-3-1b": Published(GEMMA_3_1B, 1.000, 26_624),
    "gemma-3-4b": Published(GEMMA_3_4B, 3.880, 139_264),
    "gemma-3-27b": Published(GEMMA_3_27B, 27.01, 507_904),
}
