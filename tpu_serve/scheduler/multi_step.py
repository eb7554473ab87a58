"""Several decode steps in one launch: when there can be some, and how many tokens each sequence gets of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.sequence import Sequence


def plan_decode_steps(running: Seq[Sequence], cache: Cache, most: int) -> list[int] | None:
    """How many tokens each running sequence samples in a launch of at most `most` decode steps, 0 where a token in flight is certainly its last.

    A sequence that ends before the others costs nothing but its place in the batch, so the longest one decides. Pages behind windows are
    given back; none are taken yet.

    Returns:
      None where the next launch must be of one step: a sequence has more than its last token to compute or waits for its first one, the host must
      see each of its tokens (a constraint makes its masks of them), nobody has two tokens left, or there are not pages for all of these.
    """
    counts = []
    for sequence in running:
        num_tokens = sequence.num_tokens
        count = min(sequence.max_num_tokens - num_tokens, most)
        if count > 0:
            start = sequence.num_computed
            if start < sequence.num_prompt or num_tokens - start != 1 or sequence.constraint is not None:
                return None
        counts.append(max(0, count))
    if max(counts, default=0) < 2:
        return None
    for sequence in running:
        cache.trim(sequence, sequence.num_computed)
    grown = [
        (sequence, sequence.num_computed + count) for sequence, count in zip(running, counts, strict=True) if count
    ]
    return counts if cache.has_room_for_all(grown) else None
