"""What is asked of the kernel, how it is cut, and whether a chip can do it. Plain Python.

Letters: T tokens, S sequence rows, Hk key heads and Hv value heads, Dk and Dv their sizes; C tokens of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpu_serve.device.chip import MIB, Chip

LANES = 128
SUBLANES = 8
CHUNK = 64
ROWS = 4
BATCHES = 3
MAX_VALUE_HEADS = 8
MAX_KEY_HEADS = 4
"""A token's keys and queries make one register of 8 rows."""
VMEM_SHARE = 0.92
SMEM_SHARE = 0.5

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes and types of one call on one device.

    Attributes:
      num_tokens, num_rows: T and S.
      num_key_heads, num_value_heads: Hk and Hv, those of this device. Hv is a multiple of Hk.
      key_dim, value_dim: Dk and Dv.
      dtype: of queries, keys, values and answers. The state and the gates are float32.
    """

    num_tokens: int
    num_rows: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int = LANES
    value_dim: int = LANES
    dtype: str = "bfloat16"

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_single(self) -> int:
        """Tokens that may be the only one of their row and lie in front, filled up to whole registers."""
        return min(self.num_tokens, round_up(min(self.num_rows, self.num_tokens), 16))

    @property
    def state_bytes(self) -> int:
        """Of a row."""
        return self.num_value_heads * self.key_dim * self.value_dim * 4


@dataclass(frozen=True, slots=True)
class Config:
    """How a problem is cut.

    Attributes:
      chunk: C, a power of two from 8 on, at most T.
      key_heads: of a block of heads, whose work is one after the other's. A divisor of Hk.
      rows: with a single token, that are worked on at a time. They divide 8.
      slots: states in VMEM at a time, a multiple of `rows`: those that come, those worked on and those that go.
    """

    chunk: int
    key_heads: int
    rows: int = ROWS
    slots: int = BATCHES * ROWS


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def num_items(problem: Problem, config: Config) -> int:
    """The most pieces of a chunk that belong to one row: a row ends in at most one chunk that another one begins in."""
    return -(-problem.num_tokens // config.chunk) + min(problem.num_rows, problem.num_tokens)


def heuristic(problem: Problem) -> Config:
    """The config of a problem that is `supported`."""
    chunk = min(CHUNK, 1 << (problem.num_tokens.bit_length() - 1))
    fits = [
        count
        for count in range(1, problem.num_key_heads + 1)
        if problem.num_key_heads % count == 0
        and count <= MAX_KEY_HEADS
        and (count == 1 or count * problem.group <= MAX_VALUE_HEADS)
    ]
    return Config(chunk, max(fits))


def buffers(problem: Problem, config: Config) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of what the kernel allocates in VMEM. By name:

    states: those under way from and to HBM, or worked on.
    queries, keys, values: of the tokens that are alone, in float32.
    """
    p, heads = problem, config.key_heads
    return {
        "states": ((config.slots, heads * p.group, p.key_dim, p.value_dim), "float32"),
        "queries": ((p.num_single, heads * p.key_dim), "float32"),
        "keys": ((p.num_single, heads * p.key_dim), "float32"),
        "values": ((p.num_single, heads * p.group * p.value_dim), "float32"),
    }


def vmem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of VMEM: the buffers, two windows of what Pallas brings and fetches, and the values of a chunk."""
    p, heads = problem, config.key_heads
    held = sum(math.prod(shape) * BYTES[dtype] for shape, dtype in buffers(p, config).values())
    width = heads * (2 * p.key_dim + 2 * p.group * p.value_dim)
    tokens = p.num_single + config.chunk
    windows = (
        2 * tokens * (width * BYTES[p.dtype] + 2 * LANES * 4) + 2 * p.num_single * heads * p.group * p.value_dim * 2
    )
    size = max(LANES, 2 * config.chunk)
    values = heads * p.group * 12 * size * max(size, p.value_dim) * 4
    return held + windows + values + MIB


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of SMEM that the tables take."""
    return 4 * (2 * num_items(problem, config) + 4 * problem.num_rows + 64)


def supported(problem: Problem, chip: Chip) -> str | None:
    """None when the kernel runs on this chip, else the reason why not, as a sentence."""
    p = problem
    if p.dtype not in BYTES:
        return f"values of type {p.dtype} are not {' or '.join(BYTES)}"
    if min(p.num_rows, p.num_key_heads, p.num_value_heads) < 1:
        return "there is nothing to do: rows and heads must be at least 1"
    if p.num_value_heads % p.num_key_heads:
        return f"{p.num_value_heads} value heads are not a multiple of {p.num_key_heads} key heads"
    if p.key_dim != LANES or p.value_dim != LANES:
        return f"heads of {p.key_dim} x {p.value_dim} are not {LANES} x {LANES}"
    if p.num_tokens < SUBLANES or p.num_tokens % SUBLANES:
        return f"{p.num_tokens} tokens are not a multiple of {SUBLANES}"
    config = heuristic(p)
    if (need := vmem_bytes(p, config)) > (have := int(VMEM_SHARE * chip.vmem_bytes)):
        return f"a chunk needs {need / MIB:.1f} MiB of VMEM, {chip.name} has {have / MIB:.1f} MiB for it"
    if (need := smem_bytes(p, config)) > (have := int(SMEM_SHARE * chip.smem_bytes)):
        return f"the tables of {p.num_rows} rows need {need} bytes of SMEM, {chip.name} has {have} for them"
    return None
