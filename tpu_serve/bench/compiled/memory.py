"""Addresses for what a schedule names only by symbol, and the contents of scalar memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tpu_serve.bench.compiled.schedule import Operand, Schedule, UnsupportedSchedule

WORD = 0xFFFFFFFF
GRANULE_BYTES = 32  # the unit of DMA sizes, and of addresses in DMAs
ROW_BYTES = 512  # the unit of addresses in VMEM, and in HBM on some chips, before the shift by 4 that makes them addresses in DMAs

_SYMBOL = re.compile(r"#allocation\w+")
_FLAG_NAMES = ("vsync", "vwait", "dma.done.wait", "scalar_lea.sflag")

# Semaphores: number of the allocation above, element below. Between them lie the bits that the program adds to say which device
# and core a semaphore belongs to, see `plain_flag`.
_FLAG_SHIFT, _FLAG_ELEMENTS, _FLAG_LIMIT = 26, 1 << 12, 62
# Operands with addresses in rows stay below the buffers, which are an SMEM or a VMEM apart; those in granules lie above all, and none
# meets another after the shift by 4.
_ROWS_BASE, _BUFFER_BASE, _BUFFER_STEP, _GRANULES_BASE = 0x200000, 0x4000000, 0x40000, 0x10000000
# Spill slots of the scalar registers are single words of SMEM and many; tables of operands follow them.
_SPILL_BASE, _TABLE_BASE = 0x1000, 0x100000


def plain_flag(flag: int) -> int:
    """The semaphore on this device that `flag` means, whichever device and core it addresses."""
    return flag & ~(((1 << _FLAG_SHIFT) - 1) & ~(_FLAG_ELEMENTS - 1)) & WORD


def tiled(values: np.ndarray) -> np.ndarray:
    """32-bit values in the order in which a TPU keeps them: flat if one-dimensional, else in tiles of up to 8 rows by 128 columns.

    Args:
      values: of 32-bit integers or floats, any shape.

    Returns:
      uint32, one-dimensional, padding included.
    """
    words = np.ascontiguousarray(values)
    if words.dtype.kind == "f":
        words = words.astype(np.float32).view(np.uint32)
    else:
        words = (words.astype(np.int64) & WORD).astype(np.uint32)
    if words.ndim < 2:
        return words.reshape(-1)
    rows, columns = words.shape[-2:]
    tile = min(8, 1 << (rows - 1).bit_length())
    words = words.reshape(-1, rows, columns)
    words = np.pad(words, ((0, 0), (0, -rows % tile), (0, -columns % 128)))
    blocks = words.reshape(words.shape[0], words.shape[1] // tile, tile, words.shape[2] // 128, 128)
    return blocks.transpose(0, 1, 3, 2, 4).reshape(-1)


def _padded_bytes(operand: Operand) -> int:
    """What an operand takes with its last two dimensions padded to tiles of up to 32 rows by 128 columns, in whole rows of 8 KiB."""
    *outer, rows, columns = (1, 1, *operand.shape)
    tile = min(32, 1 << (rows - 1).bit_length())
    bits = int((re.findall(r"\d+", operand.dtype) or [8])[0])
    size = math.prod(outer) * (rows + -rows % tile) * (columns + -columns % 128) * bits // 8
    return size + -size % 8192


class Memory:
    """Symbols to addresses, and SMEM word by word.

    Attributes:
      smem: words written so far, by address. What nobody wrote reads as zero: among it the numbers of the device and of its core,
        so the program is that of device 0.
      assumptions: what had to be assumed, and how often.
      unknown: the word that is taken for every one that is not known.
    """

    def __init__(
        self,
        schedule: Schedule,
        scalars: Mapping[int, Any],
        hbm_address_bytes: int = GRANULE_BYTES,
        unknown: int = 0,
    ) -> None:
        """Args:
        schedule: names the operands and the semaphores.
        scalars: contents of integer operands by operand index: an integer, or an array in its logical shape.
        hbm_address_bytes: see `Core`.
        unknown: see above.
        """
        self._hbm_address_bytes = hbm_address_bytes
        self.unknown = unknown
        self.smem: dict[int, int] = {}
        self.assumptions: Counter[str] = Counter()
        self._scalars = dict(scalars)
        self._symbols: dict[str, int] = {}
        self._buffers = self._spills = self._flags = 0
        self._flag_symbols = self._find_flags(schedule)
        self._regions: list[tuple[int, int, int, int]] = []  # first, past the last, unit, operand index
        self._operands = self._place(schedule)

    @staticmethod
    def _find_flags(schedule: Schedule) -> set[str]:
        found: set[str] = set()
        for bundle in schedule.bundles:
            for instruction in bundle:
                if instruction.name.startswith(_FLAG_NAMES):
                    found.update(_SYMBOL.findall(instruction.operands[0] if instruction.operands else ""))
                elif instruction.name.startswith("dma."):
                    for operand in instruction.operands[3:5]:
                        found.update(_SYMBOL.findall(operand))
        return found

    def _place(self, schedule: Schedule) -> dict[str, int]:
        """Gives operands addresses, the ones whose contents are known first."""
        places: dict[str, int] = {}
        free = {ROW_BYTES: _ROWS_BASE, GRANULE_BYTES: _GRANULES_BASE}
        for name, operand in sorted(schedule.operands.items(), key=lambda item: item[1].index not in self._scalars):
            if operand.space == "value":
                places[name] = self._value(operand)
                continue
            if operand.index < 0:
                places[name] = self._table(operand)
                continue
            unit = self._hbm_address_bytes if operand.space == "hbm" else ROW_BYTES
            start = free[unit]
            end = start + _padded_bytes(operand) // unit
            places[name], free[unit] = start, end
            self._regions.append((start, end, unit, operand.index))
            if unit == ROW_BYTES:
                self._regions.append((start << 4, end << 4, GRANULE_BYTES, operand.index))
        return places

    def _value(self, operand: Operand) -> int:
        if operand.index not in self._scalars:
            self.assumptions[f"operand {operand.index} is {self.unknown}"] += 1
            return self.unknown
        return int(tiled(np.asarray(self._scalars[operand.index]))[0])

    def _table(self, operand: Operand) -> int:
        """Sets the words of a table of operands, which are addresses and scalars that nobody knows, and says where it lies."""
        self.assumptions[f"operands in a table are {self.unknown}"] += 1
        self.smem.update(dict.fromkeys(range(_TABLE_BASE, _TABLE_BASE + math.prod(operand.shape)), self.unknown))
        return _TABLE_BASE

    def operand(self, name: str) -> int:
        """The address of the operand that value `name` stands for, or the operand itself if it is passed by value."""
        return self._operands[name]

    def symbol(self, name: str) -> int:
        """The address of an allocation such as "#allocation5".

        Raises:
          UnsupportedSchedule: more semaphore arrays than addresses are set aside for.
        """
        address = self._symbols.get(name)
        if address is None:
            if name in self._flag_symbols:
                self._flags += 1
                address = self._flags << _FLAG_SHIFT
                if self._flags > _FLAG_LIMIT:
                    raise UnsupportedSchedule(f"more than {_FLAG_LIMIT} semaphore arrays")
            elif name.endswith("_spill"):
                self._spills += 1
                address = _SPILL_BASE + self._spills
            else:
                address = _BUFFER_BASE + self._buffers * _BUFFER_STEP
                self._buffers += 1
            self._symbols[name] = address
        return address

    def fill(self, source: int, destination: int, granules: int) -> None:
        """A DMA into SMEM: copies words from an integer operand or from elsewhere in SMEM.

        Args:
          source: address in an operand, before or after the shift by 4; of SMEM, in words.
          destination: in words.
          granules: size.
        """
        count = granules * GRANULE_BYTES // 4
        index, offset = self._find(source)
        if index in self._scalars:
            words = tiled(np.asarray(self._scalars[index]))[offset : offset + count]
            self.smem.update(zip(range(destination, destination + len(words)), words.tolist(), strict=True))
            return
        copied = {destination + i: self.smem[source + i] for i in range(count) if source + i in self.smem}
        if not copied:
            origin = "unknown" if index is None else f"operand {index}"
            self.assumptions[f"{origin}, copied into SMEM, is {self.unknown}"] += 1
            if self.unknown:
                copied = dict.fromkeys(range(destination, destination + count), self.unknown)
        self.smem.update(copied)

    def _find(self, address: int) -> tuple[int | None, int]:
        """The operand that lies at an address, and the offset there in words."""
        for start, end, unit, index in self._regions:
            if start <= address < end:
                return index, (address - start) * unit // 4
        return None, 0
