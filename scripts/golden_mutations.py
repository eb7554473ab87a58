"""What check_mutations.py does to a fixture: mistakes that a reader of its files could make."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

Edit = Callable[[Any], None]
"""Changes a model, the text model's part of a config.json or the tensors of a file, in place."""
ONE_MORE = ("gemma3_text", "qwen3_next", "qwen3_5_moe_text")
"""Model types whose norms, but for the gated one, multiply by one more than their weight."""


def without(name: str, tensor: torch.Tensor, model_type: str) -> torch.Tensor:
    """What stands for a tensor that was never read or, of a matrix, read with its rows the wrong way round."""
    one_more = model_type in ONE_MORE and not name.endswith("linear_attn.norm.weight")
    if name.endswith("norm.weight") or re.search(r"layernorm(_\d)?\.weight$", name):
        return torch.zeros_like(tensor) if one_more else torch.ones_like(tensor)
    if name.endswith("sinks"):
        return torch.full_like(tensor, -1e9)
    if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return torch.ones_like(tensor)
    if name.endswith(("bias", "A_log")):
        return torch.zeros_like(tensor)
    if name.endswith("conv1d.weight"):
        return tensor.flip(-1)
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        return torch.zeros_like(tensor)
    return tensor.flip(-2)


def set_all(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Every tensor whose name ends so becomes what `change` makes of it."""

    def edit(model: Any) -> None:
        found = [tensor for name, tensor in model.named_parameters() if name.endswith(ending)]
        assert found, ending
        for tensor in found:
            tensor.copy_(change(tensor.clone()))

    return edit


def set_attribute(module: str, name: str, value: Any) -> Edit:
    """Every module of a class whose name ends so gets the attribute, or what a function makes of the module."""

    def edit(model: Any) -> None:
        found = [one for one in model.modules() if type(one).__name__.endswith(module) and hasattr(one, name)]
        assert found, (module, name)
        for one in found:
            setattr(one, name, value(one) if callable(value) and not isinstance(value, torch.nn.Module) else value)

    return edit


def set_key(*path: str, value: Any) -> Edit:
    def edit(config: Any) -> None:
        for key in path[:-1]:
            config = config[key]
        assert config.get(path[-1]) != value
        config[path[-1]] = value

    return edit


def set_stored(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Of a file's tensors, every one whose name ends so becomes what `change` makes of it."""

    def edit(tensors: Any) -> None:
        found = [name for name in tensors if name.endswith(ending)]
        assert found, ending
        for name in found:
            tensors[name] = change(tensors[name])

    return edit


def swap_halves(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.roll(gate_up.shape[1] // 2, 1)


def halves_as_pairs(gate_up: torch.Tensor) -> torch.Tensor:
    """[E, in, 2 * I] read as if all gates stood first."""
    return gate_up.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def blocks_as_heads(num_heads: int, *sizes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows grouped by head (`sizes` of each kind per head) read as if each kind stood in one block."""

    def change(weight: torch.Tensor) -> torch.Tensor:
        blocks = weight.split([num_heads * size for size in sizes])
        return torch.cat([block.unflatten(0, (num_heads, -1)) for block in blocks], 1).flatten(0, 1)

    return change


def swap_norms(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.q_norm, module.k_norm = module.k_norm, module.q_norm


def shared_without_gate(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("shared_expert_gate"):
            module.register_forward_hook(lambda module, inputs, output: torch.full_like(output, 1e9))


def router_after_norm(model: Any) -> None:
    """Gemma 4's routers see what its experts see."""
    for _, layer in model.named_modules():
        if hasattr(layer, "router") and hasattr(layer, "pre_feedforward_layernorm_2"):
            norm = layer.pre_feedforward_layernorm_2
            layer.router.register_forward_pre_hook(lambda module, inputs, norm=norm: (norm(inputs[0]),))


EPSILON = {"epsilon 1e-6": set_key("rms_norm_eps", value=1e-6)}
WINDOW = {
    "window 17 for 16": set_key("sliding_window", value=17),
    "window 15 for 16": set_key("sliding_window", value=15),
}
SWAPPED = {"gate and up swapped": set_all("gate_up_proj", swap_halves)}
ONE_LESS = {"w for 1 + w": set_all("norm.weight", lambda weight: weight - 1)}
HEADS = {"q_norm and k_norm swapped": swap_norms}
OUTPUT_GATE = {"output gate in one block": set_all("self_attn.q_proj.weight", blocks_as_heads(4, 32, 32))}
UNGATED = {"shared expert without its gate": shared_without_gate}
THETA = {"theta 5e5": set_key("rope_theta", value=5e5)}
CONFIG_EDITS: dict[str, dict[str, Edit]] = {
    "qwen2_moe": EPSILON
    | THETA
    | {
        "weights normalised": set_key("norm_topk_prob", value=True),
        "window used": set_key("use_sliding_window", value=True),
        "one more expert": set_key("num_experts_per_tok", value=3),
    },
    "gpt_oss": EPSILON
    | THETA
    | WINDOW
    | {
        "YaRN truncated": set_key("rope_scaling", "truncate", value=True),
        "YaRN ignored": set_key("rope_scaling", value={"rope_type": "default"}),
        "YaRN without its factor of attention": set_key("rope_scaling", "attention_factor", value=1.0),
        "limit 7": set_key("swiglu_limit", value=7.0),
        "alpha 1": set_key("swiglu_alpha", value=1.0),
        "kinds of layers swapped": set_key("layer_types", value=["full_attention", "sliding_attention"] * 2),
    },
    "gemma4": EPSILON
    | WINDOW
    | {
        "cap 30": set_key("final_logit_softcapping", value=30.0),
        "no cap": set_key("final_logit_softcapping", value=None),
        "local theta 5e3": set_key("rope_parameters", "sliding_attention", "rope_theta", value=5e3),
        "global theta 5e5": set_key("rope_parameters", "full_attention", "rope_theta", value=5e5),
        "global RoPE on every dimension": set_key("rope_parameters", "full_attention", "rope_type", value="default"),
        "one more expert": set_key("top_k_experts", value=3),
    },
    "gemma3": EPSILON
    | WINDOW
    | THETA
    | {
        "local base 1e4": set_key("rope_local_base_freq", value=1e4),
        "scale by head size": set_key("query_pre_attn_scalar", value=16),
        "every third layer global: every second": set_key("sliding_window_pattern", value=2),
    },
    "qwen3_next": EPSILON
    | THETA
    | {
        "weights not normalised": set_key("norm_topk_prob", value=False),
        "RoPE on half a head": set_key("partial_rotary_factor", value=0.5),
    },
    "qwen3_5_moe": EPSILON
    | {
        "theta 5e3": set_key("rope_parameters", "rope_theta", value=5e3),
        "RoPE on half a head": set_key("rope_parameters", "partial_rotary_factor", value=0.5),
    },
    "qwen3": EPSILON | THETA,
    "qwen3_moe": THETA | {"weights not normalised": set_key("norm_topk_prob", value=False)},
}
MODEL_EDITS: dict[str, dict[str, Edit]] = {
    "qwen2_moe": SWAPPED | UNGATED,
    "gpt_oss": {
        "gate and up swapped": set_all(
            "gate_up_proj", lambda tensor: tensor.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        ),
        "gates first": set_all("gate_up_proj", halves_as_pairs),
    },
    "gemma4": SWAPPED
    | HEADS
    | {
        "values not normalised": set_attribute("TextAttention", "v_norm", torch.nn.Identity()),
        "attention scaled": set_attribute("TextAttention", "scaling", lambda one: one.head_dim**-0.5),
        "router without norm": set_attribute("TextRouter", "norm", torch.nn.Identity()),
        "router without 1 / sqrt(H)": set_attribute("TextRouter", "scalar_root_size", 1.0),
        "router after the norm": router_after_norm,
        "embedding not scaled": set_attribute("ScaledWordEmbedding", "embed_scale", torch.tensor(1.0)),
        "1 + w for w": set_all("norm.weight", lambda weight: weight + 1),
    },
    "gemma3": HEADS
    | ONE_LESS
    | {"embedding not scaled": set_attribute("ScaledWordEmbedding", "embed_scale", torch.tensor(1.0))},
    "qwen3_next": SWAPPED
    | HEADS
    | ONE_LESS
    | OUTPUT_GATE
    | UNGATED
    | {
        "qkvz in blocks": set_all("in_proj_qkvz.weight", blocks_as_heads(2, 16, 16, 32, 32)),
        "ba in blocks": set_all("in_proj_ba.weight", blocks_as_heads(2, 2, 2)),
        "a before b": set_all("in_proj_ba.weight", lambda rows: rows.unflatten(0, (2, 2, 2)).flip(1).flatten(0, 2)),
    },
    "qwen3_5_moe": SWAPPED
    | HEADS
    | ONE_LESS
    | OUTPUT_GATE
    | UNGATED
    | {
        "keys before queries": set_all(
            "in_proj_qkv.weight", lambda rows: torch.cat([rows[32:64], rows[:32], rows[64:]])
        )
    },
    "qwen3": HEADS,
    "qwen3_moe": SWAPPED | HEADS,
}
FILE_EDITS: dict[str, dict[str, Edit]] = {
    "gpt_oss_mxfp4": {
        "high half of a byte first": set_stored("_blocks", lambda codes: codes >> 4 | codes << 4),
        "exponents ignored": set_stored("_scales", lambda exponents: torch.full_like(exponents, 127)),
        "exponents of neighbours swapped": set_stored("_scales", lambda exponents: exponents.flip(-1)),
    },
    "qwen3_moe_fp8": {
        "divided by the scales": set_stored("_scale_inv", lambda scale: 1 / scale),
        "scales column by column": set_stored("_scale_inv", lambda scale: scale.t().reshape(scale.shape).contiguous()),
        "one scale for all blocks": set_stored("_scale_inv", lambda scale: scale.mean() * torch.ones_like(scale)),
    },
}


def unread(model: Any) -> Iterator[tuple[str, Edit]]:
    """For every kind of tensor that the text model has, (its name, an edit that leaves it unread)."""
    model_type = model.config.get_text_config().model_type
    kinds: dict[str, list[str]] = {}
    for name in model.state_dict():
        if not any(part in name for part in ("visual", "vision")):
            kinds.setdefault(re.sub(r"\.\d+\.", ".N.", name).split("layers.N.")[-1], []).append(name)
    for kind, names in kinds.items():

        def edit(model: Any, names: list[str] = names) -> None:
            tensors = model.state_dict()
            for name in names:
                tensors[name].copy_(without(name, tensors[name], model_type))

        yield kind, edit
