"""What is asked of the kernel, and whether a chip can do it. Plain Python.

Letters: T tokens, S sequence rows, P pages a sequence can hold, N query heads, K KV heads, G = N / K query heads of a KV head, D head size;
L = 2 * D lanes of a token's key and value, which lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.device.chip import Chip

LANES = 128
SUBLANES = 8
SEGMENT = 128
"""Tokens that the first phase writes at a time, at most; pages that are longer are whole multiples of it."""
TABLE_CHUNK = 128
"""Entries of a page table that one copy brings to scalar memory."""

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
STORED = ("int8", "float8_e4m3fn")
LOG2_E = 1.4426950408889634
"""Exponentials are powers of 2, so scores are to that base."""


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes, types and rules of one call, on one device.

    Attributes:
      num_tokens, num_rows, max_pages: T, S and P of the bucket.
      num_heads, num_kv_heads, head_dim: N, K and D, of this device.
      page_size: tokens of a page.
      window: a token sees so many keys, its own included; None for all before it.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None for none.
      has_sinks: a score per query head takes its share of the softmax and gives nothing.
      dtype: of queries, "bfloat16" or "float32".
      stored: None where the cache has the same type, else "int8" or "float8_e4m3fn" with a float32 scale for each token and head.
    """

    num_tokens: int
    num_rows: int
    max_pages: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: str = "bfloat16"
    stored: str | None = None

    @property
    def group(self) -> int:
        """G."""
        return self.num_heads // self.num_kv_heads

    @property
    def cache_dtype(self) -> str:
        return self.stored or self.dtype

    @property
    def granule(self) -> int:
        """Tokens between which a copy of a page can be cut: a register's height."""
        return SUBLANES * 4 // BYTES[self.cache_dtype]

    @property
    def segment(self) -> int:
        """Tokens that are written at a time, at most; a page is whole segments."""
        return min(self.page_size, SEGMENT)

    @property
    def lanes(self) -> int:
        """L."""
        return 2 * self.head_dim

    @property
    def is_joint(self) -> bool:
        """Key and value lie in one register and are multiplied together: the query has zeros where the value is, and of the result the half
        that belongs to the key is dropped."""
        return self.head_dim % LANES != 0

    @property
    def query_lanes(self) -> int:
        return self.lanes if self.is_joint else self.head_dim

    @property
    def num_decodes(self) -> int:
        """Tokens that can be alone in their sequence, at most."""
        return min(self.num_tokens, self.num_rows)

    @property
    def decode_rows(self) -> int:
        """Rows of a decode's matrix of queries: G, filled up."""
        return round_up(self.group, SUBLANES)


def reason_against(problem: Problem, chip: Chip) -> str | None:
    """None when the shapes and types suit the chip, else the reason why not, as a sentence. Memory is not looked at."""
    p = problem
    if p.dtype not in ("bfloat16", "float32"):
        return f"queries of type {p.dtype} are not bfloat16 or float32"
    if p.stored is not None and p.stored not in STORED:
        return f"a cache of type {p.stored} is not one of {', '.join(STORED)}"
    sizes = (p.num_tokens, p.num_rows, p.max_pages, p.num_heads, p.num_kv_heads, p.head_dim, p.page_size)
    if min(sizes) < 1:
        return "there is nothing to do: tokens, rows, pages, heads and sizes must be at least 1"
    if p.num_heads % p.num_kv_heads:
        return f"{p.num_heads} query heads are not shared out evenly among {p.num_kv_heads} KV heads"
    if p.window is not None and p.window < 1:
        return f"a window of {p.window} keys shows nothing"
    if p.page_size % p.granule:
        return f"pages of {p.page_size} tokens are not a multiple of {p.granule}, between which copies of {p.cache_dtype} are cut"
    if p.page_size % p.segment:
        return f"pages of {p.page_size} tokens are not a multiple of {p.segment}, which are written at a time"
    if not chip.is_tpu:
        return None
    if p.head_dim != LANES // 2 and p.head_dim % LANES:
        return f"head size {p.head_dim} is neither {LANES // 2} nor a multiple of {LANES}"
    if p.stored is not None and p.page_size % LANES:
        return f"pages of {p.page_size} tokens are not a multiple of {LANES}, which the scales of 8-bit keys and values need"
    return None
