"""Quantised layouts of the fixtures, for make_goldens.py: MXFP4 as GPT-OSS ships it and FP8 in blocks as Qwen does."""

from __future__ import annotations

import re

import torch
from golden_checkpoints import Tensors
from golden_layers import Config

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""What the codes 0 to 7 of e2m1 stand for; 8 to 15 are their negatives."""
GROUP = 32
"""Inputs of an MXFP4 matrix that share an exponent."""


def mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, in, out] -> codes u8 [E, out, in / 32, 16] and exponents u8 [E, out, in / 32].

    A byte holds the first of two codes in its low half. A value is code * 2 ** (exponent - 127). Of each group the largest
    value keeps its power of two.
    """
    groups = weights.float().transpose(1, 2).unflatten(-1, (-1, GROUP))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(2.0**-100))) - 2  # 6 is 1.5 * 2 ** 2
    scaled = groups / torch.exp2(exponent)[..., None]
    code = (scaled.abs()[..., None] - FP4).abs().argmin(-1) + 8 * (scaled < 0)
    code = code.to(torch.uint8)
    return (code[..., 0::2] | code[..., 1::2] << 4).contiguous(), (exponent + 127).to(torch.uint8).contiguous()


def store_mxfp4(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Experts in MXFP4, everything else as it is."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = mxfp4(tensor)
        else:
            stored[name] = tensor
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return stored, {"quantization_config": {"modules_to_not_convert": skipped, "quant_method": "mxfp4"}}


BLOCK = 16
"""Rows and columns of an FP8 block here; published ones have 128."""
QUANTISED = re.compile(r"self_attn\.[qkvo]_proj\.weight$|experts\.\d+\.\w+_proj\.weight$")


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in], multiples of the block -> e4m3 of the same shape, and bf16 factors [out / 16, in / 16]."""
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = (blocks.abs().amax((1, 3)) / 448).to(torch.bfloat16)  # 448 is the largest e4m3
    code = (blocks / scale.float()[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return code.flatten(2, 3).flatten(0, 1).contiguous(), scale.contiguous()


def store_fp8(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Attention and experts in FP8; embedding, head, norms and routers as they are."""
    stored: Tensors = {}
    skipped: list[str] = []
    for name, tensor in tensors.items():
        if QUANTISED.search(name):
            stored[name], stored[f"{name}_scale_inv"] = fp8(tensor)
        else:
            stored[name] = tensor
            skipped.append(name.removesuffix(".weight"))
    return stored, {
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": skipped,
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
    }
