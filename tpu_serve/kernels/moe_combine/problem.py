"""What is asked of the kernels, how it is cut, and whether a chip can do it. Plain Python.

Letters: T tokens, K choices of a token, E experts, R rows in order of expert, H columns; C tokens of a block, P columns of a panel, J rows of a
block's buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tpu_serve.device.chip import MIB, Chip
from tpu_serve.kernels.fused_moe_v2.problem import LANES, ceil_div, round_up

SUBLANES = 8

CHUNK = 512
"""Rows of the buffer that one product takes: long enough for the matrix unit, short enough to stop soon after the last row in use."""

MAX_TOP_K = 128

MAX_EXPERTS = 4096

MAX_ROWS = 2**24
"""Places of rows are computed in float32, which counts exactly up to here."""

VMEM_SHARE = 0.92
"""Of the chip's VMEM; the rest is left to the compiler."""

BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}

Operation = Literal["combine", "permute", "dots"]
"""combine: sums of a token's rows (gathers). permute: rows from tokens (scatters). dots: products of a token with its rows (gathers)."""


def granule(dtype: str, chip: Chip) -> int:
    """Rows between which a copy of an array [R, H] can be cut: those of its tiles in memory, which are a register high on tpu7x and in 8 bits."""
    item = BYTES.get(dtype, 4)
    return 8 * 4 // item if chip.name in ("tpu7x", "cpu") or item == 1 else 8


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes and types of one call.

    Attributes:
      num_tokens, top_k, num_experts: T, K and E. An id of -1 names no expert, and its choice has no row.
      num_rows: R, at least the number of choices that have a row.
      hidden: H.
      dtype: of rows and tokens.
      weight_dtype: "bfloat16" or "float32"; None where all weights are one.
      align: rows of a granule, at which every copy begins and ends; see `granule`. 1 for rows that each lie for themselves, as `row_lanes` groups of 128 columns.
      out_dtype: of sums; None is `dtype`.
      row_lanes: (align 1, combine only) L of rows [R, L, 128], of which the first H columns are meant.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    num_rows: int
    hidden: int
    dtype: str = "bfloat16"
    weight_dtype: str | None = "float32"
    align: int = 16
    out_dtype: str | None = None
    row_lanes: int = 0

    @property
    def out_type(self) -> str:
        return self.out_dtype or self.dtype

    @property
    def product_dtype(self) -> str:
        """Type that enters the matrix unit: the narrower ones are exact in bfloat16."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def num_parts(self) -> int:
        """Numbers of the product's type whose sum stands for a weight: bfloat16 holds 8 bits of it, two of them 16."""
        return 2 if self.product_dtype == "bfloat16" and self.weight_dtype == "float32" else 1


@dataclass(frozen=True, slots=True)
class Config:
    """How a problem is cut.

    Attributes:
      block_tokens: C, a multiple of 128.
      panel: P, a multiple of 128; the last panel may be narrower.
    """

    block_tokens: int
    panel: int


def num_blocks(problem: Problem, config: Config) -> int:
    return ceil_div(problem.num_tokens, config.block_tokens)


def num_panels(problem: Problem, config: Config) -> int:
    return ceil_div(problem.hidden, config.panel)


def buffer_rows(problem: Problem, config: Config) -> int:
    """J: rows that the windows of any block can take. Each of them is at most a granule less a row longer at either end."""
    choices = config.block_tokens * problem.top_k
    windows = min(problem.num_experts, choices)
    return round_up(choices + (2 * problem.align - 2) * windows, CHUNK)


FIELDS = 5
"""Numbers of an expert in a block's table."""

EXPERTS_AT_A_TIME = 8


def padded_experts(problem: Problem) -> int:
    """Experts in the tables, those that fill up the last group included."""
    return round_up(problem.num_experts, EXPERTS_AT_A_TIME)


def table_width(problem: Problem) -> int:
    """Numbers in a block's table, which lies in SMEM."""
    return FIELDS * padded_experts(problem) + 2


def buffers(problem: Problem, config: Config, operation: Operation) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of everything that a kernel keeps in VMEM: what it allocates, and what `vmem_bytes` counts. By name:

    rows: two slots of the block's rows, one worked on while the other is copied.
    selected: the 0/1 matrix, or that of weights, a chunk of rows at a time, its parts side by side.
    spread: place and weight of each choice, spread over the axis along which rows lie.
    total: the sums of a panel. flat: a chunk of rows that lie for themselves, side by side, where one may not be finite. dots: products of every row with every token. own: 1 for the block's own rows.
    granule: for the rows behind the last one.
    """
    p, rows, tokens = problem, buffer_rows(problem, config), config.block_tokens
    chunks, kinds = rows // CHUNK, 1 if problem.weight_dtype is None else 2
    row = (config.panel,) if p.align > 1 else (p.row_lanes, LANES)
    held: dict[str, tuple[tuple[int, ...], str]] = {"rows": ((2, rows, *row), p.dtype)}
    if operation == "combine":
        held["selected"] = ((chunks, p.num_parts * tokens, CHUNK), p.product_dtype)
        held["spread"] = ((kinds, p.top_k, tokens, LANES), "float32")
        held["total"] = ((tokens, config.panel), "float32")
        if p.align == 1:
            held["flat"] = ((CHUNK, config.panel), p.dtype)
    elif operation == "permute":
        held["selected"] = ((chunks, CHUNK, p.num_parts * tokens), p.product_dtype)
        held["spread"] = ((kinds, p.top_k, SUBLANES, tokens), "float32")
        held["own"] = ((chunks, CHUNK, LANES), "float32")
        held["granule"] = ((p.align, p.hidden), p.dtype)
    else:
        held["dots"] = ((chunks, CHUNK, tokens), "float32")
    return held


def slice_columns(config: Config) -> int:
    """Columns of a panel that are summed at a time where a row may not be finite."""
    widths = (width for width in range(min(config.panel, 512), 0, -LANES) if config.panel % width == 0)
    return max(widths)


def vmem_bytes(problem: Problem, config: Config, operation: Operation) -> int:
    """Bytes of VMEM that a kernel takes: its buffers, two windows of what Pallas brings and fetches, and the values of a product."""
    p, tokens, panel = problem, config.block_tokens, config.panel
    held = sum(math.prod(shape) * BYTES[dtype] for shape, dtype in buffers(p, config, operation).values())
    windows = 2 * tokens * panel * BYTES[p.out_type if operation == "combine" else p.dtype]
    windows += 2 * 2 * round_up(p.top_k, SUBLANES) * tokens * 4 + 2 * round_up(p.num_experts, SUBLANES) * LANES * 4
    ranking = 3 * round_up(p.num_experts, SUBLANES) * tokens * 4 + tokens * tokens * 2
    item = BYTES[p.product_dtype]
    if operation == "permute":  # tokens, cleaned and marked by what is not finite; results and what was there before
        values = (tokens * (4 + 4 * item) + CHUNK * 8 * item) * panel
    else:
        values = (max(p.num_parts * tokens, CHUNK) + CHUNK) * panel * 4
        if operation == "combine" and p.align == 1:
            values -= CHUNK * panel * BYTES[p.dtype]  # held
    if p.product_dtype == "float32":  # a factor once more, cut into the parts of which a full product is made
        values += tokens * panel * 4
    return held + windows + ranking + values + MIB


def supported(problem: Problem, chip: Chip, operation: Operation = "combine") -> str | None:
    """None when the kernel runs on this chip, else the reason why not, as a sentence."""
    p = problem
    if p.dtype not in BYTES:
        return f"rows of type {p.dtype} are not one of {', '.join(BYTES)}"
    if BYTES[p.dtype] == 1 and operation != "permute":
        return f"rows of type {p.dtype} can be moved but not summed"
    if operation == "combine" and p.out_type not in ("bfloat16", "float32"):
        return f"sums of type {p.out_type} are not bfloat16 or float32"
    if p.weight_dtype not in (None, "bfloat16", "float32"):
        return f"weights of type {p.weight_dtype} are not bfloat16 or float32"
    if min(p.num_tokens, p.top_k, p.num_experts, p.num_rows) < 1:
        return "there is nothing to do: tokens, choices, experts and rows must be at least 1"
    if p.hidden % LANES or p.hidden < LANES:
        return f"{p.hidden} columns are not a multiple of {LANES}"
    if p.align == 1 and (operation != "combine" or p.row_lanes * LANES < p.hidden):
        return (
            f"rows of {p.row_lanes} groups of {LANES} columns can be summed only, and must have the {p.hidden} columns"
        )
    if p.num_rows % p.align:
        return f"{p.num_rows} rows are not a multiple of {p.align}, between which copies of {p.dtype} are cut"
    if p.top_k > MAX_TOP_K:
        return f"{p.top_k} choices of a token are more than {MAX_TOP_K}"
    if p.num_experts > MAX_EXPERTS:
        return f"{p.num_experts} experts are more than {MAX_EXPERTS}"
    if p.num_rows > MAX_ROWS:
        return f"{p.num_rows} rows are more than {MAX_ROWS}"
    smallest = Config(LANES, LANES if p.align > 1 else p.hidden)
    need, have = vmem_bytes(p, smallest, operation), int(VMEM_SHARE * chip.vmem_bytes)
    if need > have:
        return f"the smallest block needs {need / MIB:.1f} MiB of VMEM, {chip.name} has {have / MIB:.1f} MiB for it"
    return None


def configs(problem: Problem, chip: Chip, operation: Operation) -> Iterator[Config]:
    """Every config that fits, for a search."""
    have = int(VMEM_SHARE * chip.vmem_bytes)
    for block_tokens in (128, 256, 512, 1024):
        panels = {}
        for count in range(1, problem.hidden // LANES + 1 if problem.align > 1 else 2):
            panel = round_up(ceil_div(problem.hidden, count), LANES)
            panels[panel] = Config(block_tokens, panel)
        for config in panels.values():
            if vmem_bytes(problem, config, operation) <= have:
                yield config
        if block_tokens >= problem.num_tokens:
            return


def cost(problem: Problem, config: Config, chip: Chip) -> float:
    """Seconds by which configs are compared, calculated for experts that are chosen equally often."""
    p, tokens = problem, config.block_tokens
    choices = min(tokens, p.num_tokens) * p.top_k
    met = p.num_experts * (1 - (1 - 1 / p.num_experts) ** choices)
    rows = choices + (p.align - 1) * met
    blocks = num_blocks(p, config)
    read = rows * p.hidden * BYTES[p.dtype] / (chip.hbm_bytes_per_second or 1e11)
    chunks = ceil_div(int(rows), CHUNK) * CHUNK
    peak = chip.peak_ops.get(p.product_dtype, 1e12)
    products = 2 * tokens * chunks * p.hidden * p.num_parts / peak
    # Copies below this many bytes a row run at the rate of their descriptors rather than of the memory.
    short = max(1.0, 512 / (config.panel * BYTES[p.dtype]))
    # The scalar unit starts the copies of a panel: some 20 cycles for a window, 4 for an expert without one.
    starts = num_panels(p, config) * (met * 20 + (p.num_experts - met) * 4) / 1e9
    # Comparing every row of the buffer with every choice of every token.
    selection = chunks * tokens * p.top_k / 1024 / 2 / 1e9
    return blocks * (max(read * short, products) + starts + selection)


def heuristic(problem: Problem, chip: Chip, operation: Operation = "combine") -> Config:
    """The config of the least `cost`.

    Raises:
      ValueError: `supported` says why.
    """
    if (reason := supported(problem, chip, operation)) is not None:
        raise ValueError(reason)
    return min(configs(problem, chip, operation), key=lambda config: cost(problem, config, chip))
