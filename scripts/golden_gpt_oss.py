"""Fixtures of GPT-OSS, for make_goldens.py."""

from __future__ import annotations

from dataclasses import replace

from golden_chat_tokenizers import train_harmony
from golden_checkpoints import Variant
from golden_formats import store_mxfp4
from golden_layers import Config, Shapes, attention, norms, outer

GPT_OSS = """{
"architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "experts_per_token": 2,
"head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initial_context_length": 128, "initializer_range": 0.02,
"intermediate_size": 40,
"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
"max_position_embeddings": 1024, "model_type": "gpt_oss", "num_attention_heads": 8, "num_experts_per_tok": 2,
"num_hidden_layers": 4, "num_key_value_heads": 2, "num_local_experts": 8, "output_router_logits": false,
"rms_norm_eps": 0.01,
"rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 128,
    "rope_type": "yarn", "truncate": false},
"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 16, "swiglu_limit": 1.5,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0", "use_cache": true
}"""
"""The config.json of a published GPT-OSS, with small sizes, a window and a limit so small that they matter, and an
epsilon so large that a wrong one shows."""


def gpt_oss_shapes(config: Config) -> Shapes:
    """All experts of a layer in one tensor, [in, out], where a gate's column stands before that of its up projection."""
    hidden, inner, num_experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    num_heads = config["num_attention_heads"]
    shapes = outer(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= norms(prefix, hidden, "input_layernorm", "post_attention_layernorm")
        shapes |= attention(
            f"{prefix}.self_attn", hidden, num_heads, config["num_key_value_heads"], config["head_dim"], bias="qkvo"
        )
        shapes |= {
            f"{prefix}.self_attn.sinks": (num_heads,),
            f"{prefix}.mlp.router.weight": (num_experts, hidden),
            f"{prefix}.mlp.router.bias": (num_experts,),
            f"{prefix}.mlp.experts.gate_up_proj": (num_experts, hidden, 2 * inner),
            f"{prefix}.mlp.experts.gate_up_proj_bias": (num_experts, 2 * inner),
            f"{prefix}.mlp.experts.down_proj": (num_experts, inner, hidden),
            f"{prefix}.mlp.experts.down_proj_bias": (num_experts, hidden),
        }
    return shapes


PLAIN = Variant(
    GPT_OSS,
    gpt_oss_shapes,
    train_harmony,
    gains={"q_proj": 1.5, "k_proj": 1.5, "router": 2.0, "gate_up_proj": 1.5, "down_proj": 1.5},
    values={".sinks": (1.0, 1.0), "router.bias": (0.0, 0.7), "bias": (0.0, 0.4)},
    sampling={"do_sample": True},
    transposed=("experts.gate_up_proj", "experts.down_proj"),
)
VARIANTS = {
    "gpt_oss": PLAIN,
    "gpt_oss_mxfp4": replace(PLAIN, changes={"intermediate_size": 96}, store=store_mxfp4, quiet_added=True),
}
