"""Declarations of weights that carry a number format."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tpu_serve.checkpoint.quantising import matrix_format
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import (
    ParamSpec,
    abstract,
    iterate,
    map_specs,
    num_bytes,
    num_bytes_per_device,
    num_params,
    padded,
    random_array,
    random_init,
)
from tpu_serve.device.quantised import QuantisedArray, num_bits
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS


def specs(format, dtype=jnp.bfloat16):
    """6 experts of 160 to 96 and back."""
    first, second = (None if format is None else matrix_format(FORMATS[format], is_down=at) for at in (False, True))
    return {
        "gate_up": ParamSpec(
            (6, 2, 160, 96), dtype, ("experts", None, "expert_hidden", "expert_inner"), (), format=first
        ),
        "down": ParamSpec((6, 96, 160), dtype, ("experts", "expert_inner", "expert_hidden"), (), format=second),
        "norm": ParamSpec((160,), dtype, (None,), (), scale=None),
    }


VALUES = 6 * 3 * 160 * 96


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (None, 2 * VALUES),
        ("fp8_channel", VALUES + 4 * 6 * (2 * 96 + 160)),
        ("fp8_block128", VALUES + 4 * 6 * (2 * 8 * 96 + 160)),  # two blocks of rows, filled up to eight, and one
        ("mxfp4", VALUES // 2 + 4 * 6 * (2 * 8 * 96 + 3 * 160)),
    ],
)
def test_bytes_are_those_of_the_arrays(format, expected):
    mesh = make_mesh(jax.devices()[:3])
    tree = specs(format)
    assert num_bytes(tree) == expected + 320
    assert num_bytes_per_device(tree, mesh, DEFAULT_RULES) == expected // 3 + 320
    assert num_params(tree) == VALUES + 160
    assert [path for path, _ in iterate(tree)] == ["gate_up", "down", "norm"]
    assert map_specs(lambda path, spec: path, tree) == {name: name for name in tree}
    if format != "mxfp4":  # NumPy has no half bytes
        arrays = jax.tree.leaves(random_init(tree, mesh, DEFAULT_RULES))
        assert sum(array.nbytes for array in arrays) == expected + 320


@pytest.mark.parametrize("format", [None, "fp8_block128", "int8_channel", "mxfp4"])
def test_abstract_arrays_are_those_of_the_random_ones(format):
    mesh = make_mesh(jax.devices()[:2])
    tree = padded(padded(specs(format), "experts", 4), "expert_inner", 128)
    real, described = random_init(tree, mesh, DEFAULT_RULES), abstract(tree, mesh, DEFAULT_RULES)
    assert jax.tree.structure(real) == jax.tree.structure(described)
    assert isinstance(described["down"], QuantisedArray) == (format is not None)
    for one, other in zip(jax.tree.leaves(real), jax.tree.leaves(described), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_random_weights_are_those_without_a_format_quantised():
    tree, mesh = specs("fp8_channel"), make_mesh(jax.devices()[:2])
    weight = random_init(tree, mesh, DEFAULT_RULES, seed=5)["gate_up"]
    plain = random_array("gate_up", specs(None)["gate_up"], 5).astype(np.float32)
    scale = np.abs(plain).max(axis=2, keepdims=True) / np.float32(448)
    np.testing.assert_array_equal(np.asarray(weight.scale), scale)
    np.testing.assert_array_equal(
        np.asarray(weight.values).view(np.uint8), (plain / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )


@pytest.mark.parametrize("format", [None, "mxfp4"])
def test_random_padding_is_empty_and_changes_nothing(format):
    mesh = make_mesh(jax.devices()[:1])
    tree = specs(format)
    larger = padded(padded(tree, "experts", 4), "expert_inner", 128)
    assert larger["gate_up"].given == (6, 2, 160, 96)
    assert larger["gate_up"].shape == (8, 2, 160, 128)
    assert padded(larger, "experts", 8) == larger
    one, other = random_init(tree, mesh, {}, 3), random_init(larger, mesh, {}, 3)
    for before, after in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        before, after = np.asarray(before), np.asarray(after)
        inside = tuple(map(slice, before.shape))
        np.testing.assert_array_equal(before, after[inside])
        outside = np.ones(after.shape, bool)
        outside[inside] = False
        filler = 1 if before.dtype == np.float32 else 0  # scales are the only float32 here
        assert (after[outside].astype(np.float32) == filler).all()


def test_padding_of_padding_remembers_what_was_given():
    spec = padded(padded({"x": ParamSpec((3, 5), jnp.float32, ("a", "b"), ())}, "a", 2), "b", 4)["x"]
    assert (spec.shape, spec.unpadded) == ((4, 8), (3, 5))


def test_matrices_are_not_cut_through():
    with pytest.raises(ValueError, match="would split quantised matrices along"):
        abstract(specs("fp8_channel"), make_mesh(jax.devices()[:2]), {"expert_inner": "model"})
    with pytest.raises(ValueError, match="quantised weights are stacks of matrices, not"):
        dataclasses.replace(specs("fp8_channel")["norm"], format=matrix_format(FORMATS["fp8_channel"], is_down=True))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("float32", 32),
        ("bfloat16", 16),
        ("float8_e4m3fn", 8),
        ("float4_e2m1fn", 4),
        ("int8", 8),
        ("int4", 4),
        ("bool", 8),
    ],
)
def test_bits_of_a_value(name, bits):
    assert num_bits(np.dtype(name) if hasattr(np, name) else getattr(ml_dtypes, name)) == bits
