"""What runs beside the scalar program: DMA engines, links and semaphores. All times are cycles of the core."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict

from tpu_serve.bench.compiled.machine import (
    DMA_LATENCY_SECONDS,
    DMA_OCCUPANCY_SECONDS,
    INNER_DMA_LATENCY_SECONDS,
    LINK_LATENCY_SECONDS,
    Core,
)
from tpu_serve.bench.compiled.memory import GRANULE_BYTES, WORD, plain_flag

# Bits of a general DMA's last operand: it leaves the core; number of the chip it goes to; the core there.
_REMOTE, _CHIP, _CORE = 0x4000, 0x3FFF, 1 << 26
_SIGN = 1 << 31


def signed(word: int) -> int:
    """A 32-bit word as the signed number it encodes."""
    return word - (1 << 32) if word & _SIGN else word


class Channel:
    """A queue in which transfers follow one another at a fixed rate."""

    def __init__(self, bytes_per_cycle: float, occupancy: float) -> None:
        self.bytes_per_cycle = bytes_per_cycle
        self.occupancy = occupancy
        self.free_at = 0.0

    def reserve(self, now: float, size: int) -> float:
        """When a transfer of `size` bytes that is asked for `now` has gone through."""
        self.free_at = max(now, self.free_at) + max(size / self.bytes_per_cycle, self.occupancy)
        return self.free_at


class Engines:
    """Serves the DMAs and semaphores of one core, in the order in which the program asks.

    The core's peers run the same program at the same time: each remote write and signal is answered, when it would arrive there,
    by an equal one that arrives here on the same semaphore. Where devices send each other different amounts, what arrives is off by
    the difference: `unanswered` and `has_surplus` tell.

    Attributes:
      dma_counts, dma_bytes: by kind, "hbm-to-vmem" for example. A kind of a DMA that leaves the device is prefixed "remote ", one to
        the other device of the same chip "sibling ".
      stall_dma, stall_peer: cycles waited, by the block that waited. Peer: the last to arrive came from another device.
      hbm_bytes, peer_bytes: read and written in HBM by DMAs within the device, and sent to other devices, by the block that asked.
      block: the block being run, set by the execution.
      unanswered: waits for which nothing that was modelled would ever arrive. They are let through, at the time of the last arrival
        from a peer.
      remote_signals: signals sent.
    """

    def __init__(self, core: Core, grid: tuple[int, ...], num_blocks: int) -> None:
        occupancy = core.cycles(DMA_OCCUPANCY_SECONDS)
        self._hbm = Channel(core.hbm_bytes_per_cycle, occupancy)
        self._inner = Channel(core.inner_bytes_per_cycle, occupancy)
        self._links = Channel(core.link_bytes_per_cycle(grid), occupancy)
        self._sibling = Channel(core.sibling_bytes_per_cycle, occupancy)
        self._latency = core.cycles(DMA_LATENCY_SECONDS)
        self._inner_latency = core.cycles(INNER_DMA_LATENCY_SECONDS)
        self._link_latency = core.cycles(LINK_LATENCY_SECONDS)
        self._value: defaultdict[int, int] = defaultdict(int)
        self._arrivals: defaultdict[int, list[tuple[float, int, bool]]] = defaultdict(list)
        self._unnamed: list[tuple[float, int]] = []
        self._shared: set[int] = set()  # semaphores that peers add to
        self._last_peer = 0.0
        self.dma_counts: Counter[str] = Counter()
        self.dma_bytes: Counter[str] = Counter()
        self.block = 0
        self.stall_dma = [0.0] * num_blocks
        self.stall_peer = [0.0] * num_blocks
        self.hbm_bytes = [0] * num_blocks
        self.peer_bytes = [0] * num_blocks
        self.unanswered = 0
        self.remote_signals = 0

    def _count(self, kind: str, size: int) -> None:
        self.dma_counts[kind] += 1
        self.dma_bytes[kind] += size

    def local(self, now: float, kind: str, granules: int, flag: int) -> None:
        """Starts a DMA within the device. Its semaphore gains `granules` when it is through; one of nothing does nothing."""
        if not 0 < granules < _SIGN:
            return
        size = granules * GRANULE_BYTES
        self._count(kind, size)
        if "hbm" in kind:
            moved = size * kind.count("hbm")  # both ends in HBM: read and written
            self.hbm_bytes[self.block] += moved
            done = self._hbm.reserve(now, moved) + self._latency
        else:
            done = self._inner.reserve(now, size) + self._inner_latency
        heapq.heappush(self._arrivals[plain_flag(flag)], (done, granules, False))

    def general(self, now: float, kind: str, granules: int, flag: int, source_flag: int, overrides: int) -> None:
        """Starts a DMA in the form that may leave the device, in which case both ends have a semaphore."""
        chip, other_core = overrides & _CHIP, bool(overrides & _CORE)
        if not overrides & _REMOTE:
            self.local(now, kind, granules, flag)
            return
        if not 0 < granules < _SIGN:
            return
        if chip == 0 and not other_core:  # to itself, which credits both semaphores
            self.local(now, kind, granules, flag)
            heapq.heappush(self._arrivals[plain_flag(source_flag)], (now, granules, False))
            return
        size = granules * GRANULE_BYTES
        self._count(("remote " if chip else "sibling ") + kind, size)
        self.peer_bytes[self.block] += size
        left = (self._links if chip else self._sibling).reserve(now, size)
        if "hbm" in kind:  # read here, or the peer's answer written here
            self._hbm.reserve(now, size * kind.count("hbm"))
        arrived = left + self._link_latency
        self._last_peer = max(self._last_peer, arrived)
        heapq.heappush(self._arrivals[plain_flag(source_flag)], (left + self._latency / 2, granules, False))
        heapq.heappush(self._arrivals[plain_flag(flag)], (arrived, granules, True))
        self._shared.add(plain_flag(flag))

    def signal(self, flag: int, amount: int) -> None:
        """Adds to a semaphore of this core, at once."""
        self._value[plain_flag(flag)] += signed(amount)

    def set(self, flag: int, value: int) -> None:
        """Gives a semaphore of this core a value, at once."""
        self._value[plain_flag(flag)] = signed(value)

    def remote_signal(self, now: float, flag: int, amount: int) -> None:
        """Signals a peer, and receives its answer. The barrier's semaphore goes by a number that names none of the program's."""
        arrived = now + self._link_latency
        self.remote_signals += 1
        self._last_peer = max(self._last_peer, arrived)
        name = plain_flag(flag)
        if name >> 26:
            heapq.heappush(self._arrivals[name], (arrived, signed(amount), True))
            self._shared.add(name)
        else:
            heapq.heappush(self._unnamed, (arrived, signed(amount)))

    def read(self, now: float, flag: int) -> int:
        """A semaphore's value as the program sees it now."""
        name = plain_flag(flag)
        arrivals = self._arrivals[name]
        while arrivals and arrivals[0][0] <= now:
            self._value[name] += heapq.heappop(arrivals)[1]
        return self._value[name] & WORD

    def has_surplus(self, now: float) -> bool:
        """Whether peers have added more to a semaphore than the program has taken."""
        return any(self.read(now, flag) for flag in self._shared)

    def wait(self, now: float, flag: int, level: int) -> float:
        """Cycles until a semaphore is at least `level` (a signed 32-bit word)."""
        name, wanted = plain_flag(flag), signed(level)
        value, arrivals = self._value[name], self._arrivals[name]
        until, peer = now, False
        while value < wanted and arrivals:
            time, amount, from_peer = heapq.heappop(arrivals)
            value += amount
            if time > until:
                until, peer = time, from_peer
        while value < wanted and self._unnamed:
            time, amount = heapq.heappop(self._unnamed)
            value += amount
            if time > until:
                until, peer = time, True
        if value < wanted:
            self.unanswered += 1
            value, peer = wanted, True
            until = max(until, self._last_peer)
        self._value[name] = value
        stall = until - now
        (self.stall_peer if peer else self.stall_dma)[self.block] += stall
        return stall
