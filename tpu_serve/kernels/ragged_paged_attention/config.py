"""How a problem is cut, what that takes of a chip's memories, and which way is taken. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tpu_serve.device.chip import MIB, Chip
from tpu_serve.kernels.ragged_paged_attention.problem import (
    BYTES,
    LANES,
    SUBLANES,
    TABLE_CHUNK,
    Problem,
    reason_against,
    round_up,
)

VMEM_SHARE = 0.9
"""Of the chip's VMEM; the rest is left to the compiler."""
SMEM_SHARE = 0.9
QUERY_GRANULE = 16
"""Tokens of a tile are a multiple of it."""
TABLE_RING = 16
"""Pieces of page tables in scalar memory: so many sequences ahead a decode's table is asked for."""
WRITE_RING = 8
"""Segments of the first phase that are under way at a time."""

TOKENS_AT_A_TIME = 8
TOKENS_RING = 4
"""Decodes' tokens that are written at a time, and so many times those are under way."""
MOST_TABLE_BYTES = 256 * 1024
"""Of page tables that are in scalar memory at once."""

Buffers = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True)
class Config:
    """How a problem is cut.

    Attributes:
      query_tile: tokens of a tile of prompts, a multiple of 16.
      prefill_pages, decode_pages: pages of a block or piece of keys, a power of two up to 128.
      decode_pieces: that are worked on at once, of one sequence or of several.
      prefill_ring: blocks in VMEM, one worked on while the others are on their way.
      decode_ring: so many times those of `decode_pieces` in VMEM.
    """

    query_tile: int
    prefill_pages: int
    decode_pages: int
    prefill_ring: int = 2
    decode_ring: int = 3
    decode_pieces: int = 2


def decode_buffers(problem: Problem, config: Config) -> Buffers:
    """Shape and type of what the phase of decodes keeps in VMEM: what it allocates, and what `vmem_bytes` counts. By name:

    pages: a ring of pieces. scales: theirs.
    queries, out: of all decodes; one result more, for pieces that there are not.
    total, normaliser, highest: the softmax under way, the last two the same in all lanes.
    """
    p, rows = problem, (problem.num_kv_heads, problem.decode_rows)
    ring = config.decode_ring * config.decode_pieces
    held: Buffers = {
        "pages": ((ring, config.decode_pages, p.num_kv_heads, p.page_size, p.lanes), p.cache_dtype),
        "queries": ((p.num_decodes, *rows, p.query_lanes), p.dtype),
        "out": ((p.num_decodes + 1, *rows, p.query_lanes), p.dtype),
        **_softmax_buffers(problem, p.decode_rows),
    }
    if p.stored is not None:
        held["scales"] = ((ring, config.decode_pages, p.num_kv_heads, 2, p.page_size), "float32")
    return held


def prefill_buffers(problem: Problem, config: Config) -> Buffers:
    """The same of the phase of prompts. By name:

    pages: a ring of blocks. scales: theirs.
    queries: a ring of tiles. out: two tiles of results, one on its way.
    total, normaliser, highest: as in `decode_buffers`, a row for each query head of a group and token.
    """
    p, ring = problem, config.prefill_ring
    held: Buffers = {
        "pages": ((ring, config.prefill_pages, p.num_kv_heads, p.page_size, p.lanes), p.cache_dtype),
        "queries": ((ring, config.query_tile, p.num_heads * p.query_lanes), p.dtype),
        "out": ((2, config.query_tile, p.num_heads * p.query_lanes), p.dtype),
        **_softmax_buffers(problem, p.group * config.query_tile),
    }
    if p.stored is not None:
        held["scales"] = ((ring, config.prefill_pages, p.num_kv_heads, 2, p.page_size), "float32")
    return held


def _softmax_buffers(problem: Problem, rows: int) -> Buffers:
    p = problem
    statistics = (p.num_kv_heads, rows, min(LANES, p.query_lanes))
    return {
        "total": ((p.num_kv_heads, rows, p.query_lanes), "float32"),
        "normaliser": (statistics, "float32"),
        "highest": (statistics, "float32"),
    }


def write_buffers(problem: Problem) -> Buffers:
    """Shape and type of what the first phase keeps in VMEM. By name:

    pages: a ring of segments of pages, before and after. scales: theirs.
    new: the step's keys and values that go there, a granule of anything before and behind them. new_scales: theirs.
    """
    p, heads = problem, problem.num_kv_heads
    held: Buffers = {
        "pages": ((WRITE_RING, heads, p.segment, p.lanes), p.cache_dtype),
        "new": ((WRITE_RING, heads, p.segment + 4 * p.granule, p.lanes), p.dtype),
    }
    if p.stored is not None:
        held["scales"] = ((WRITE_RING, heads, 2, p.segment), "float32")
        held["new_scales"] = ((WRITE_RING, heads, 2, 2 * p.segment), "float32")
    return held


def write_decode_buffers(problem: Problem) -> Buffers:
    """Shape and type of what writing decodes' tokens keeps in VMEM. By name:

    pages: a ring of granules, before and after. scales: theirs, of whole segments.
    new: keys and values of all decodes. new_scales: theirs, in all lanes.
    """
    p, ring = problem, (TOKENS_RING, TOKENS_AT_A_TIME, problem.num_kv_heads)
    held: Buffers = {
        "pages": ((*ring, p.granule, p.lanes), p.cache_dtype),
        "new": ((p.num_decodes * p.num_kv_heads, p.lanes), "float32"),
    }
    if p.stored is not None:
        held["scales"] = ((*ring, 2, p.segment), "float32")
        held["new_scales"] = ((p.num_decodes, p.num_kv_heads, 2, p.segment), "float32")
    return held


def buffer_bytes(buffers: Buffers) -> int:
    """With the last two dimensions padded to whole registers."""

    def padded(shape: tuple[int, ...], dtype: str) -> int:
        *outer, rows, lanes = shape
        return math.prod(outer) * round_up(rows, SUBLANES) * round_up(lanes, LANES) * BYTES[dtype]

    return sum(padded(shape, dtype) for shape, dtype in buffers.values())


def vmem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of VMEM that the kernel takes: the phases, one after another in the same place, and the values of their products."""
    p = problem

    def products(rows: int, keys: int) -> int:
        scores = rows * keys * (3 * 4 + BYTES[p.dtype])
        return scores + 2 * keys * p.lanes * (BYTES[p.dtype] + 4) + 2 * rows * p.query_lanes * 4

    keys = config.decode_pages * p.page_size * config.decode_pieces * p.num_kv_heads
    tile = buffer_bytes({"queries": ((p.group * config.query_tile, p.query_lanes), p.dtype)})
    needed = (
        buffer_bytes(write_buffers(p)),
        buffer_bytes(write_decode_buffers(p)),
        buffer_bytes(decode_buffers(p, config)) + products(p.decode_rows, keys),
        buffer_bytes(prefill_buffers(p, config))
        + products(p.group * config.query_tile, config.prefill_pages * p.page_size) + 2 * tile,
    )  # fmt: skip
    sinks = p.num_kv_heads * p.decode_rows * LANES * 4
    return max(needed) + 2 * sinks + MIB


def tables_stay(problem: Problem) -> bool:
    """Whether all page tables are in scalar memory at once."""
    return table_bytes(problem) <= MOST_TABLE_BYTES


def table_bytes(problem: Problem) -> int:
    """Of all page tables in whole pieces."""
    return 4 * problem.num_rows * round_up(problem.max_pages, TABLE_CHUNK)


def smem_bytes(problem: Problem) -> int:
    """Bytes of scalar memory: where tokens and sequences lie, and page tables or pieces of them."""
    p = problem
    numbers = round_up(p.num_tokens, 1024) + 2 * round_up(p.num_rows + 1, 1024) + 1024
    tables = table_bytes(p) if tables_stay(p) else 0
    return tables + 4 * (numbers + TABLE_RING * TABLE_CHUNK * SUBLANES + 1024)


def check(problem: Problem, config: Config, chip: Chip) -> str | None:
    """None when the kernel runs so on this chip, else the reason why not, as a sentence."""
    if (reason := reason_against(problem, chip)) is not None:
        return reason
    if config.query_tile < 1 or config.query_tile % QUERY_GRANULE:
        return f"a tile of {config.query_tile} tokens is not a multiple of {QUERY_GRANULE}"
    for pages in (config.prefill_pages, config.decode_pages):
        if pages < 1 or TABLE_CHUNK % pages:
            return f"a block of {pages} pages does not divide the {TABLE_CHUNK} entries of a piece of a page table"
    if config.decode_pieces < 1:
        return "without a piece at a time there is no decoding"
    if min(config.prefill_ring, config.decode_ring) < 2:
        return "with less than two blocks in VMEM nothing is read ahead"
    need, have = smem_bytes(problem), int(SMEM_SHARE * chip.smem_bytes)
    if need > have:
        return f"{problem.num_tokens} tokens of {problem.num_rows} sequences need {need / 1024:.0f} KiB of SMEM, {chip.name} has {have / 1024:.0f} KiB for it"
    need, have = vmem_bytes(problem, config), int(VMEM_SHARE * chip.vmem_bytes)
    if need > have:
        return f"a tile of {config.query_tile} tokens needs {need / MIB:.1f} MiB of VMEM, {chip.name} has {have / MIB:.1f} MiB for it"
    return None


QUERY_ROWS = 1024
"""Rows of a tile's matrix of queries that hide the reading of its keys."""
PREFILL_KEYS = 512
DECODE_BYTES = 2**21
"""Bytes of keys and values that are worked on at once by decodes: below this the latency of products is longer than the reading."""
DECODE_CHAINS = 4
"""Products, of pieces and KV heads, that hide one another's latency."""
MOST_DECODE_PIECES = 8


def _power_of_two(value: int, at_most: int) -> int:
    """The largest power of two that is not greater than either."""
    return 1 << (max(1, min(value, at_most)).bit_length() - 1)


def heuristic(problem: Problem, chip: Chip) -> Config:
    """The config that is taken.

    Raises:
      ValueError: `supports` says why.
    """
    for config in candidates(problem):
        if (reason := check(problem, config, chip)) is None:
            return config
    raise ValueError(reason)


def supports(problem: Problem, chip: Chip) -> str | None:
    """None when the kernel runs on this chip, else the reason why not, as a sentence."""
    for config in candidates(problem):
        if (reason := check(problem, config, chip)) is None:
            return None
    return reason


def candidates(problem: Problem) -> Iterator[Config]:
    """Configs from the largest that pays down to the smallest, the first that fits being the best guess."""
    p = problem
    most_pages = 1 << (p.max_pages - 1).bit_length() if p.max_pages > 1 else 1
    if p.window is not None:  # a window's keys begin anywhere
        most_pages = min(most_pages, 1 << (p.window // p.page_size).bit_length())
    most_pages = min(most_pages, TABLE_CHUNK)
    token_bytes = p.num_kv_heads * p.lanes * BYTES[p.cache_dtype]
    tile = round_up(max(QUERY_ROWS // p.group, QUERY_GRANULE), QUERY_GRANULE)
    tile = min(tile, 512, round_up(p.num_tokens, QUERY_GRANULE))
    whole = DECODE_BYTES // (
        most_pages * p.page_size * token_bytes
    )  # sequences, where they hold all that they can or a window shows
    pieces = _power_of_two(max(DECODE_CHAINS // p.num_kv_heads, whole, 2), MOST_DECODE_PIECES)
    prefill_keys, decode_keys = PREFILL_KEYS, max(DECODE_BYTES // token_bytes // pieces, 128)
    while True:
        yield Config(
            tile,
            _power_of_two(prefill_keys // p.page_size, most_pages),
            _power_of_two(decode_keys // p.page_size, most_pages),
            decode_pieces=pieces,
        )
        if tile == QUERY_GRANULE and max(prefill_keys, decode_keys) <= p.page_size and pieces == 1:
            return
        tile = round_up(max(tile // 2, QUERY_GRANULE), QUERY_GRANULE)
        prefill_keys, decode_keys = max(prefill_keys // 2, p.page_size), max(decode_keys // 2, p.page_size)
        pieces = max(pieces // 2, 1)
