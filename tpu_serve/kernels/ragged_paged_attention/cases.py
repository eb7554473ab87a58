"""Attention layers of public models as problems: what compile checks and benchmarks are about."""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.kernels.ragged_paged_attention.problem import Problem


@dataclass(frozen=True, slots=True)
class Layer:
    """Heads of a whole attention layer; other attributes as in `Problem`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    has_sinks: bool = False


LAYERS = {
    "Qwen3-30B-A3B": Layer(32, 4, 128),
    "Qwen3-Next-80B-A3B": Layer(16, 2, 256),
    "Qwen3.5-397B-A17B": Layer(32, 2, 256),
    "Gemma4-26B-A4B local": Layer(16, 8, 256, window=1024),
    "Gemma4-26B-A4B global": Layer(16, 2, 512),
    "GPT-OSS-120B local": Layer(64, 8, 64, window=128, has_sinks=True),
    "GPT-OSS-120B": Layer(64, 8, 64, has_sinks=True),
    "Qwen3-Coder-480B": Layer(96, 8, 128),
}


def problem(
    name: str, num_devices: int, num_tokens: int, num_rows: int, max_pages: int = 64, stored: str | None = None
) -> Problem:
    """A layer in bfloat16, its KV heads and the query heads that read them shared out as far as there are any; pages of 128 tokens."""
    layer = LAYERS[name]
    shares = min(num_devices, layer.num_kv_heads)
    return Problem(
        num_tokens, num_rows, max_pages, layer.num_heads // shares, layer.num_kv_heads // shares, layer.head_dim, 128,
        layer.window, None, layer.has_sinks, "bfloat16", stored,
    )  # fmt: skip
