"""The layouts of routed experts against their definitions, index by index, and there and back again for every size."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_serve.checkpoint.layouts import (
    FUSED,
    LAYOUTS,
    PER_EXPERT,
    SPLIT,
    Sizes,
    convert_tree,
    convert_wi,
    find_layout,
    is_routed,
    places,
    read_sizes,
    stack_experts,
    unstack_experts,
)
from tpu_serve.cli import convert as command
from tpu_serve.config import ConfigError

ANY_SIZES = st.builds(
    Sizes,
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
    st.integers(1, 4).map(lambda half: 2 * half),
    st.integers(1, 4).map(lambda half: 2 * half),
    st.integers(1, 5),
)


def numbered(shape, start=0):
    """Every element is its own number."""
    return np.arange(start, start + np.prod(shape)).reshape(shape)


@settings(deadline=None, max_examples=60)
@given(ANY_SIZES)
def test_split_equals_its_definition(sizes):
    fused = numbered(sizes.wi(FUSED))
    split = convert_wi(fused, FUSED, SPLIT)
    num_experts, hidden = sizes.num_experts, sizes.hidden
    assert split.shape == (2, *sizes.stack, num_experts, hidden // 2, 2 * sizes.inner)
    for index in np.ndindex(split.shape):
        half, *stack, row, column, inner = index
        expert = half * (num_experts // 2) + row // 2
        place = row % 2 * (hidden // 2) + column
        assert split[index] == fused[(*stack, expert, place, inner)]


@settings(deadline=None, max_examples=60)
@given(ANY_SIZES)
def test_there_and_back_moves_nothing(sizes):
    fused = numbered(sizes.wi(FUSED))
    split = convert_wi(fused, FUSED, SPLIT)
    assert split.shape == sizes.wi(SPLIT)
    np.testing.assert_array_equal(convert_wi(split, SPLIT, FUSED), fused)
    copy = np.ascontiguousarray(split)
    np.testing.assert_array_equal(convert_wi(convert_wi(copy, SPLIT, FUSED), FUSED, SPLIT), copy)
    assert read_sizes(FUSED, fused.shape) == read_sizes(SPLIT, split.shape) == sizes
    for layout, wi in ((FUSED, fused), (SPLIT, split)):
        assert find_layout(wi.shape, sizes.wo) == layout
        assert convert_wi(wi, layout, layout) is wi


@settings(deadline=None, max_examples=30)
@given(ANY_SIZES)
def test_nothing_is_copied_without_need(sizes):
    fused, split = numbered(sizes.wi(FUSED)), numbered(sizes.wi(SPLIT))
    assert np.shares_memory(convert_wi(fused, FUSED, SPLIT), fused)
    if not sizes.stack:
        assert np.shares_memory(convert_wi(split, SPLIT, FUSED), split)
        np.testing.assert_array_equal(convert_wi(fused, FUSED, SPLIT).ravel(), fused.ravel())


@settings(deadline=None, max_examples=40)
@given(ANY_SIZES)
def test_an_expert_lies_where_places_says(sizes):
    fused = numbered(sizes.wi(FUSED))
    matrices = fused.reshape(sizes.num_layers, sizes.num_experts, -1)
    for layout in (FUSED, SPLIT):
        flat = np.ascontiguousarray(convert_wi(fused, FUSED, layout)).reshape(-1, matrices.shape[-1])
        np.testing.assert_array_equal(
            flat[places(layout, sizes.num_layers, sizes.num_experts)].reshape(matrices.shape), matrices
        )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_experts_one_by_one_stack_into_columns(num_experts, hidden, inner):
    """Odd sizes too: only the split layout halves anything."""
    gate, up = numbered((num_experts, inner, hidden)), numbered((num_experts, inner, hidden), 1000)
    down = numbered((num_experts, hidden, inner), 2000)
    wi, wo = stack_experts(list(zip(gate, up, down, strict=True)))
    assert (wi.shape, wo.shape) == ((num_experts, hidden, 2 * inner), (num_experts, inner, hidden))
    for e, h, i in np.ndindex(num_experts, hidden, inner):
        assert wi[e, h, i] == gate[e, i, h]
        assert wi[e, h, inner + i] == up[e, i, h]
        assert wo[e, i, h] == down[e, h, i]
    for expert, parts in enumerate(unstack_experts(wi, wo)):
        for found, expected in zip(parts, (gate[expert], up[expert], down[expert]), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 4, 6), "halves the experts, and 3 is an odd number"),
        ((4, 3, 6), "halves the input of an expert, and its size 3 is odd"),
        ((5, 7, 2, 6), "halves the experts|halves the input"),
        ((4, 2, 5), r"fused layout is \[…, E, H, 2I\], not \[4, 2, 5\]"),
        ((4, 6), "fused layout is"),
    ],
)
def test_what_cannot_be_split_is_refused(shape, words):
    with pytest.raises(ConfigError, match=words):
        convert_wi(np.zeros(shape), FUSED, SPLIT)


@pytest.mark.parametrize("shape", [(3, 4, 2, 6), (2, 3, 2, 6), (2, 4, 2, 5), (4, 2, 6)])
def test_what_is_not_split_is_not_joined(shape):
    with pytest.raises(ConfigError, match="split layout is"):
        convert_wi(np.zeros(shape), SPLIT, FUSED)


def test_per_expert_is_not_a_wi():
    with pytest.raises(ConfigError, match="not per-expert"):
        convert_wi(np.zeros((2, 2, 2)), FUSED, PER_EXPERT)


@pytest.mark.parametrize(
    ("wi", "wo"), [((4, 6, 8), (4, 6, 4)), ((2, 4, 3, 8), (4, 6, 4)), ((4, 6, 8), (5, 4, 6)), ((8, 6), (4, 6))]
)
def test_wi_and_wo_of_different_experts_are_refused(wi, wo):
    with pytest.raises(ConfigError):
        find_layout(wi, wo)


@pytest.mark.parametrize(
    ("path", "routed"),
    [
        (["model", "layers", "0", "mlp", "experts"], True),
        (["params", "decoder", "MoeBlock_0"], True),
        (["params", "decoder", "mlp"], False),
        (["params", "decoder", "shared_experts"], False),
    ],
)
def test_routed_paths(path, routed):
    assert is_routed(path) is routed


class Moments(NamedTuple):
    count: np.ndarray
    mu: dict
    nu: dict


def state():
    """Parameters and an optimiser's state of two scanned layers."""

    def params(start):
        return {
            "embedding": numbered((4, 4), start),
            "MoeBlock_0": {"wi": numbered((2, 4, 6, 8), start), "wo": numbered((2, 4, 4, 6), start)},
            "shared_experts": {"wi": numbered((4, 6, 8), start)},
            "mlp": {"wi": numbered((2, 6, 8), start)},
            "decoder/moe/wi": numbered((4, 6, 8), start),
        }

    return {"params": params(0), "opt_state": [Moments(np.array(3), params(1000), params(2000)), (None,)]}


def test_an_optimiser_state_converts_like_its_parameters():
    before = state()
    split = convert_tree(before, FUSED, SPLIT)
    moments = split["opt_state"][0]
    assert isinstance(moments, Moments)
    assert isinstance(split["opt_state"][1], tuple)
    assert moments.count is before["opt_state"][0].count
    for new, old in (
        (split["params"], before["params"]),
        (moments.mu, before["opt_state"][0].mu),
        (moments.nu, before["opt_state"][0].nu),
    ):
        assert new["MoeBlock_0"]["wi"].shape == (2, 2, 4, 3, 8)
        np.testing.assert_array_equal(new["MoeBlock_0"]["wi"], convert_wi(old["MoeBlock_0"]["wi"], FUSED, SPLIT))
        assert new["decoder/moe/wi"].shape == (2, 4, 3, 8)
        assert new["MoeBlock_0"]["wo"] is old["MoeBlock_0"]["wo"]
        assert new["embedding"] is old["embedding"]
        assert new["shared_experts"]["wi"] is old["shared_experts"]["wi"]
        assert new["mlp"]["wi"] is old["mlp"]["wi"]
    back = convert_tree(split, SPLIT, FUSED)
    np.testing.assert_equal(back, before)


def test_a_leaf_that_cannot_convert_is_named():
    tree = {"nu": {"MoeBlock_0": {"wi": np.zeros((3, 4, 6))}}}
    with pytest.raises(ConfigError, match=r"nu\.MoeBlock_0\.wi cannot be converted: .*odd number"):
        convert_tree(tree, FUSED, SPLIT)


def test_the_command_offers_every_layout():
    assert command.LAYOUTS == LAYOUTS
