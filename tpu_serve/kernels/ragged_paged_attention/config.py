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

Buffers = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True)
class Config:
    """How a problem is cut.

    Attributes:
      query_tile: tokens of a tile of prompts, a multiple of 16.
      prefill_pages, decode_pages: pages of a block of keys, a power of two up to 128.
      prefill_ring, decode_ring: blocks in VMEM, one worked on while the others are on their way.
    """

    query_tile: int
    prefill_pages: int
    decode_pages: int
    prefill_ring: int = 2
    decode_ring: int = 3


@dataclass(frozen=True, slots=True)
class Phase:
    """One of the two kinds of work: decodes, in which a tile is one token, or prompts.

    Attributes:
      tile: tokens of a tile.
      rows: rows of a tile's matrix of queries: outer and inner dimension; inner rows of a prompt are tokens.
      pages, ring: of a block of keys, and blocks in VMEM.
    """

    is_decode: bool
    tile: int
    rows: tuple[int, int]
    pages: int
    ring: int


def phases(problem: Problem, config: Config) -> tuple[Phase, Phase]:
    """Decodes and prompts, in the order in which they run."""
    return (
        Phase(True, 1, (1, problem.decode_rows), config.decode_pages, config.decode_ring),
        Phase(False, config.query_tile, (problem.group, config.query_tile), config.prefill_pages, config.prefill_ring),
    )


def phase_buffers(problem: Problem, phase: Phase) -> Buffers:
    """Shape and type of what a phase of attention keeps in VMEM: what it allocates, and what `vmem_bytes` counts. By name:

    pages: a ring of blocks of pages. scales: theirs.
    queries: a ring of tiles. out: two tiles of results, one on its way.
    total, normaliser, highest: the softmax under way, the last two the same in all lanes.
    """
    p, heads, (outer, inner) = problem, problem.num_kv_heads, phase.rows
    statistics = (heads, outer * inner, min(LANES, p.query_lanes))
    held: Buffers = {
        "pages": ((phase.ring, phase.pages, heads, p.page_size, p.lanes), p.cache_dtype),
        "queries": ((phase.ring, heads, *phase.rows, p.query_lanes), p.dtype),
        "out": ((2, heads, *phase.rows, p.query_lanes), p.dtype),
        "total": ((heads, outer * inner, p.query_lanes), "float32"),
        "normaliser": (statistics, "float32"),
        "highest": (statistics, "float32"),
    }
    if p.stored is not None:
        held["scales"] = ((phase.ring, phase.pages, heads, 2, p.page_size), "float32")
    return held


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


def buffer_bytes(buffers: Buffers) -> int:
    """With the last two dimensions padded to whole registers."""

    def padded(shape: tuple[int, ...], dtype: str) -> int:
        *outer, rows, lanes = shape
        return math.prod(outer) * round_up(rows, SUBLANES) * round_up(lanes, LANES) * BYTES[dtype]

    return sum(padded(shape, dtype) for shape, dtype in buffers.values())


def vmem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of VMEM that the kernel takes: the phases, one after another in the same place, and the values of their products."""
    p = problem
    needed = [buffer_bytes(write_buffers(p))]
    for phase in phases(p, config):
        rows, keys = math.prod(phase.rows), phase.pages * p.page_size
        scores = 3 * rows * keys * 4 + rows * keys * BYTES[p.dtype]
        values = 2 * keys * p.lanes * (BYTES[p.dtype] + 4) + 2 * rows * p.query_lanes * 4
        needed.append(buffer_bytes(phase_buffers(p, phase)) + scores + values)
    sinks = p.num_kv_heads * p.decode_rows * LANES * 4
    return max(needed) + 2 * sinks + MIB


def smem_bytes(problem: Problem) -> int:
    """Bytes of scalar memory: where tokens and sequences lie, and pieces of page tables."""
    p = problem
    numbers = round_up(p.num_tokens, 1024) + 2 * round_up(p.num_rows + 1, 1024) + 1024
    return 4 * (numbers + TABLE_RING * TABLE_CHUNK * SUBLANES + 1024)


def check(problem: Problem, config: Config, chip: Chip) -> str | None:
    """None when the kernel runs so on this chip, else the reason why not, as a sentence."""
    if (reason := reason_against(problem, chip)) is not None:
        return reason
    if config.query_tile < 1 or config.query_tile % QUERY_GRANULE:
        return f"a tile of {config.query_tile} tokens is not a multiple of {QUERY_GRANULE}"
    for pages in (config.prefill_pages, config.decode_pages):
        if pages < 1 or TABLE_CHUNK % pages:
            return f"a block of {pages} pages does not divide the {TABLE_CHUNK} entries of a piece of a page table"
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
DECODE_BYTES = 2**20
"""Bytes of a decode's block of keys and values: below this the latency of its products is longer than the reading."""


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
    prefill_keys, decode_keys = PREFILL_KEYS, max(DECODE_BYTES // token_bytes, 256)
    while True:
        yield Config(
            tile,
            _power_of_two(prefill_keys // p.page_size, most_pages),
            _power_of_two(decode_keys // p.page_size, most_pages),
        )
        if tile == QUERY_GRANULE and max(prefill_keys, decode_keys) <= p.page_size:
            return
        tile = round_up(max(tile // 2, QUERY_GRANULE), QUERY_GRANULE)
        prefill_keys, decode_keys = max(prefill_keys // 2, p.page_size), max(decode_keys // 2, p.page_size)
