"""Small checkpoints of routed experts for tests of loading, and what must come of them, written without the loader's code."""

import ml_dtypes
import numpy as np
import safetensors.numpy

from tpu_serve.layers.moe.routing import MoEConfig
from tpu_serve.layers.transformer import expert_specs

PREFIX = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INNER = 6, 160, 96
"""More blocks of 128 rows than one, the last of them ragged; experts that four devices do not share out evenly."""


def made_experts(seed=0, dtype=ml_dtypes.bfloat16):
    """gate_up [E, 2, H, I] and down [E, I, H]."""
    generator = np.random.default_rng(seed)
    gate_up = generator.standard_normal((EXPERTS, 2, HIDDEN, INNER), np.float32)
    down = generator.standard_normal((EXPERTS, INNER, HIDDEN), np.float32)
    return gate_up.astype(dtype), down.astype(dtype)


def as_tensors(gate_up, down, layout="single"):
    """The tensors of a layout: one by one, Hugging Face's fused ones, or stacked the other way round, perhaps split."""
    if layout == "single":
        return {
            f"{PREFIX}.{expert}.{name}.weight": matrix.T
            for expert in range(EXPERTS)
            for name, matrix in [
                ("gate_proj", gate_up[expert, 0]),
                ("up_proj", gate_up[expert, 1]),
                ("down_proj", down[expert]),
            ]
        }
    both = np.concatenate([gate_up[:, 0], gate_up[:, 1]], axis=-1)
    if layout == "fused":
        return {f"{PREFIX}.gate_up_proj": both.swapaxes(1, 2), f"{PREFIX}.down_proj": down.swapaxes(1, 2)}
    wi = both if layout == "wi" else both.reshape(2, EXPERTS, HIDDEN // 2, 2 * INNER)
    return {f"{PREFIX}.wi": wi, f"{PREFIX}.wo": down}


LAYOUTS = ("single", "fused", "wi", "split wi")


def save(folder, tensors):
    safetensors.numpy.save_file(
        {name: np.array(value, order="C") for name, value in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def specs(dtype=ml_dtypes.bfloat16):
    config = MoEConfig(num_experts=EXPERTS, top_k=2, hidden=HIDDEN, intermediate=INNER, renormalise=True)
    return {"experts": expert_specs(PREFIX, config, dtype)}
