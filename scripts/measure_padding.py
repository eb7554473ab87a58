"""How much of what steps compute is padding, by how token buckets grow: traffic replayed on the scheduler alone, no device and no time of one.

Run by hand: `python scripts/measure_padding.py`. It prints the table of docs/start.md.
"""

import heapq

import numpy as np

from tpu_serve.request import Request, SamplingParams
from tpu_serve.runner.buckets import pick, token_buckets
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.step import SampledToken

BUDGET, MAX_NUM_SEQS, MAX_MODEL_LEN = 2048, 128, 4096
NUM_REQUESTS, STEP_SECONDS = 600, 0.02
GROWTHS = (2, 4)


def requests(rate: float, random: np.random.Generator) -> list[tuple[float, Request]]:
    """(arrival in seconds, request): chats whose prompts and answers have a median of 150 tokens and long tails. All at once for rate 0."""
    arrivals = np.cumsum(random.exponential(1 / rate, NUM_REQUESTS)) if rate else np.zeros(NUM_REQUESTS)
    lengths = np.clip(random.lognormal(np.log(150), 1.1, (NUM_REQUESTS, 2)), 4, 1500).astype(int)
    return [
        (
            at,
            Request(
                id=str(i),
                prompt_token_ids=tuple(range(i, i + prompt)),
                params=SamplingParams(max_tokens=int(answer), ignore_eos=True),
            ),
        )
        for i, (at, (prompt, answer)) in enumerate(zip(arrivals, lengths, strict=True))
    ]


def replay(rate: float) -> list[int]:
    """Tokens of every step, each of which takes the same time."""
    scheduler = Scheduler(
        Cache([PagePool(4096, 128)]),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        max_model_len=MAX_MODEL_LEN,
    )
    queue = [(at, number, request) for number, (at, request) in enumerate(requests(rate, np.random.default_rng(1)))]
    heapq.heapify(queue)
    steps, now = [], 0.0
    while queue or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, queue[0][0])
        while queue and queue[0][0] <= now:
            scheduler.add(heapq.heappop(queue)[2])
        output = scheduler.schedule()
        assert output is not None
        steps.append(output.num_tokens)
        scheduler.commit(output, [SampledToken(1) if item.samples else None for item in output.scheduled])
        now += STEP_SECONDS
    return steps


def main() -> None:
    print("| traffic | steps | " + " | ".join(f"growth {growth}" for growth in GROWTHS) + " |")
    print("|---|---|" + "---|" * len(GROWTHS))
    for name, rate in (("all at once", 0.0), ("10 requests a second", 10.0), ("2 requests a second", 2.0)):
        steps, shares = replay(rate), []
        for growth in GROWTHS:
            buckets = token_buckets(BUDGET, growth)
            places = sum(pick(buckets, size) for size in steps)
            shares.append(f"{1 - sum(steps) / places:.0%} of {places:,} ({len(buckets)} programs)")
        print(f"| {name} | {len(steps):,} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
