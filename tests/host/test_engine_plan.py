"""Sizes of an engine, and what is refused before any weight is read."""

import jax.numpy as jnp
import pytest

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.config.engine import LONGEST_THAT_FITS
from tpu_serve.device.chip import GIB, TPU_CHIPS, Chip
from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.engine.plan import make_plan
from tpu_serve.runner.buckets import pick, token_buckets

CPU = Chip("cpu", 16 * GIB, page_size=16, max_num_seqs=64, max_num_batched_tokens=256, bucket_growth=4)
LAYOUT = CacheLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=32, dtype=jnp.bfloat16)  # 1 KiB a token


def plan(chip=CPU, model_max_len=2048, vocab_size=1000, param_bytes=GIB, layout=LAYOUT, **options):
    return make_plan(EngineConfig.from_options(**options), model_max_len, vocab_size, param_bytes, layout, chip)


def test_defaults_follow_the_chip():
    made = plan()
    assert (made.max_model_len, made.page_size, made.max_num_seqs, made.max_num_batched_tokens) == (2048, 16, 64, 256)
    assert made.num_pages[0] == 64 * 128 + 1, "as much as all sequences can use, and the padding page"
    assert made.max_num_queued == 16 * 64
    assert made.buckets == (8, 32, 128, 256)
    made = plan(TPU_CHIPS["v6e"])
    assert (made.page_size, made.max_num_seqs, made.buckets[0], made.buckets[-1]) == (128, 128, 8, 2048)


def test_small_models_get_fewer_programs_on_a_cpu_only():
    assert plan(param_bytes=3_000_000).buckets == (8, 256)
    assert plan(TPU_CHIPS["v6e"], param_bytes=3_000_000).buckets == plan(TPU_CHIPS["v6e"]).buckets


def test_memory_for_the_cache():
    page = LAYOUT.page_bytes(16)
    assert page == 16 * 1024
    assert plan(kv_cache_memory_bytes=300 * page).num_pages[0] == 300
    assert plan(num_pages=200).num_pages[0] == 200
    big = CacheLayout.uniform(48, 4, 128, jnp.bfloat16)
    made = plan(TPU_CHIPS["v6e"], 40960, 150_000, 20 * GIB, big)
    of_sampler = 256 * (150_000 * 2 + 512 * 12)  # two slots for each of 128 sequences
    assert made.sampler_bytes == of_sampler
    assert made.num_pages[0] == int(32 * GIB * 0.9 - 20 * GIB - of_sampler) // big.page_bytes(128)
    made = plan(CPU, 40960, 1000, GIB, big)
    assert made.num_pages[0] == 4 * GIB // big.page_bytes(16), "a quarter of a CPU host's memory at most"


def test_the_longest_sequences_that_fit():
    auto = {"max_model_len": LONGEST_THAT_FITS}
    assert plan(**auto) == plan()
    for num_pages in (2, 3, 50, 128, 129):
        made = plan(num_pages=num_pages, **auto)
        assert made.max_model_len == min(2048, (num_pages - 1) * 16)
        assert made == plan(num_pages=num_pages, max_model_len=made.max_model_len)
        if made.max_model_len < 2048:
            with pytest.raises(ConfigError, match="One sequence of --max-model-len"):
                plan(num_pages=num_pages, max_model_len=made.max_model_len + 1)
    assert plan(model_max_len=2000, **auto).max_model_len == 2000
    page = LAYOUT.page_bytes(16)
    assert plan(kv_cache_memory_bytes=100 * page, **auto).max_model_len == 99 * 16
    with pytest.raises(ConfigError, match="One sequence of --max-model-len 16 tokens"):
        plan(kv_cache_memory_bytes=page, **auto)
    with pytest.raises(ConfigError, match="The weights need"):
        plan(param_bytes=17 * GIB, **auto)


def test_one_limit_given_moves_the_other_ones_default():
    assert plan(max_num_batched_tokens=16).max_num_seqs == 16
    assert plan(max_num_seqs=1000).max_num_batched_tokens == 1000
    assert plan(max_num_seqs=3).layouts(6, 8)[-1].num_rows == 3


def test_layouts():
    made = plan(max_model_len=100, page_size=16)
    small, *_, large = made.layouts(num_slots=128, pages_per_block=8)
    assert (small.num_tokens, small.num_rows, small.max_pages) == (8, 8, 8), "7 pages, rounded up to whole blocks"
    assert (large.num_tokens, large.num_rows) == (256, 64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 4096}, "--max-model-len 4096 is more than the model's own limit of 2048"),
        (
            {"max_num_seqs": 32, "max_num_batched_tokens": 16},
            "--max-num-seqs 32 is more than --max-num-batched-tokens 16",
        ),
        (
            {"param_bytes": 15 * GIB},
            r"weights need 15.00 GiB.*has 16.00 GiB.*--device-memory-utilization 0.9 leaves 14.40",
        ),
        (
            {"num_pages": 128},
            r"needs 128 pages of 16 tokens.*--num-pages 128 gives 128. Use --max-model-len 2032 or less",
        ),
        ({"kv_cache_memory_bytes": 2**20}, r"--kv-cache-memory-bytes gives 64. Use --max-model-len 1008 or less"),
        ({"kv_cache_memory_bytes": 1000}, r"--kv-cache-memory-bytes gives 0. Use more memory."),
        ({"param_bytes": 9 * GIB, "device_memory_utilization": 0.5}, r"0.5 leaves 8.00 GiB"),
        (
            {"vocab_size": 10**8},
            r"biases of 128 slots .two for each of --max-num-seqs 64. need 23.84 GiB.*weights 13.40 GiB are free. Lower --max-num-seqs",
        ),
        ({"num_pages": 900_000}, r"needs 13.73 GiB \(--num-pages 900000\); beside the weights 13.40 GiB are free"),
        ({"num_pages": 2_000_000}, r"2000000 pages needs 30.52 GiB.*beside the weights 13.40 GiB are free"),
        (
            {"token_buckets": (8, 64), "max_num_batched_tokens": 512},
            "--token-buckets must end at --max-num-batched-tokens, which is 512; the last one is 64",
        ),
    ],
)
def test_impossible_configurations_say_number_and_flag(options, words):
    with pytest.raises(ConfigError, match=words):
        plan(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": "4"},
        {"max_num_seqs": True},
        {"page_size": 16.0},
        {"num_pages": 33.5},
        {"max_model_len": "64"},
        {"kv_cache_memory_bytes": "1g"},
        {"device_memory_utilization": "0.5"},
        {"enable_prefix_caching": "false"},
        {"token_buckets": 8},
        {"hf_overrides": "{}"},
        {"seed": "x"},
        {"model": None},
    ],
)
def test_options_of_the_wrong_type_are_refused_by_name(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be"):
        EngineConfig.from_options(**options)


def test_options_take_what_their_type_says():
    EngineConfig.from_options(
        device_memory_utilization=1, token_buckets=[8, 16], hf_overrides={}, seed=-1, tokenizer=None
    )


def test_token_buckets():
    assert token_buckets(512, 8, 4) == (8, 32, 128, 512)
    assert token_buckets(500, 8, 4) == (8, 32, 128, 500), "the last one is the budget exactly"
    assert token_buckets(5, 8, 2) == (5,)
    assert token_buckets(8, 8, 2) == (8,)
    assert token_buckets(256, 2, 8) == (2, 16, 128, 256)
    assert token_buckets(64, 8, 2, (3, 64)) == (3, 64)
    assert [pick((8, 32, 100), n) for n in (1, 8, 9, 32, 33, 100)] == [8, 8, 32, 32, 100, 100]
