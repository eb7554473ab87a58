"""The training layer against jax.grad of a dense one in float32: the presets on a simulated device, everything else by XLA, and what it refuses."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_reference import error, normal
from simulator import Simulation

from tpu_serve.checkpoint.layouts import FUSED, SPLIT, convert_wi
from tpu_serve.config import ConfigError
from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.moe_combine import op
from tpu_serve.layers.moe.recipe import PRESETS, SILU, LayerWeights, Recipe, layer
from tpu_serve.layers.moe.routing import Routing

CPU = cpu_chip()
T, E, H, N, K = 23, 4, 256, 128, 2  # 46 choices, so that rows have to be filled up; N is the intermediate size
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def inputs(dtype="float32"):
    """Tokens, ids, routing weights, fused wi, wo and the wanted result. Expert 2 has no rows, token 3 no expert, token 5 one."""
    ids = np.random.default_rng(0).permuted(np.tile([0, 1, 3], (T, 1)), axis=1)[:, :K].astype(np.int32)
    ids[3], ids[5, 0] = -1, -1
    shares = np.abs(normal(1, (T, K))) + np.float32(0.1)
    wi, wo = normal(2, (E, H, 2 * N), dtype, scale=H**-0.5), normal(3, (E, N, H), dtype, scale=N**-0.5)
    return normal(4, (T, H), dtype), ids, shares, wi, wo, normal(5, (T, H))


def mean_square(y, wanted):
    return jnp.mean((y.astype(jnp.float32) - wanted) ** 2)


@jax.jit
def dense(x, ids, shares, wi, wo, wanted):
    """Loss and gradients of every expert on every token, in float32; the activation is SiLU."""

    def loss(x, shares, wi, wo):
        chosen = jnp.sum(jax.nn.one_hot(ids, E) * shares[..., None], axis=1)  # [T, E]; no id -1
        products = jnp.einsum("th,ehn->ten", x, wi, precision="highest")
        inner = jax.nn.silu(products[..., :N]) * products[..., N:]
        return mean_square(jnp.einsum("tei,eih,te->th", inner, wo, chosen, precision="highest"), wanted)

    arrays = (one.astype(jnp.float32) for one in (x, shares, wi, wo))
    return jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays)


def through_layer(recipe, context, x, ids, shares, wi, wo, wanted, activation=SILU):
    """Loss and gradients of x, routing weights, wi as it is given, and wo."""

    def loss(x, shares, wi, wo):
        y = layer(recipe, context, x, Routing(shares, ids), LayerWeights(wi, wo), activation)
        assert y.dtype == x.dtype
        return mean_square(y, wanted)

    return jax.value_and_grad(loss, (0, 1, 2, 3))(x, shares, wi, wo)


def same(got, wanted, dtype):
    assert float(got[0]) == pytest.approx(float(wanted[0]), rel=TOLERANCE[dtype] / 10)
    for one, other in zip(got[1], wanted[1], strict=True):
        assert np.abs(other).max() > 1e-5
        assert error(one, other) < TOLERANCE[dtype]


def layouts_of(wi):
    """The fused wi in every form that the layer takes, and the recipe's name of the layout."""
    split = convert_wi(wi, FUSED, SPLIT)
    return {"fused": (FUSED, wi), "split": (SPLIT, split), "pair": (SPLIT, tuple(split))}


def as_fused(form, gradient):
    return gradient if form == "fused" else convert_wi(np.stack(gradient), SPLIT, FUSED)


def empty_where_nothing_goes(gradients):
    """Exactly zero for a token without experts, a choice that is none and an expert without rows."""
    dx, dshares, dwi, dwo = (np.asarray(one) for one in gradients)
    return not (dx[3].any() or dshares[inputs()[1] < 0].any() or dwi[2].any() or dwo[2].any())


@pytest.mark.parametrize(
    ("preset", "form", "dtype"), [("combine", "fused", "bfloat16"), ("combine-permute-split", "pair", "float32")]
)
def test_a_preset_with_its_kernels(preset, form, dtype):
    """Both orders of copies and races are tested for each kernel by itself; here the kernels work together."""
    x, ids, shares, fused, wo, wanted = inputs(dtype)
    _, wi = layouts_of(fused)[form]

    def run(interpret, *arrays):
        return through_layer(PRESETS[preset], Context(CPU, interpret), *arrays)

    op.fallbacks.clear()
    simulation = Simulation(run, detect_races=False)
    [(loss, (dx, dshares, dwi, dwo))] = simulation.run(x, ids, shares, wi, wo, wanted, modes=("on_wait",))
    assert not op.fallbacks
    assert jax.tree.map(np.shape, dwi) == jax.tree.map(np.shape, wi)
    gradients = (dx, dshares, as_fused(form, dwi), dwo)
    assert [one.dtype for one in gradients] == [jnp.dtype(name) for name in (dtype, "float32", dtype, dtype)]
    assert empty_where_nothing_goes(gradients)
    same((loss, gradients), dense(x, ids, shares, fused, wo, wanted), dtype)


@functools.cache
def by_xla(form, kernel, dtype):
    """Loss and gradients without simulation, those of wi in the fused layout."""
    x, ids, shares, fused, wo, wanted = inputs(dtype)
    layout, wi = layouts_of(fused)[form]
    run = jax.jit(functools.partial(through_layer, Recipe(kernel, kernel, layout), Context(CPU)))
    loss, (dx, dshares, dwi, dwo) = run(x, ids, shares, wi, wo, wanted)
    return loss, (dx, dshares, as_fused(form, dwi), dwo)


@pytest.mark.parametrize(
    ("form", "kernel", "dtype"),
    [
        ("fused", "xla", "float32"),
        ("split", "onehot", "float32"),
        ("pair", "xla", "float32"),
        ("pair", "onehot", "bfloat16"),
    ],
)
def test_gradients_by_xla(form, kernel, dtype):
    got = by_xla(form, kernel, dtype)
    assert empty_where_nothing_goes(got[1])
    same(got, dense(*inputs(dtype)), dtype)


def test_both_layouts_have_the_same_gradients():
    fused, pair = (by_xla(form, "xla", "float32") for form in ("fused", "pair"))
    assert fused[0] == pair[0]
    # Rows in two halves are two sums, of one half and zeros each; in which order a processor adds up is its own affair.
    for one, other in zip(fused[1], pair[1], strict=True):
        assert error(one, other) < TOLERANCE["float32"] / 10


def test_a_step_against_the_gradient_makes_the_loss_smaller():
    x, ids, shares, wi, wo, wanted = inputs()
    loss, (_, dshares, dwi, dwo) = by_xla("fused", "xla", "float32")
    rate = (
        0.05 * loss / sum(jnp.sum(one**2) for one in (dshares, dwi, dwo))
    )  # to take a twentieth away, were the loss a plane
    weights = LayerWeights(wi - rate * dwi, wo - rate * dwo)
    y = jax.jit(functools.partial(layer, Recipe(), Context(CPU)))(x, Routing(shares - rate * dshares, ids), weights)
    assert 0.9 * loss < mean_square(y, wanted) < 0.98 * loss


def test_experts_on_several_devices_are_added_up():
    """Also with the combine kernel's recipe: ids of -1 are all that expert parallelism asks of a device."""
    x, ids, shares, wi, wo, _ = inputs()
    whole = layer(Recipe(), Context(CPU), x, Routing(shares, ids), LayerWeights(wi, wo))
    recipe = dataclasses.replace(PRESETS["combine"], expert_parallel_size=2, num_experts=E)
    parts = []
    for first in (0, E // 2):
        own = slice(first, first + E // 2)
        here = np.where((ids >= own.start) & (ids < own.stop), ids - first, -1)
        parts.append(layer(recipe, Context(CPU), x, Routing(shares, here), LayerWeights(wi[own], wo[own])))
    assert all(np.abs(part).max() > 0.1 for part in parts)
    assert error(parts[0] + parts[1], whole) < 1e-6


def test_the_activation_is_the_callers():
    x, ids, shares, wi, wo, _ = inputs()
    got = layer(Recipe(), Context(CPU), x, Routing(shares, ids), LayerWeights(wi, wo), Activation("gelu_tanh"))
    products = jnp.einsum("th,ehn->ten", x, wi, precision="highest")
    inner = jax.nn.gelu(products[..., :N], approximate=True) * products[..., N:]
    chosen = jnp.sum(jax.nn.one_hot(ids, E) * shares[..., None], axis=1)
    assert error(got, jnp.einsum("tei,eih,te->th", inner, wo, chosen, precision="highest")) < 1e-5


def call(recipe=None, *, wi=(E, H, 2 * N), wo=(E, N, H), x=(T, H), dtype="float32", x_dtype="float32"):
    """Traces the layer with arrays of these shapes; wi may be a pair."""
    pair = tuple(jax.ShapeDtypeStruct(one, dtype) for one in wi) if isinstance(wi[0], tuple) else None
    weights = LayerWeights(pair or jax.ShapeDtypeStruct(wi, dtype), jax.ShapeDtypeStruct(wo, "float32"))
    routing = Routing(jax.ShapeDtypeStruct((T, K), "float32"), jax.ShapeDtypeStruct((T, K), "int32"))
    run = functools.partial(layer, recipe or Recipe(), Context(CPU))
    return jax.eval_shape(run, jax.ShapeDtypeStruct(x, x_dtype), routing, weights)


HALF = (E, H // 2, 2 * N)
PLAIN_SPLIT = Recipe(weight_layout="split")


def test_what_fits_is_taken():
    for recipe, wi in ((None, (E, H, 2 * N)), (PLAIN_SPLIT, (2, *HALF)), (PLAIN_SPLIT, (HALF, HALF))):
        assert call(recipe, wi=wi).shape == (T, H)
    assert call(Recipe(num_experts=2 * E, hidden=H, expert_parallel_size=2)).shape == (T, H)


WRONG_SHAPES = [
    ({"wo": (E, N)}, r"wo must be \[E, I, H\], got \[4, 128\]"),
    ({"wi": (2, *HALF)}, r"fused layout must be float32 \[4, 256, 256\] .* got float32\[2, 4, 128, 256\]"),
    ({"wi": (HALF, HALF)}, r"fused layout must be .* got float32\[4, 128, 256\] and float32\[4, 128, 256\]"),
    ({"wi": (E, H, N)}, r"got float32\[4, 256, 128\]"),
    ({"dtype": "bfloat16"}, r"must be float32 .* got bfloat16\[4, 256, 256\]"),
    (
        {"recipe": PLAIN_SPLIT},
        r"split layout must be float32 \[2, 4, 128, 256\] or \[4, 128, 256\] and \[4, 128, 256\]",
    ),
    ({"recipe": PLAIN_SPLIT, "wi": (HALF,)}, r"got float32\[4, 128, 256\]"),
    ({"x": (T, H // 2)}, r"x must be float32\[T, 256\], got float32\[23, 128\]"),
    ({"x": (1, T, H)}, r"x must be float32\[T, 256\], got float32\[1, 23, 256\]"),
    ({"x_dtype": "bfloat16"}, r"x must be float32\[T, 256\], got bfloat16"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_SHAPES)
def test_arrays_that_do_not_belong_together(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(**change)
    assert not isinstance(caught.value, ConfigError)


REFUSED = [
    (
        {"recipe": Recipe(num_experts=E + 1)},
        "num_experts is 5 in the recipe and 4 by the weights. Set num_experts to 4.",
    ),
    ({"recipe": Recipe(num_experts=E, expert_parallel_size=2)}, "num_experts is 4 in the recipe and 8 by the weights"),
    ({"recipe": Recipe(hidden=128)}, "hidden is 128 in the recipe and 256 by the weights"),
    (
        {"recipe": Recipe(quantization="int8")},
        "quantization is int8, but this layer's products are of bfloat16 or float32",
    ),
    ({"recipe": Recipe(ring_of_experts=True)}, "ring_of_experts is True"),
    ({"recipe": PLAIN_SPLIT, "wi": (2, 3, 128, 256), "wo": (3, N, H)}, "num_experts is 3, an odd number"),
    (
        {"recipe": Recipe(fsdp_size=8, shard_experts_on_fsdp=True)},
        "fsdp_size 8 times context_parallel_size 1 is more than",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_recipe_is_checked_with_the_sizes_of_the_weights(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        call(**change)
