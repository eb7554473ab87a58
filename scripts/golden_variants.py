"""Every fixture that make_goldens.py can write."""

import golden_delta
import golden_gemma
import golden_gpt_oss
import golden_mixtral
import golden_qwen

VARIANTS = (
    golden_qwen.VARIANTS
    | golden_mixtral.VARIANTS
    | golden_gpt_oss.VARIANTS
    | golden_gemma.VARIANTS
    | golden_delta.VARIANTS
)
