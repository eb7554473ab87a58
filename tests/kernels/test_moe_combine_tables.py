"""Tables of windows and places of rows, against sets of granules counted one row at a time. No kernel runs."""

import jax
import jax.numpy as jnp
import moe_combine_reference as reference
import numpy as np
import pytest
from moe_combine_inputs import ROUTINGS, routed

from tpu_serve.kernels.moe_combine import selection, tables
from tpu_serve.kernels.moe_combine.problem import FIELDS, Config, Problem, buffer_rows, round_up, table_width

# Tokens, choices, experts, tokens of a block, rows of a granule.
SHAPES = {
    "plain": (96, 4, 16, 32, 8),
    "tall granules": (96, 4, 16, 32, 16),
    "taller granules": (96, 3, 12, 32, 32),
    "rows for themselves": (96, 4, 16, 32, 1),
    "one choice": (200, 1, 5, 16, 8),
    "one expert": (70, 2, 1, 16, 8),
    "tokens fill no block": (45, 2, 6, 128, 16),
    "many tiny ranges": (128, 2, 128, 16, 16),
    "tinier than a granule": (40, 8, 512, 8, 32),
    "experts fill no group": (100, 3, 13, 16, 8),
    "many blocks": (400, 2, 40, 8, 16),
    "every token all experts": (64, 10, 10, 16, 8),
}


def tables_of(problem, config, ids):
    """i32[B, width], as one program: operation by operation takes longer."""
    return np.asarray(jax.jit(lambda ids: tables.make(problem, config, ids).windows)(jnp.asarray(ids)))[:, 0]


def windows_of(table):
    """(expert, first granule, granules, place, head, tail) of the windows of a block, which is an array [width]."""
    entries = table[:-2].reshape(-1, FIELDS)
    return [(expert, *map(int, entry)) for expert, entry in enumerate(entries) if entry[1] > 0]


def check_block(table, base, own, before, align):
    """Of one block.

    Args:
      table: i32[width]; base: f32[E].
      own: (row, expert, rank) of its choices, the rank being the number of the block's choices of the expert before it.
      before: rows of all earlier blocks.
    """
    windows = windows_of(table)
    place_of = {}
    next_place = 0
    for expert, first, size, place, _, _ in windows:
        assert expert < len(base)
        assert place == next_place, "windows lie one behind the other"
        next_place += size
        for index in range(size):
            assert first + index not in place_of, "a granule has one place"
            place_of[first + index] = place + index
    assert set(place_of) == {row // align for row, _, _ in own}
    for row, expert, rank in own:
        assert base[expert] + rank == place_of[row // align] * align + row % align
    staged = [first for _, first, _, _, head, _ in windows if head]
    staged += [first + size - 1 for _, first, size, _, _, tail in windows if tail]
    assert len(staged) == len(set(staged)), "no granule is staged twice"
    assert set(staged) == {row // align for row in before} & set(place_of)
    assert all(head in (0, 1) and tail in (0, 1) for *_, head, tail in windows)
    empty = [entry for entry in table[:-2].reshape(-1, FIELDS) if entry[1] <= 0]
    assert all(size == head == tail == 0 for _, size, _, head, tail in empty)
    assert list(table[-2:]) == [len(place_of), len(staged)]


def choices_by_block(ids, block_tokens):
    """For each block, (row, expert, rank) of its choices."""
    rows, blocks = reference.rows_of(ids), []
    for start in range(0, len(ids), block_tokens):
        seen, own = {}, []
        for token in range(start, min(start + block_tokens, len(ids))):
            for choice in range(ids.shape[1]):
                expert = int(ids[token, choice])
                if expert >= 0:
                    own.append((int(rows[token, choice]), expert, seen.get(expert, 0)))
                    seen[expert] = seen.get(expert, 0) + 1
        blocks.append(own)
    return blocks


@pytest.mark.parametrize("name", SHAPES)
def test_windows_places_and_staging(name):
    num_tokens, top_k, num_experts, block_tokens, align = SHAPES[name]
    problem = Problem(num_tokens, top_k, num_experts, round_up(num_tokens * top_k, 32), 128, align=align)
    config = Config(block_tokens, 128)
    make = jax.jit(lambda ids: tables.make(problem, config, ids))
    staged = 0
    for seed, routing in enumerate(ROUTINGS * 3):
        ids = routed(seed, num_tokens, top_k, num_experts, routing)
        windows, base = map(np.asarray, make(jnp.asarray(ids)))
        blocks = choices_by_block(ids, block_tokens)
        assert windows.shape == (len(blocks), 1, table_width(problem))
        assert windows.dtype == np.int32
        assert base.dtype == np.float32
        before = []
        for table, of_expert, own in zip(windows[:, 0], base[:, :, 0], blocks, strict=True):
            check_block(table, of_expert, own, before, align)
            before += [row for row, _, _ in own]
            assert table[-2] * align <= buffer_rows(problem, config)
            staged += table[-1]
    # The cases meet the rule at all. Rows that lie for themselves share nothing, and a single block comes after none.
    assert (staged > 0) == (align > 1 and num_tokens > block_tokens)


def test_a_granule_of_many_experts_is_read_back_once():
    """Four experts of one row each in a granule: the second block adds two, one of them between rows of the first."""
    ids = np.array([[0], [2], [1], [3]], np.int32)
    problem, config = Problem(4, 1, 4, 8, 128, align=8), Config(2, 128)
    windows = tables_of(problem, config, ids)
    assert windows_of(windows[0]) == [(0, 0, 1, 0, 0, 0)]
    assert windows_of(windows[1]) == [(1, 0, 1, 0, 1, 0)]


def test_a_granule_before_the_window_is_not_read_back():
    """The first block's rows fill a granule, the second's begin at the next one."""
    ids = np.array([[0]] * 16, np.int32)
    problem, config = Problem(16, 1, 1, 16, 128, align=8), Config(8, 128)
    windows = tables_of(problem, config, ids)
    assert [windows_of(block) for block in windows] == [[(0, 0, 1, 0, 0, 0)], [(0, 1, 1, 0, 0, 0)]]


@pytest.mark.parametrize(("top_k", "num_experts"), [(1, 5), (2, 8), (10, 24)])
def test_places_in_the_buffer(top_k, num_experts):
    """A choice lies behind those of its expert before it, in order of token and then of choice, duplicates in a token included."""
    block_tokens = 128
    generator = np.random.default_rng(1)
    ids = routed(0, block_tokens, top_k, num_experts, "partial")
    base = generator.integers(0, 5000, (num_experts, 1)).astype(np.float32)
    found = np.asarray(jax.jit(selection.places)(jnp.asarray(ids.T), jnp.asarray(base)))
    [own] = choices_by_block(ids, block_tokens)
    expected = np.full(ids.shape, selection.NOWHERE)
    expected[ids >= 0] = [base[expert, 0] + rank for _, expert, rank in own]
    np.testing.assert_array_equal(found, expected.T)
