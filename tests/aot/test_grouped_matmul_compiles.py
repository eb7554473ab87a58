"""The TPU compiler accepts the grouped products of real layers, copies no weight and nothing that is written in place."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tpu_serve.bench.compiled.compiler import compile_here
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.grouped_matmul.config import Config, check
from tpu_serve.kernels.grouped_matmul.forward import multiply
from tpu_serve.kernels.grouped_matmul.op import grouped_gate_up, grouped_matmul
from tpu_serve.kernels.grouped_matmul.problem import Problem
from tpu_serve.kernels.grouped_matmul.split import grouped_matmul_split, keep_boundary

pytestmark = pytest.mark.aot


@functools.cache
def device(chip):
    return target_devices(topology(chip, 1))[0]


def array(chip, shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(device(chip)))


def compiled(function, *args, **options):
    made = compile_here(function, args, **options)
    assert made.error is None, made.error
    return made


def is_a_kernel(made, count=1):
    return len(re.findall(r'custom_call_target="tpu_custom_call"', made.text)) == count


# Experts, hidden, intermediate; both filled up to multiples of 128.
LAYERS = {
    "Qwen3-30B": (128, 2048, 768),
    "Gemma4": (128, 2816, 768),
    "GPT-OSS": (128, 2944, 2944),
    "Qwen3-480B": (160, 6144, 2560),
}


@pytest.mark.parametrize("rows", [256, 16384])
@pytest.mark.parametrize(
    ("name", "chip"),
    [("Qwen3-30B", "v5e"), ("Qwen3-30B", "tpu7x"), ("Gemma4", "v6e"), ("GPT-OSS", "tpu7x"), ("Qwen3-480B", "v6e")],
)
def test_both_products_of_real_layers(name, chip, rows):
    experts, hidden, inner = LAYERS[name]
    context = Context(TPU_CHIPS[chip])

    def layer(x, gate_up, down, sizes):
        hidden_rows = grouped_gate_up(x, gate_up, sizes, Activation("swigluoai"), context)
        return grouped_matmul(hidden_rows, down, sizes, context, out_dtype="float32")

    made = compiled(
        layer,
        array(chip, (rows, hidden)),
        array(chip, (experts, 2, hidden, inner)),
        array(chip, (experts, inner, hidden)),
        array(chip, (experts,), "int32"),
    )
    assert is_a_kernel(made, 2)
    assert made.temporary_bytes < 2 * MIB + rows * inner * 2  # the values between the products, and tables


@pytest.mark.parametrize(("chip", "rows"), [("v5e", 1000), ("v6e", 16384), ("tpu7x", 256)])
def test_gradients_of_a_real_layer(chip, rows):
    experts, hidden, inner = LAYERS["Qwen3-30B"]
    context = Context(TPU_CHIPS[chip])

    def pull(x, gate_up, sizes, dout):
        return jax.vjp(lambda *both: grouped_gate_up(*both, sizes, Activation(), context), x, gate_up)[1](dout)

    made = compiled(
        pull,
        array(chip, (rows, hidden)),
        array(chip, (experts, 2, hidden, inner)),
        array(chip, (experts,), "int32"),
        array(chip, (rows, inner)),
    )
    assert is_a_kernel(made, 3)
    # Float32 products, their gradients, and rows; a transposed copy of the weights would be 800 MB.
    assert made.temporary_bytes < 2 * MIB + rows * (2 * inner * (4 + 4 + 2) + hidden * 4)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
def test_float32_and_rows_that_fill_no_tile(chip):
    context = Context(TPU_CHIPS[chip])

    def everything(x, gate_up, down, sizes, dout):
        def layer(x, gate_up, down):
            rows = grouped_gate_up(x, gate_up, sizes, Activation("gelu"), context, group_offset=sizes[0])
            return grouped_matmul(rows, down, sizes, context, group_offset=sizes[0])

        out, pull = jax.vjp(layer, x, gate_up, down)
        return out, pull(dout)

    made = compiled(
        everything,
        array(chip, (41, 256), "float32"),
        array(chip, (4, 2, 256, 384), "float32"),
        array(chip, (4, 384, 256), "float32"),
        array(chip, (9,), "int32"),
        array(chip, (41, 256), "float32"),
    )
    assert is_a_kernel(made, 2 + 3 + 2)


def copies(made, rows, columns):
    """Copies of arrays of this shape."""
    return re.findall(rf"= \w+\[(?:1,)?{rows},{columns}\]\S* copy(?:-start)?\(", made.text)


@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_two_halves_write_one_result_without_a_copy(chip):
    experts, hidden, columns, rows = 64, 2048, 1536, 16384
    half = array(chip, (experts, hidden // 2, columns))
    context = Context(TPU_CHIPS[chip])
    made = compiled(
        lambda x, low, high, sizes: grouped_matmul_split(x, (low, high), sizes, context),
        array(chip, (rows, hidden)),
        half,
        half,
        array(chip, (experts,), "int32"),
    )
    assert is_a_kernel(made, 2)
    assert not copies(made, rows, columns)
    assert made.temporary_bytes < 2 * MIB
    assert made.output_bytes < 1.01 * rows * columns * 2


@pytest.mark.parametrize("use", ["only the second", "both", "boundary kept"])
def test_a_result_is_copied_only_where_it_is_used_twice(use):
    """Putting rows of the first result back does not count as a use: they are saved before the second product begins."""
    chip, experts, rows, columns = "v6e", 8, 4096, 512
    context = Context(TPU_CHIPS[chip])

    def chained(x, low, high, sizes):
        def second(first):
            return grouped_matmul(x, high, sizes, context, group_offset=experts, existing=first)

        first = grouped_matmul(x, low, sizes, context)
        if use == "boundary kept":
            return keep_boundary(first, jnp.sum(sizes[:experts], dtype=jnp.int32), 32, second)
        return (second(first), first) if use == "both" else second(first)

    weights = array(chip, (experts, 256, columns))
    made = compiled(chained, array(chip, (rows, 256)), weights, weights, array(chip, (2 * experts,), "int32"))
    assert is_a_kernel(made, 2)
    assert len(copies(made, rows, columns)) == (use == "both")


def test_an_existing_array_is_written_in_place():
    chip, rows, columns = "v6e", 16384, 2048
    context = Context(TPU_CHIPS[chip])

    def product(x, weights, sizes, existing):
        return grouped_matmul(x, weights, sizes, context, group_offset=4, existing=existing)

    made = compiled(
        product,
        array(chip, (rows, 768)),
        array(chip, (16, 768, columns)),
        array(chip, (32,), "int32"),
        array(chip, (rows, columns)),
        donate_argnums=(3,),
    )
    assert is_a_kernel(made)
    assert made.alias_bytes == rows * columns * 2
    assert made.temporary_bytes < 2 * MIB


def test_the_largest_legal_tiles_fit():
    """What `vmem_bytes` counts is what the compiler needs, at the edge of what `check` allows."""
    chip = TPU_CHIPS["tpu7x"]
    for dtype, activation in (("bfloat16", Activation()), ("float32", None)):
        legal, config = [], Config(64, 512, 3)
        for hidden in range(1024, 16384, 128):
            problem = Problem(1000, 8, hidden, 1024, dtype, None, 2, activation)
            if check(problem, config, chip) is None:
                legal.append(problem)
        problem = legal[-1]
        compiled(
            lambda x, weights, sizes, problem=problem: multiply(
                problem, Config(64, 512, 3), Context(chip), x, weights, sizes, 0
            ),
            array("tpu7x", (1, 1000, problem.n_in), dtype),
            array("tpu7x", (8, 2, problem.n_in, 1024), dtype),
            array("tpu7x", (8,), "int32"),
        )
