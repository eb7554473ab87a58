"""What a layer asks of the kernel: shapes, formats and rules. Plain Python: plans, tables and checks need no jax.

Letters: T tokens of the whole group of devices, H hidden, I intermediate, E experts, K experts per token, D devices of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.kernels.fused_moe_v2.formats import FORMATS, ITEM_BITS, Format

LANES = 128
LONG_INTERMEDIATE = 1024
ROW_TILE = 1024
"""Elements to which rows are padded where they travel one by one: eight sublanes of 128 lanes."""


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between the two products, in float32.

    Attributes:
      name: "silu", "gelu" (exact), "gelu_tanh": f(gate) * up. "swigluoai": (up + 1) * gate * sigmoid(alpha * gate) with gate at most
        `limit` and up within +-`limit`, as in GPT-OSS.
    """

    name: str = "silu"
    limit: float = 7.0
    alpha: float = 1.702


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


@dataclass(frozen=True, slots=True)
class PostNorm:
    """RMSNorm of each expert's output row before it is weighted: o / sqrt(mean(o^2) + epsilon) * (weight + 1 if plus_one)."""

    epsilon: float
    plus_one: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One mixture-of-experts layer over one group of devices, for a fixed number of tokens.

    Attributes:
      num_tokens: T, of the whole group.
      num_experts, top_k, hidden, intermediate: E, K, H, I as the model says, before any padding.
      num_devices: D, over which the experts are split in order, ceil(E / D) each.
      format: name in `FORMATS`.
      dtype: of the tokens in and out, "bfloat16" or "float32".
      gate_up_bias, down_bias: whether there are such.
      post_norm: RMSNorm of expert rows, or None.
      scale_on_input: the routing weight multiplies an expert's input rather than its output.
      sequence_parallel: each device has its own tokens, T / D of them; otherwise every device has all of them.
      dispatch_dtype: in which tokens travel to the experts; None is the type in which rows enter the first product where that has one scale
        per row (quantising before or after the way gives the same), else `dtype`.
      combine_dtype: in which results travel back; None is `dtype`.
      output_gather_dtype: in which finished tokens are gathered when not sequence_parallel; None is `dtype`.
    """

    num_tokens: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    num_devices: int = 1
    format: str = "bfloat16"
    dtype: str = "bfloat16"
    activation: Activation = Activation()
    gate_up_bias: bool = False
    down_bias: bool = False
    post_norm: PostNorm | None = None
    scale_on_input: bool = False
    sequence_parallel: bool = True
    dispatch_dtype: str | None = None
    combine_dtype: str | None = None
    output_gather_dtype: str | None = None

    @property
    def weights(self) -> Format:
        return FORMATS[self.format]

    @property
    def local_experts(self) -> int:
        """Experts a device holds; the last ones may be padding that no token is routed to."""
        return ceil_div(self.num_experts, self.num_devices)

    @property
    def local_tokens(self) -> int:
        """Tokens a device owns."""
        return ceil_div(self.num_tokens, self.num_devices)

    @property
    def group_tokens(self) -> int:
        """Rows of the group, padding rows included."""
        return self.local_tokens * self.num_devices

    @property
    def padded_hidden(self) -> int:
        return round_up(self.hidden, LANES)

    @property
    def intermediate_multiple(self) -> int:
        """Long ones are filled up further: 2880 as 23 times 128 could only be cut into tiles of 128 columns, or none."""
        return LANES if self.intermediate <= LONG_INTERMEDIATE else 2 * LANES

    @property
    def padded_intermediate(self) -> int:
        return round_up(self.intermediate, self.intermediate_multiple)

    @property
    def row_lanes(self) -> int:
        """Rows of 128 lanes that a token takes where it travels."""
        return round_up(self.padded_hidden, ROW_TILE) // LANES

    @property
    def dispatch_type(self) -> str:
        if self.dispatch_dtype is not None:
            return self.dispatch_dtype
        return self.weights.activation if self.weights.quantises_rows and not self.weights.group_scales else self.dtype

    @property
    def combine_type(self) -> str:
        return self.combine_dtype or self.dtype

    @property
    def output_gather_type(self) -> str:
        return self.output_gather_dtype or self.dtype


def item_bytes(dtype: str) -> float:
    return ITEM_BITS[dtype] / 8


WIRE_TYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8")


def malformed(problem: Problem) -> str | None:
    """Why no chip could run this, or None."""
    p = problem
    for name in ("num_tokens", "num_experts", "top_k", "hidden", "intermediate", "num_devices"):
        if getattr(p, name) < 1:
            return f"{name} must be at least 1, got {getattr(p, name)}"
    if p.top_k > p.num_experts:
        return f"top_k {p.top_k} of {p.num_experts} experts is impossible"
    if p.format not in FORMATS:
        return f"format {p.format!r} is unknown; known are {', '.join(FORMATS)}"
    if p.dtype not in ("bfloat16", "float32"):
        return f"tokens are bfloat16 or float32, not {p.dtype!r}"
    if p.activation.name not in ACTIVATIONS:
        return f"activation {p.activation.name!r} is unknown; known are {', '.join(ACTIVATIONS)}"
    for name in ("dispatch_dtype", "combine_dtype", "output_gather_dtype"):
        value = getattr(p, name)
        if value is not None and value not in WIRE_TYPES:
            return f"{name} {value!r} is unknown; known are {', '.join(WIRE_TYPES)}"
        if value == "float32" and p.dtype == "bfloat16" and name != "combine_dtype":
            return f"{name} float32 would send bfloat16 tokens at twice their size"
    if p.output_gather_dtype is not None and p.sequence_parallel:
        return "output_gather_dtype has no meaning with sequence parallelism, where no output is gathered"
    if p.dispatch_dtype is not None and not p.sequence_parallel:
        return "dispatch_dtype has no meaning without sequence parallelism, where every device has all tokens"
    if p.num_devices == 1:
        for name in ("dispatch_dtype", "combine_dtype", "output_gather_dtype"):
            if getattr(p, name) is not None:
                return f"{name} has no meaning on one device, where nothing travels"
    if p.weights.activation == "float32" and p.dtype != "float32":
        return "format float32 is for float32 tokens"
    return None
