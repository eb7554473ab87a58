"""Tables that tests iterate over: a thing is tested because it is listed here."""

from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"

MODELS = (
    "qwen3_moe",
    "qwen3_moe_tied",
    "mixtral",
    "qwen2_moe",
    "gpt_oss",
    "qwen3",
    "gemma4",
    "gemma3",
    "qwen3_next",
    "qwen3_5_moe",
)
"""Folders under tests/fixtures with a tiny checkpoint and golden values made by scripts/make_goldens.py."""

QUANTISED = ("gpt_oss_mxfp4", "qwen3_moe_fp8")
"""The same of quantised checkpoints: golden values of their weights as they are restored."""

PER_EXPERT_MODELS = ("qwen3_moe", "qwen3_moe_tied", "mixtral", "qwen2_moe", "qwen3_next")
"""Those whose experts are published as tensors of their own."""

LOGIT_TOLERANCE = 5e-4
"""Absolute, float32. A float64 run of the reference differs from its float32 run by up to about 1e-4."""
