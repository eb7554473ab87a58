"""Layers of public models as problems: what compile checks and benchmarks are about."""

from __future__ import annotations

from tpu_serve.kernels.gated_delta_rule.problem import Problem

LAYERS = {"Qwen3.5-397B-A17B": (16, 64), "Qwen3-Next-80B-A3B": (16, 32)}
"""Key heads and value heads, all of 128 x 128."""


def problem(name: str, num_devices: int, num_tokens: int, num_rows: int) -> Problem:
    """A layer in bfloat16, its heads shared out evenly."""
    num_key_heads, num_value_heads = LAYERS[name]
    return Problem(num_tokens, num_rows, num_key_heads // num_devices, num_value_heads // num_devices)
