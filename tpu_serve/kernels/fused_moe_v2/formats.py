"""Number formats of expert weights: which types enter the matrix unit, and which rows share a scale."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """How an expert's matrices are stored and multiplied. Types are NumPy (ml_dtypes) names.

    Attributes:
      name: what options and tables call it.
      weight: type of the stored values.
      activation: type in which rows enter the product.
      scaled: weights carry float32 scales.
      block: contraction rows that share a scale; None for one scale per output column.
      group_scales: activations are quantised per (row, block) rather than per row.
    """

    name: str
    weight: str
    activation: str
    scaled: bool = False
    block: int | None = None
    group_scales: bool = False

    @property
    def quantises_rows(self) -> bool:
        """Rows are quantised to 8 bits before each product."""
        return self.activation in ROW_LIMITS

    @property
    def widens(self) -> bool:
        """Stored values become the activations' type before the product."""
        return self.weight != self.activation

    def num_blocks(self, contraction: int) -> int:
        """Scale rows of a matrix with this contraction."""
        return -(-contraction // self.block) if self.block else 1

    def scale_rows(self, contraction: int) -> int:
        """The same as the kernel wants them in `gate_up_scale`: filled up unless there is only one."""
        blocks = self.num_blocks(contraction)
        return blocks if blocks == 1 else -(-blocks // SCALE_ROWS) * SCALE_ROWS


SCALE_ROWS = 8
"""Scale rows of the first projections are filled up to a multiple of these, the sublanes of a vector register: the compiler may lay out
other counts differently from what the kernel reads, and copy all of them at every call."""

ROW_LIMITS = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""Largest magnitude of the 8-bit types."""

ITEM_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "float8_e4m3fn": 8, "float4_e2m1fn": 4}

FORMATS = {
    one.name: one
    for one in (
        Format("float32", "float32", "float32"),
        Format("bfloat16", "bfloat16", "bfloat16"),
        Format("fp8_channel", "float8_e4m3fn", "float8_e4m3fn", scaled=True),
        Format("fp8_block512", "float8_e4m3fn", "float8_e4m3fn", scaled=True, block=512),
        # As the checkpoints with 128x128 blocks are meant: activations have a scale per 128 columns too.
        Format("fp8_block128", "float8_e4m3fn", "float8_e4m3fn", scaled=True, block=128, group_scales=True),
        Format("int8_channel", "int8", "int8", scaled=True),
        Format("w8a16", "float8_e4m3fn", "bfloat16", scaled=True),
        Format("w8a16_block128", "float8_e4m3fn", "bfloat16", scaled=True, block=128),
        Format("fp4_block512", "float4_e2m1fn", "float8_e4m3fn", scaled=True, block=512),
        Format("mxfp4", "float4_e2m1fn", "bfloat16", scaled=True, block=32),
    )
}
