"""A form that the first token may opt out of."""

from __future__ import annotations

import pytest

from tpu_serve.constraint.masks import ids_of
from tpu_serve.constraint.unless import UnlessStartedWith
from tpu_serve.constraint.words import AllowedIds, BannedSequences


def test_the_start_is_allowed_at_the_first_token_only():
    constraint = UnlessStartedWith(AllowedIds([3, 40], 70), 50, vocab_size=70)
    assert constraint.follows
    assert ids_of(constraint.mask or b"") == [3, 40, 50]
    constraint.accept(3)
    assert not constraint.follows
    assert ids_of(constraint.mask or b"") == [3, 40]
    with pytest.raises(ValueError):
        constraint.accept(50)


def test_everything_goes_after_the_start():
    constraint = UnlessStartedWith(AllowedIds([3], 70), 50, vocab_size=70)
    twin = constraint.copy()
    constraint.accept(50)
    assert (constraint.mask, constraint.follows, constraint.is_finished) == (None, False, False)
    constraint.accept(69)
    assert ids_of(twin.mask or b"") == [3, 50]
    with pytest.raises(ValueError):
        twin.accept(69)


def test_a_form_that_allows_everything_stays_so():
    constraint = UnlessStartedWith(BannedSequences([(1, 2)], 70), 50, vocab_size=70)
    assert constraint.mask is None
    constraint.accept(1)
    assert 2 not in ids_of(constraint.mask or b"")
