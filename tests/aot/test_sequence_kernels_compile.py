"""The TPU compiler accepts the kernels that mix tokens, attention and the gated delta rule, for real layers as devices share them out, and caches
and states stay where they lie."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tpu_serve.bench.compiled.compiler import compile_here, scoped_vmem_bytes
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.device.batch import Batch
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.device.quantised import QuantisedArray
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.gated_delta_rule.op import gated_delta_rule
from tpu_serve.kernels.ragged_paged_attention.cases import problem
from tpu_serve.kernels.ragged_paged_attention.config import heuristic, supports, vmem_bytes
from tpu_serve.kernels.ragged_paged_attention.op import ragged_paged_attention

pytestmark = pytest.mark.aot
NUM_PAGES = 4000


def arrays(chip):
    sharding = SingleDeviceSharding(target_devices(topology(chip, 1))[0])
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


@pytest.mark.parametrize(
    ("chip", "name", "num_devices", "num_tokens", "num_rows", "max_pages", "stored"),
    [
        ("v6e", "Qwen3-30B-A3B", 4, 64, 64, 2048, None),  # more page numbers than scalar memory holds
        ("tpu7x", "Qwen3.5-397B-A17B", 2, 2048, 128, 64, "float8_e4m3fn"),
        ("tpu7x", "Gemma4-26B-A4B global", 2, 64, 64, 64, None),
        ("v5e", "GPT-OSS-120B local", 8, 64, 64, 64, "int8"),
    ],
)
def test_attention(chip, name, num_devices, num_tokens, num_rows, max_pages, stored):
    p, array = problem(name, num_devices, num_tokens, num_rows, max_pages, stored), arrays(chip)
    assert supports(p, TPU_CHIPS[chip]) is None

    def run(q, k, v, values, scale, sinks, **fields):
        batch = Batch(**{item.name: None for item in dataclasses.fields(Batch)} | fields)
        cache = values if stored is None else QuantisedArray(values, scale)
        context = Context(TPU_CHIPS[chip])
        return ragged_paged_attention(q, k, v, cache, batch, 0.1, context=context, window=p.window, sinks=sinks)

    integers = {
        "page_table": (1, num_rows, max_pages), "cu_q_lens": (num_rows + 1,), "kv_lens": (num_rows,), "kv_index": (1, num_tokens),
        "num_tokens": (), "num_seqs": (),
    }  # fmt: skip
    kv = array((num_tokens, p.num_kv_heads, p.head_dim), p.dtype)
    args = [
        array((num_tokens, p.num_heads, p.head_dim), p.dtype), kv, kv,
        array((NUM_PAGES, p.num_kv_heads, p.page_size, p.lanes), p.cache_dtype),
        None if stored is None else array((NUM_PAGES, p.num_kv_heads, 2, p.page_size), "float32"),
        array((p.num_heads,), "float32") if p.has_sinks else None,
    ]  # fmt: skip
    fields = {name: array(shape, "int32") for name, shape in integers.items()}
    made = compile_here(lambda *args: run(*args[:-1], **args[-1]), [*args, fields], donate_argnums=(3, 4))
    assert made.error is None
    cache_bytes = NUM_PAGES * p.num_kv_heads * p.page_size * p.lanes * jnp.dtype(p.cache_dtype).itemsize
    assert made.alias_bytes >= cache_bytes, "the cache is written where it lies"
    assert made.temporary_bytes < cache_bytes / 4, "and not copied"
    limit = vmem_bytes(p, heuristic(p, TPU_CHIPS[chip])) + MIB
    assert max(scoped_vmem_bytes(made.text).values()) <= limit


@pytest.mark.parametrize(("chip", "num_tokens", "num_rows"), [("v6e", 64, 64), ("tpu7x", 2048, 64), ("v5e", 64, 64)])
def test_gated_delta_rule(chip, num_tokens, num_rows):
    """Of Qwen3.5-397B-A17B on 8 devices."""
    array, key_heads, value_heads, size, num_states = arrays(chip), 2, 8, 128, 600

    def tokens(heads, *more, dtype="bfloat16"):
        return array((num_tokens, heads, *more), dtype)

    args = [
        tokens(key_heads, size), tokens(key_heads, size), tokens(value_heads, size), tokens(value_heads, dtype="float32"),
        tokens(value_heads, dtype="float32"), array((num_states, value_heads, size, size), "float32"),
        array((num_rows + 1,), "int32"), *[array((num_rows,), "int32")] * 3,
    ]  # fmt: skip
    made = compile_here(lambda *args: gated_delta_rule(Context(TPU_CHIPS[chip]), *args), args, donate_argnums=5)
    assert made.error is None
    pool_bytes = num_states * value_heads * size * size * 4
    assert made.alias_bytes >= pool_bytes, "states are written where they lie"
    assert made.temporary_bytes < pool_bytes / 4, "and not copied"
