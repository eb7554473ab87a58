"""Fixture of Mixtral, for make_goldens.py."""

from __future__ import annotations

from golden_checkpoints import Variant
from golden_layers import Config, Shapes, attention, norms, outer
from golden_tokenizers import train_byte_fallback

MIXTRAL = """{
"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 64,
"initializer_range": 0.02, "intermediate_size": 48, "max_position_embeddings": 512, "model_type": "mixtral",
"num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 2,
"num_local_experts": 6, "output_router_logits": false, "rms_norm_eps": 0.01, "rope_theta": 10000.0,
"router_aux_loss_coef": 0.02, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.36.0.dev0", "use_cache": true
}"""
"""The config.json of a published Mixtral, with small sizes. The epsilon is so large that a wrong one shows."""


def mixtral_shapes(config: Config) -> Shapes:
    hidden, inner, num_heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    shapes = outer(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= norms(prefix, hidden, "input_layernorm", "post_attention_layernorm")
        shapes |= attention(
            f"{prefix}.self_attn", hidden, num_heads, config["num_key_value_heads"], hidden // num_heads
        )
        moe = f"{prefix}.block_sparse_moe"
        shapes[f"{moe}.gate.weight"] = (config["num_local_experts"], hidden)
        for expert in range(config["num_local_experts"]):
            for name, shape in {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}.items():
                shapes[f"{moe}.experts.{expert}.{name}.weight"] = shape
    return shapes


VARIANTS = {
    "mixtral": Variant(
        MIXTRAL,
        mixtral_shapes,
        train_byte_fallback,
        gains={"q_proj": 1.5, "k_proj": 1.5, "gate": 2.0, "w1": 1.5, "w3": 1.5, "w2": 2.0},
    )
}
