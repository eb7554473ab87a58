"""Combine and permute as loops over tokens and choices: what the kernels of `moe_combine` are compared with.

Letters: T tokens, K choices of a token, E experts, R rows in order of expert, H columns. Everything is numpy, and nothing is shared with the package.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np


def rows_of(ids: np.ndarray) -> np.ndarray:
    """i64[T, K]: the row of each choice, in order of expert, then of token, then of choice; -1 where there is no expert."""
    of_expert = defaultdict(list)
    for token in range(ids.shape[0]):
        for choice in range(ids.shape[1]):
            of_expert[int(ids[token, choice])].append((token, choice))
    rows = np.full(ids.shape, -1)
    of_expert.pop(-1, None)
    for row, place in enumerate(place for expert in sorted(of_expert) for place in of_expert[expert]):
        rows[place] = row
    return rows


def combine(rows: np.ndarray, ids: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """f64[T, H]: weighted sums. What is not finite counts where its weight is not zero."""
    place, total = rows_of(ids), np.zeros((len(ids), rows.shape[1]))
    for token, choice in np.argwhere(place >= 0):
        weight = 1.0 if weights is None else float(weights[token, choice])
        if weight != 0.0:  # 0 times infinity is nothing
            total[token] += weight * rows[place[token, choice]].astype(np.float64)
    return total


def permute(tokens: np.ndarray, ids: np.ndarray, weights: np.ndarray | None, num_rows: int) -> np.ndarray:
    """[R, H] in the type of the tokens: weighted copies, the products exact and rounded once; a weight of 0 makes
    zeros of whatever it is, and there are zeros behind the last choice's."""
    place, rows = rows_of(ids), np.zeros((num_rows, tokens.shape[1]), tokens.dtype)
    for token, choice in np.argwhere(place >= 0):
        row = tokens[token]
        if weights is not None:
            weight = float(weights[token, choice])
            row = row.astype(np.float64) * weight if weight != 0.0 else np.zeros(len(row))
        rows[place[token, choice]] = row.astype(tokens.dtype)
    return rows


def dots(rows: np.ndarray, ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """f64[T, K]: products of each token with its rows; zero where there is no expert."""
    place, found = rows_of(ids), np.zeros(ids.shape)
    for token, choice in np.argwhere(place >= 0):
        found[token, choice] = rows[place[token, choice]].astype(np.float64) @ tokens[token].astype(np.float64)
    return found


def bfloat16_step(exact: np.ndarray) -> np.ndarray:
    """f64: how far the bfloat16 values around each number are apart."""
    size = np.maximum(np.abs(exact), 2.0**-126)
    return 2.0 ** (np.floor(np.log2(size)) - 7)
