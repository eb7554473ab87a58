"""Sets of token ids as the words that a `Constraint` hands to the engine: bit i % 32 of little-endian word i // 32 is id i."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def num_mask_bytes(vocab_size: int) -> int:
    """Length of a mask: whole words of 32 bits."""
    return (vocab_size + 31) // 32 * 4


def mask_of(ids: Iterable[int], vocab_size: int) -> bytes:
    """These ids and no others. Raises `ValueError` for an id outside the vocabulary."""
    words = bytearray(num_mask_bytes(vocab_size))
    for token_id in ids:
        _check(token_id, vocab_size)
        words[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(words)


def whole_mask(vocab_size: int) -> bytes:
    """All ids; bits beyond the vocabulary are zero."""
    words = bytearray(num_mask_bytes(vocab_size))
    words[: vocab_size // 8] = b"\xff" * (vocab_size // 8)
    if vocab_size % 8:
        words[vocab_size // 8] = (1 << vocab_size % 8) - 1
    return bytes(words)


def without(mask: bytes, ids: Iterable[int]) -> bytes:
    """The mask less these ids, which lie in its vocabulary."""
    words = bytearray(mask)
    for token_id in ids:
        words[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
    return bytes(words)


def intersection(masks: Sequence[bytes | None]) -> bytes | None:
    """Ids that are in all masks of one length; None is the mask of everything."""
    given = [mask for mask in masks if mask is not None]
    if len(given) < 2:
        return given[0] if given else None
    words = np.frombuffer(given[0], np.uint64 if len(given[0]) % 8 == 0 else np.uint32)
    for mask in given[1:]:
        words = words & np.frombuffer(mask, words.dtype)
    return words.tobytes()


def union(first: bytes, second: bytes) -> bytes:
    """Ids that are in one of two masks of one length."""
    return (np.frombuffer(first, np.uint32) | np.frombuffer(second, np.uint32)).tobytes()


def is_allowed(mask: bytes | None, token_id: int) -> bool:
    """Whether an id is in the mask; none outside of it is."""
    if mask is None:
        return token_id >= 0
    return 0 <= token_id < 8 * len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def ids_of(mask: bytes) -> list[int]:
    """The ids in rising order."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def _check(token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"Token id {token_id} is outside of the vocabulary of {vocab_size}.")
