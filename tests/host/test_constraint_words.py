"""Bit words, allowed and banned ids, and constraints together."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tpu_serve.constraint import masks
from tpu_serve.constraint.both import combine
from tpu_serve.constraint.words import AllowedIds, BannedSequences
from tpu_serve.request import Constraint


def bits(mask: bytes | None, vocab_size: int) -> set[int]:
    assert mask is not None
    words = np.frombuffer(mask, "<u4")
    assert len(words) == -(-vocab_size // 32)
    found = {32 * index + bit for index, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1}
    assert all(token_id < vocab_size for token_id in found)
    return found


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 31, 32, 33, 64, 97])
def test_masks(vocab_size: int) -> None:
    generator = random.Random(vocab_size)
    first, second = ({i for i in range(vocab_size) if generator.random() < 0.5} for _ in range(2))
    one, two = masks.mask_of(first, vocab_size), masks.mask_of(second, vocab_size)
    assert bits(one, vocab_size) == first
    assert masks.ids_of(one) == sorted(first)
    assert bits(masks.whole_mask(vocab_size), vocab_size) == set(range(vocab_size))
    assert bits(masks.without(one, second), vocab_size) == first - second
    assert bits(masks.union(one, two), vocab_size) == first | second
    assert bits(masks.intersection([one, None, two]), vocab_size) == first & second
    assert masks.intersection([None, one]) == one
    assert masks.intersection([None, None]) is None
    assert [masks.is_allowed(one, i) for i in range(-1, vocab_size + 40)] == [
        i in first for i in range(-1, vocab_size + 40)
    ]
    for token_id in (-1, vocab_size):
        with pytest.raises(ValueError, match=f"Token id {token_id} is outside of the vocabulary of {vocab_size}"):
            masks.mask_of([token_id], vocab_size)


def test_allowed_ids() -> None:
    constraint = AllowedIds([3, 33, 3], 40)
    assert bits(constraint.mask, 40) == {3, 33}
    assert (constraint.follows, constraint.is_finished) == (False, False)
    constraint.accept(33)
    for token_id in (4, -1, 40, 4000):
        with pytest.raises(ValueError, match="not one of the allowed tokens"):
            constraint.accept(token_id)
    assert bits(constraint.copy().mask, 40) == {3, 33}


@pytest.mark.parametrize("seed", range(20))
def test_banned_sequences_against_their_definition(seed: int) -> None:
    generator = random.Random(seed)
    size = 5
    sequences = [
        [generator.randrange(size) for _ in range(generator.randint(1, 4))] for _ in range(generator.randint(1, 5))
    ]
    constraint: Constraint = BannedSequences(sequences, size)
    assert constraint.follows == any(len(sequence) > 1 for sequence in sequences)
    so_far: list[int] = []
    for _ in range(60):
        wanted = {i for i in range(size) if not any([*so_far, i][-len(one) :] == one for one in sequences)}
        allowed = set(range(size)) if constraint.mask is None else bits(constraint.mask, size)
        assert allowed == wanted, so_far
        for token_id in set(range(size)) - wanted:
            with pytest.raises(ValueError, match="ends a banned sequence"):
                constraint.copy().accept(token_id)
        if not wanted:
            break
        if generator.random() < 0.2:
            constraint = constraint.copy()
        so_far.append(generator.choice(sorted(wanted)))
        constraint.accept(so_far[-1])


def test_banned_sequences_copy_and_errors() -> None:
    one = BannedSequences([(1, 2), (7,)], 40)
    other = one.copy()
    one.accept(1)
    assert bits(one.mask, 40) == set(range(40)) - {2, 7}
    assert bits(other.mask, 40) == set(range(40)) - {7}
    assert BannedSequences([(1, 2)], 40).mask is None
    with pytest.raises(ValueError, match="at least one token id"):
        BannedSequences([()], 40)
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        BannedSequences([(1, 40)], 40)


class Countdown:
    """Allows one id after another and is finished after `num` of them."""

    follows = True

    def __init__(self, num: int, vocab_size: int, at: int = 0):
        self.num, self.vocab_size, self.at = num, vocab_size, at

    @property
    def mask(self) -> bytes | None:
        return masks.mask_of([self.at, 9], self.vocab_size)

    @property
    def is_finished(self) -> bool:
        return self.at >= self.num

    def accept(self, token_id: int) -> None:
        self.at += 1

    def copy(self) -> Countdown:
        return Countdown(self.num, self.vocab_size, self.at)


def test_combinations() -> None:
    assert combine() is None
    assert combine(None, None) is None
    alone = AllowedIds([1], 16)
    assert combine(None, alone) is alone

    fixed = combine(AllowedIds([1, 2, 9], 16), BannedSequences([(2,)], 16))
    assert fixed is not None
    assert not fixed.follows
    assert bits(fixed.mask, 16) == {1, 9}
    fixed.accept(9)
    assert bits(fixed.mask, 16) == {1, 9}
    with pytest.raises(ValueError):
        fixed.accept(2)

    both = combine(Countdown(3, 16), BannedSequences([(1, 2)], 16), AllowedIds(range(3), 16))
    assert both is not None
    assert both.follows
    assert bits(both.mask, 16) == {0}
    both.accept(0)
    other = both.copy()
    assert bits(both.mask, 16) == {1}
    both.accept(1)
    assert bits(both.mask, 16) == set(), "2 is banned after 1, 9 is not allowed"
    assert bits(other.mask, 16) == {1}
    assert not both.is_finished
    other.accept(1)
    other.accept(0)
    assert other.is_finished
    assert not both.is_finished
