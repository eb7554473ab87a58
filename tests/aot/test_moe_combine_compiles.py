"""The TPU compiler accepts the kernels of combine and permute for real layers as they are cut there, and copies no rows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tpu_serve.bench.compiled.compiler import compile_here, scoped_vmem_bytes
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.moe_combine import gather, scatter
from tpu_serve.kernels.moe_combine.cases import OPERATIONS, problem
from tpu_serve.kernels.moe_combine.op import Choice, combine, permute
from tpu_serve.kernels.moe_combine.problem import Config, Problem, granule, heuristic, round_up, supported, vmem_bytes

pytestmark = pytest.mark.aot


@functools.cache
def device(chip):
    return target_devices(topology(chip, 1))[0]


def array(chip, shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(device(chip)))


def compiled(p, chip, operation, config=None):
    """Of one operation; rows behind the last choice's are zeroed where they are written."""
    context = Context(TPU_CHIPS[chip])
    assert supported(p, context.chip, operation) is None
    config = config or heuristic(p, context.chip, operation)
    row = (p.hidden,) if p.align > 1 else (p.row_lanes, 128)
    rows, tokens = array(chip, (p.num_rows, *row), p.dtype), array(chip, (p.num_tokens, p.hidden), p.dtype)
    ids = array(chip, (p.num_tokens, p.top_k), "int32")
    weights = [] if p.weight_dtype is None else [array(chip, ids.shape, p.weight_dtype)]

    def run(values, ids, *more):
        weights = more[0] if more else None
        if operation == "combine":
            return gather.sums(p, config, context, values, ids, weights)
        if operation == "dots":
            return gather.dots(p, config, context, values, ids, weights)
        return scatter.scattered(p, config, context, values, ids, weights, zero_rest=True)

    more = [tokens] if operation == "dots" else weights
    made = compile_here(run, [tokens if operation == "permute" else rows, ids, *more])
    assert made.error is None, made.error
    assert kernels(made) == 1
    return made


def kernels(made):
    return len(re.findall(r'custom_call_target="tpu_custom_call"', made.text))


def small(chip, dtype="bfloat16", weight_dtype="float32", num_tokens=300, top_k=3, num_experts=13, hidden=640, **more):
    """Neither tokens, experts nor panels come out even."""
    align = granule(dtype, TPU_CHIPS[chip])
    rows = round_up(num_tokens * top_k, 32)
    return Problem(num_tokens, top_k, num_experts, rows, hidden, dtype, weight_dtype, align, **more)


@pytest.mark.parametrize(
    ("workload", "chip", "operation"),
    [
        ("Qwen3-30B-A3B", "v5e", "permute"),
        ("Gemma4-26B-A4B", "v6e", "combine"),
        ("GPT-OSS-120B", "tpu7x", "combine"),
        ("GPT-OSS-120B", "tpu7x", "permute"),
        ("GPT-OSS-120B", "tpu7x", "dots"),
    ],
)
def test_layers_of_real_models(workload, chip, operation):
    made = compiled(problem(TPU_CHIPS[chip], operation, workload, 2048), chip, operation)
    # Tables, ids and weights the other way around. The rows are a hundred times as much.
    assert made.temporary_bytes < 2 * MIB


@pytest.mark.parametrize(
    ("chip", "operation", "dtype", "weight_dtype", "more"),
    [
        ("v6e", "combine", "float32", "float32", {}),
        ("tpu7x", "combine", "bfloat16", "bfloat16", {"out_dtype": "float32"}),
        ("v5e", "permute", "bfloat16", "float32", {}),
        ("v5e", "permute", "int8", None, {}),
        ("v6e", "permute", "float8_e4m3fn", None, {}),
        ("v6e", "permute", "float8_e5m2", None, {}),
        ("tpu7x", "permute", "float8_e4m3fn", None, {}),
    ],
)
def test_types(chip, operation, dtype, weight_dtype, more):
    compiled(small(chip, dtype, weight_dtype, **more), chip, operation, Config(128, 256))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_a_single_token(chip, operation):
    weight_dtype = None if operation == "dots" else "bfloat16"
    compiled(small(chip, "bfloat16", weight_dtype, 1, 1, 1, 128), chip, operation)


def test_rows_that_lie_for_themselves():
    p = dataclasses.replace(small("v6e"), align=1, row_lanes=8)
    assert compiled(p, "v6e", "combine").temporary_bytes < 2 * MIB


@pytest.mark.parametrize(
    ("chip", "operation", "dtype"),
    [
        ("v6e", "combine", "float32"),
        ("v6e", "permute", "bfloat16"),
        ("v6e", "dots", "bfloat16"),
        ("tpu7x", "permute", "float32"),
    ],
)
def test_vmem_that_the_compiler_takes_is_counted(chip, operation, dtype):
    p, config = small(chip, dtype, None, hidden=1024), Config(256, 512)
    needed = max(scoped_vmem_bytes(compiled(p, chip, operation, config).text).values())
    assert needed <= vmem_bytes(p, config, operation)


def test_gradients_recomputed_in_a_loop():
    """One kernel for each operation of a layer, whatever the number of layers: rows of a layer, their sums, the two gradients."""
    chip, layers, num_tokens, top_k, hidden = "v6e", 4, 1024, 4, 512
    choice = Choice("tc", Context(TPU_CHIPS[chip]), 32)

    @jax.checkpoint
    def layer(tokens, ids, weights):
        rows = permute(tokens, ids, choice, num_tokens * top_k)
        return combine(rows * jnp.bfloat16(2), ids, weights, choice)

    def loss(tokens, ids, weights):
        out, _ = jax.lax.scan(lambda x, one: (layer(x, *one), None), tokens, (ids, weights))
        return jnp.sum(out.astype(jnp.float32))

    made = compile_here(
        jax.grad(loss, (0, 2)),
        [
            array(chip, (num_tokens, hidden), "bfloat16"),
            array(chip, (layers, num_tokens, top_k), "int32"),
            array(chip, (layers, num_tokens, top_k), "float32"),
        ],
    )
    assert made.error is None, made.error
    # Forward two; backward the rows once more, the gradients of the rows and of the weights, and that of the tokens.
    assert kernels(made) == 6
