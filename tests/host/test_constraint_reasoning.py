"""Constraints around reasoning, followed token by token."""

from __future__ import annotations

import random

import pytest

from tpu_serve.constraint.both import combine
from tpu_serve.constraint.masks import ids_of
from tpu_serve.constraint.reasoning import AfterReasoning, ThinkingBudget
from tpu_serve.constraint.words import AllowedIds, BannedSequences
from tpu_serve.request import Constraint

SIZE, EOS = 40, 39
EVERYTHING = set(range(SIZE))


def allowed(constraint: Constraint) -> set[int]:
    return EVERYTHING if constraint.mask is None else set(ids_of(constraint.mask))


def after(*end: int, start: tuple[int, ...] = (), inner: Constraint | None = None) -> AfterReasoning:
    return AfterReasoning(
        inner or AllowedIds([1, EOS], SIZE), end, vocab_size=SIZE, eos_token_ids=[EOS], start_ids=start
    )


def test_the_answer_is_bound_once_the_reasoning_has_ended() -> None:
    constraint = after(5)
    for token_id in (1, 2, 30):
        assert allowed(constraint) == EVERYTHING - {EOS}
        constraint.accept(token_id)
    other = constraint.copy()
    constraint.accept(5)
    assert allowed(constraint) == {1, EOS}
    assert allowed(other) == EVERYTHING - {EOS}
    with pytest.raises(ValueError):
        constraint.accept(2)
    assert constraint.follows
    assert not constraint.is_finished


def test_the_answer_starts_at_its_own_start() -> None:
    """What was thought is none of the answer's business."""
    constraint = after(5, inner=BannedSequences([(5, 6), (1, 2)], SIZE))
    constraint.accept(1)
    constraint.accept(5)
    assert allowed(constraint) == EVERYTHING
    constraint.accept(1)
    assert allowed(constraint) == EVERYTHING - {2}


@pytest.mark.parametrize(
    ("end", "stream", "place"),
    [
        ((5, 6), (5, 6), 2),
        ((5, 6), (5, 5, 6), 3),
        ((5, 6), (5, 7, 6, 5, 6), 5),
        ((5, 5, 6), (5, 5, 5, 6), 4),
        ((5, 6, 5, 7), (5, 6, 5, 6, 5, 7), 6),
    ],
)
def test_an_end_of_several_tokens(end: tuple[int, ...], stream: tuple[int, ...], place: int) -> None:
    constraint = after(*end)
    for index, token_id in enumerate(stream):
        assert allowed(constraint) == EVERYTHING - {EOS}, index
        constraint.accept(token_id)
    assert len(stream) == place
    assert allowed(constraint) == {1, EOS}


def test_reasoning_that_is_not_open_yet() -> None:
    constraint = after(5, start=(7, 8))
    answers = constraint.copy()
    assert allowed(constraint) == {7, 1, EOS}
    constraint.accept(7)
    assert allowed(constraint) == {8}
    with pytest.raises(ValueError, match="does not continue the start"):
        constraint.copy().accept(9)
    constraint.accept(8)
    assert allowed(constraint) == EVERYTHING - {EOS}
    constraint.accept(5)
    assert allowed(constraint) == {1, EOS}
    answers.accept(1)
    assert allowed(answers) == {1, EOS}
    with pytest.raises(ValueError):
        answers.accept(7)


def say(constraint: Constraint, tokens: list[int], seed: int = 0, num: int = 30) -> list[int]:
    """Tokens as wished while they are allowed, otherwise one that is."""
    said = []
    for token_id in tokens[:num]:
        open_to = allowed(constraint)
        said.append(token_id if token_id in open_to else min(open_to))
        constraint.accept(said[-1])
    return said


@pytest.mark.parametrize("budget", [0, 1, 4, 20])
def test_a_budget_ends_the_reasoning(budget: int) -> None:
    said = say(ThinkingBudget(budget, (5, 6), True, vocab_size=SIZE), [1] * 30)
    assert said == [1] * budget + [5, 6] + [1] * (28 - budget)


def test_a_part_of_the_end_is_not_repeated() -> None:
    assert say(ThinkingBudget(2, (5, 6), True, vocab_size=SIZE), [1, 1, 1]) == [1, 1, 5]
    assert say(ThinkingBudget(2, (5, 6), True, vocab_size=SIZE), [1, 5, 1, 1, 1]) == [1, 5, 1, 5, 6]
    assert say(ThinkingBudget(2, (5, 6), True, vocab_size=SIZE), [1, 1, 5, 9, 1]) == [1, 1, 5, 6, 1]
    # The end came by itself, with nothing to spare.
    assert say(ThinkingBudget(2, (5, 6), True, vocab_size=SIZE), [1, 5, 6, 1, 1, 1]) == [1, 5, 6, 1, 1, 1]


def test_a_budget_counts_from_the_start_of_the_reasoning() -> None:
    def budget() -> ThinkingBudget:
        return ThinkingBudget(1, (5,), False, vocab_size=SIZE, start_ids=(7, 8))

    assert say(budget(), [1, 1, 1, 7, 8, 1, 1, 1]) == [1, 1, 1, 7, 8, 1, 5, 1]
    assert say(budget(), [1] * 9) == [1] * 9
    with pytest.raises(ValueError, match="must not be negative"):
        ThinkingBudget(-1, (5,), True, vocab_size=SIZE)
    with pytest.raises(ValueError, match="at least one token"):
        ThinkingBudget(1, (), True, vocab_size=SIZE)
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        ThinkingBudget(1, (SIZE,), True, vocab_size=SIZE)
    constraint = budget()
    say(constraint, [7, 8, 1])
    with pytest.raises(ValueError, match="budget is spent"):
        constraint.accept(1)


@pytest.mark.parametrize("seed", range(10))
def test_steps_may_run_ahead_while_a_budget_does_not_follow(seed: int) -> None:
    """Whatever four tokens come, where `follows` is false, the masks until behind them are the one that is known."""
    generator = random.Random(seed)
    constraint = ThinkingBudget(20, (5, 6), False, vocab_size=SIZE, start_ids=(7,))
    for _ in range(40):
        if not constraint.follows:
            for _ in range(10):
                ahead, known = constraint.copy(), constraint.mask
                for _ in range(4):
                    ahead.accept(generator.choice([1, 5, 6, 7]))
                    assert ahead.mask == known
        constraint.accept(generator.choice(sorted(allowed(constraint) & {1, 5, 6, 7})))


def test_a_budget_follows_until_its_end_is_complete() -> None:
    constraint = ThinkingBudget(0, tuple(range(10)), True, vocab_size=SIZE)
    for token_id in range(10):
        assert constraint.follows, "the mask changes with every token"
        assert allowed(constraint) == {token_id}
        constraint.accept(token_id)
    assert not constraint.follows


def test_both_together() -> None:
    constraint = combine(
        AfterReasoning(AllowedIds([1], SIZE), (5, 6), vocab_size=SIZE, eos_token_ids=[EOS]),
        ThinkingBudget(3, (5, 6), True, vocab_size=SIZE),
    )
    assert constraint is not None
    assert say(constraint, [EOS, 2, 2, 2, 2, 2, 2, 2]) == [0, 2, 2, 5, 6, 1, 1, 1]


def test_the_end_of_a_budget_frees_what_else_is_allowed() -> None:
    """The budget stops following with the token that ends it: the mask of both is not what it was then."""
    constraint = combine(ThinkingBudget(1, (5,), True, vocab_size=SIZE), AllowedIds([2, 3, 5], SIZE))
    assert constraint is not None
    assert say(constraint, [2, 2, 2, 3, 2]) == [2, 5, 2, 3, 2]
