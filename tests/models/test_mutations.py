"""Every weight and every rule of a family matters to the goldens: without it, or with another one, the logits are far off.

Add a family's mutations, made by the functions of mutations.py, to MUTATIONS.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import backend_for, empty_caches, load_fixture
from mutations import (
    activation,
    concatenated,
    config,
    delta_net,
    each_layer,
    each_window,
    gates_behind_queries,
    moe,
    neutral,
    sizes,
    swapped,
    weight,
    without,
)
from whole_sequence import WholeSequence

FAR = 0.05
"""A hundred times the tolerance of test_parity.py."""

OTHER_THETA = sizes(rope=lambda rope: dataclasses.replace(rope, inverse_frequencies=rope.inverse_frequencies[::-1]))
NORMS = neutral("norm", "input_norm", "post_attention_norm")
EXPERTS_SWAPPED = {"gate and up swapped": weight("experts.gate_up", lambda values: values[:, ::-1])}

HEAD_NORMS = neutral("q_norm", "k_norm")

HYBRID = {
    **neutral("delta_net.norm"),
    **{
        f"{path} without the one": weight(path, lambda values: values - 1)
        for path in ("norm", "input_norm", "post_attention_norm", "attention.q_norm", "attention.k_norm")
    },
    **{f"taps of {name} reversed": weight(f"delta_net.{name}_conv", lambda taps: taps[..., ::-1]) for name in "qkv"},
    **without("delta_net.decay_log", "delta_net.decay_bias", "delta_net.a_proj", "delta_net.b_proj"),
    **without("shared_expert_gate", "shared_expert.down_proj"),
    "query and key swapped": swapped("delta_net", "q_proj", "k_proj"),
    "value and gate swapped": swapped("delta_net", "v_proj", "z_proj"),
    "decay and strength swapped": swapped("delta_net", "a_proj", "b_proj"),
    "attention's gates behind its queries": weight("attention.q_proj", gates_behind_queries),
    "shared gate and up swapped": swapped("shared_expert", "gate_proj", "up_proj"),
    **EXPERTS_SWAPPED,
}
"""Of Qwen3-Next and Qwen3.5-MoE."""

MUTATIONS = {
    "qwen3": {
        **NORMS,
        **HEAD_NORMS,
        "gate and up swapped": swapped("mlp", "gate_proj", "up_proj"),
        "other frequencies": OTHER_THETA,
        "other epsilon": sizes(epsilon=lambda epsilon: epsilon / 10),
        "windows": sizes(windows=lambda windows: (16,) * len(windows)),
    },
    "qwen3_moe": {
        **NORMS,
        **HEAD_NORMS,
        **EXPERTS_SWAPPED,
        "weights of experts as they are": moe(renormalise=False),
        "one expert fewer": moe(top_k=1),
        "other frequencies": OTHER_THETA,
    },
    "mixtral": {
        **NORMS,
        **EXPERTS_SWAPPED,
        "weights of experts as they are": moe(renormalise=False),
        "other frequencies": OTHER_THETA,
        "other epsilon": sizes(epsilon=lambda epsilon: epsilon / 10),
        "window": sizes(window=lambda window: 16),
    },
    "qwen2_moe": {
        **without(
            "attention.q_proj_bias",
            "attention.k_proj_bias",
            "attention.v_proj_bias",
            "shared_expert_gate",
            "shared_expert.down_proj",
        ),
        **NORMS,
        **EXPERTS_SWAPPED,
        "shared gate and up swapped": swapped("shared_expert", "gate_proj", "up_proj"),
        "weights of experts renormalised": moe(renormalise=True),
        "one expert fewer": moe(top_k=1),
        "other frequencies": OTHER_THETA,
        "other epsilon": sizes(epsilon=lambda epsilon: epsilon / 10),
        "windows": sizes(windows=lambda windows: (16,) * len(windows)),
    },
    "qwen3_next": {
        **HYBRID,
        "weights of experts as they are": moe(renormalise=False),
        "one expert fewer": moe(top_k=2),
        "other frequencies": OTHER_THETA,
        "whole heads rotated": config("qwen3_next", partial_rotary_factor=1.0),
        "other epsilon": sizes(epsilon=lambda epsilon: epsilon / 10),
        "other epsilon of the gated norm": delta_net(epsilon=1e-3),
    },
    "qwen3_5_moe": {
        **HYBRID,
        "weights of experts as they are": moe(renormalise=False),
        "whole heads rotated": config("qwen3_5_moe", partial_rotary_factor=1.0),
    },
    "gemma3": {
        **without(  # norms add 1 to their weight
            "norm",
            "input_norm",
            "q_norm",
            "k_norm",
            "post_attention_norm",
            "pre_mlp_norm",
            "post_mlp_norm",
            "mlp.down_proj",
        ),
        "gate and up swapped": swapped("mlp", "gate_proj", "up_proj"),
        "window one wider": sizes(window=lambda window: window + 1),
        "window one narrower": sizes(window=lambda window: window - 1),
        "full attention everywhere": sizes(layer_types=lambda types: ("full_attention",) * len(types)),
        "windows everywhere": sizes(layer_types=lambda types: ("sliding_attention",) * len(types)),
        "thetas swapped": sizes(ropes=lambda ropes: ropes[::-1]),
        "scaled by the size of a head": sizes(score_scale=lambda scale: 0.25),
        "logits capped": sizes(cap=lambda cap: 10.0),
        "other epsilon": sizes(epsilon=lambda epsilon: epsilon / 10),
    },
    "gemma4": {
        **neutral(
            "norm",
            "input_norm",
            "q_norm",
            "k_norm",
            "post_attention_norm",
            "pre_mlp_norm",
            "post_mlp_norm",
            "pre_experts_norm",
            "post_experts_norm",
            "post_feed_forward_norm",
            "layer_scalar",
            "router_scale",
            "expert_scale",
        ),
        **without("mlp.down_proj", "experts.down"),
        **EXPERTS_SWAPPED,
        "MLP's gate and up swapped": swapped("mlp", "gate_proj", "up_proj"),
        "SiLU in the experts": activation(name="silu"),
        "one expert fewer": moe(top_k=1),
        "window one wider": each_layer(window=lambda window: window and window + 1),
        "window one narrower": each_layer(window=lambda window: window and window - 1),
        "no windows": each_layer(window=lambda window: None),
        "global layers rotate whole": config("gemma4", rope_parameters={"full_attention": {"rope_type": "default"}}),
        "global layers rotate neighbours": config(
            "gemma4", rope_parameters={"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.25}}
        ),
        "theta of global layers": config("gemma4", rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        "theta of window layers": config("gemma4", rope_parameters={"sliding_attention": {"rope_theta": 1e6}}),
        "cap of the published models": sizes(cap=lambda cap: 30.0),
        "no cap": sizes(cap=lambda cap: None),
        "other epsilon": sizes(epsilon=lambda epsilon: epsilon / 10),
    },
    "gpt_oss": {
        **without(
            "attention.q_proj_bias",
            "attention.k_proj_bias",
            "attention.v_proj_bias",
            "attention.o_proj_bias",
            "router_bias",
            "experts.gate_up_bias",
            "experts.down_bias",
            "sinks",
        ),
        **NORMS,
        **EXPERTS_SWAPPED,
        "no sinks": weight("sinks", lambda values: values - 1e4),
        "biases of gate and up swapped": weight("experts.gate_up_bias", lambda values: values[:, ::-1]),
        "gate and up not interleaved": weight("experts.gate_up", concatenated),
        "limit of the published models": activation(limit=7.0),
        "sigmoid without alpha": activation(alpha=1.0),
        "plain SiLU": activation(name="silu"),
        "window one wider": each_window(lambda window: window + 1),
        "window one narrower": each_window(lambda window: window - 1),
        "no windows": each_window(lambda window: None),
        "full attention first": sizes(windows=lambda windows: windows[::-1]),
        "YaRN truncated": config("gpt_oss", rope_scaling={"truncate": True}),
        "magnitude ignored": sizes(rope=lambda rope: dataclasses.replace(rope, magnitude=1.0)),
        "other frequencies": OTHER_THETA,
        "other epsilon": sizes(epsilon=lambda epsilon: epsilon / 10),
    },
}


load = functools.cache(load_fixture)


def logits_of(model, params, prompt):
    """Operation by operation: those are compiled once for all mutations, a program would be once for each."""
    with jax.disable_jit():
        token_ids, positions = jnp.asarray(prompt), jnp.arange(len(prompt))
        is_token = jnp.ones(len(prompt), bool)
        hidden, _ = model.forward(
            params, token_ids, positions, is_token, empty_caches(model), WholeSequence(), backend_for(model, "dense")
        )
        return model.logits(params, hidden)


@pytest.mark.parametrize(
    ("fixture", "name"), [(fixture, name) for fixture, mutations in MUTATIONS.items() for name in mutations]
)
def test_logits_notice(fixture, name):
    model, params, golden = load(fixture)
    model, params = MUTATIONS[fixture][name](model, params)
    logits = logits_of(model, params, golden["prompt_1"])
    assert np.isfinite(logits).all()
    assert np.abs(logits - golden["logits_1"]).max() > FAR
