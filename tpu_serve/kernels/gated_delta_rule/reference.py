"""The rule token by token, in numpy and float64: what the kernel is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

NORM_EPSILON = 1e-6


def sequence(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """Answers [L, Hv, Dv] and the last state [Hv, Dk, Dv] of one sequence of L tokens that starts from `state`; see `op.gated_delta_rule`."""
    q, k, v, log_decay, beta = (np.asarray(part).astype(np.float64) for part in (q, k, v, log_decay, beta))
    state, out = np.array(state, np.float64), np.zeros(v.shape)
    key_of = np.arange(v.shape[1]) * k.shape[1] // v.shape[1]
    for t in range(len(v)):
        for head, shared in enumerate(key_of):
            key = k[t, shared] / np.sqrt(k[t, shared] @ k[t, shared] + NORM_EPSILON)
            query = q[t, shared] / np.sqrt(q[t, shared] @ q[t, shared] + NORM_EPSILON) / np.sqrt(q.shape[-1])
            faded = np.exp(log_decay[t, head]) * state[head]
            state[head] = faded + np.outer(key, beta[t, head] * (v[t, head] - key @ faded))
            out[t, head] = query @ state[head]
    return out, state


def step(
    tokens: Sequence[Any], pool: np.ndarray, starts: np.ndarray, read: np.ndarray, targets: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Answers [T, Hv, Dv], 0 at padding, and the pool after a step.

    Args:
      tokens: q, k, v, log_decay and beta.
      starts: of each row's tokens, and the end of the last.
      read: where each row starts from, -1 for zeros.
      targets: states to write, and then snapshots; out of range for none.
    """
    out, states = np.zeros(tokens[2].shape), np.array(pool, np.float64)
    after = {}
    for row, (start, stop) in enumerate(itertools.pairwise(starts)):
        if stop > start:
            first = pool[read[row]] if read[row] >= 0 else np.zeros(pool.shape[1:])
            q, k, v, log_decay, beta = (part[start:stop] for part in tokens)
            out[start:stop], after[row] = sequence(q, k, v, log_decay, beta, first)
    for target in targets:
        for row, state in after.items():
            if 0 <= target[row] < len(pool):
                states[target[row]] = state
    return out, states
