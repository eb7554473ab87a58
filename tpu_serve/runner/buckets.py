"""Token counts that get a compiled program."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from tpu_serve.config import ConfigError


def token_buckets(budget: int, smallest: int, growth: int, given: Sequence[int] = ()) -> tuple[int, ...]:
    """Rising bucket sizes that end exactly at the token budget of a step.

    Args:
      budget: most tokens in a step.
      smallest: the first size, unless the budget is less.
      growth: ratio between neighbours, when none are given.
      given: sizes that the user asked for.

    Raises:
      ConfigError: the given sizes do not end at the budget.
    """
    if given:
        if given[-1] != budget:
            raise ConfigError(
                f"--token-buckets must end at --max-num-batched-tokens, which is {budget}; the last one is {given[-1]}."
            )
        return tuple(given)
    sizes = []
    size = smallest
    while size < budget:
        sizes.append(size)
        size *= growth
    return (*sizes, budget)


def pick(buckets: Sequence[int], num_tokens: int) -> int:
    """The smallest bucket that holds so many tokens."""
    return buckets[bisect.bisect_left(buckets, num_tokens)]
