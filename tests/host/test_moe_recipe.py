"""Which training recipes are refused, with what words; what becomes of those that can run; and that the table of options is complete."""

import dataclasses
import logging
import re
from pathlib import Path

import pytest

from tpu_serve.config import ConfigError
from tpu_serve.layers.moe import recipe as module
from tpu_serve.layers.moe.recipe import PRESETS, RULES, Recipe, check, effective

SPLIT = {"weight_layout": "split"}
SIZES = {"num_experts": 128, "hidden": 2816}

IMPOSSIBLE = [
    ({"combine_kernel": "sparsecore"}, "--combine-kernel must be one of tc, onehot, xla, got 'sparsecore'."),
    ({"permute_kernel": "auto"}, "--permute-kernel must be one of tc, onehot, xla, got 'auto'."),
    ({"weight_layout": "per-expert"}, "--weight-layout must be one of fused, split, got 'per-expert'."),
    ({"quantization": "int4"}, "--quantization must be 'fp8', 'int8' or '', got 'int4'."),
    ({"grouped_matmul_version": 3}, "--grouped-matmul-version must be 1 or 2, got 3."),
    ({"num_embedding_chunks": -1}, "--num-embedding-chunks must be at least 0, got -1."),
    ({"fsdp_size": 0}, "--fsdp-size must be at least 1, got 0."),
    ({"context_parallel_size": 0}, "--context-parallel-size must be at least 1, got 0."),
    ({"expert_parallel_size": 0}, "--expert-parallel-size must be at least 1, got 0."),
    ({"num_experts": 0}, "--num-experts must be at least 1, got 0."),
    ({"hidden": 0}, "--hidden must be at least 1, got 0."),
    ({"sparse_matmul": 1}, "--sparse-matmul must be of type bool, got 1."),
    ({"num_experts": "128"}, "--num-experts must be of type int | None, got '128'."),
]


@pytest.mark.parametrize(("change", "message"), IMPOSSIBLE)
def test_values_that_no_recipe_has(change, message):
    with pytest.raises(ConfigError) as caught:
        Recipe(**change)
    assert str(caught.value) == message


# The change; what the message begins with; what it says to do.
REFUSED = [
    ({"sparse_matmul": False}, "sparse_matmul is False,", "Set sparse_matmul to True."),
    ({"grouped_matmul_version": 1}, "grouped_matmul_version is 1,", "Set grouped_matmul_version to 2."),
    ({"ring_of_experts": True}, "ring_of_experts is True,", "Set ring_of_experts to False, and with several devices"),
    ({"ragged_sort": True}, "ragged_sort is True,", "Set ragged_sort to False."),
    ({"direct_token_gather": False}, "direct_token_gather is False,", "Set direct_token_gather to True."),
    (
        {"prefused_gate_up": False},
        "prefused_gate_up is False,",
        "Set prefused_gate_up to True, with gate and up joined",
    ),
    ({"weights_on_input": True}, "weights_on_input is True,", "Set weights_on_input to False; with one expert"),
    ({"num_embedding_chunks": 4}, "num_embedding_chunks is 4,", "Set num_embedding_chunks to 0."),
    (
        {**SPLIT, "quantization": "fp8"},
        "quantization is 'fp8',",
        "Set quantization to '' or weight_layout to 'fused'.",
    ),
    (
        {**SPLIT, "expert_parallel_size": 8},
        "expert_parallel_size is 8,",
        "Set expert_parallel_size to 1 or weight_layout to 'fused'.",
    ),
    (
        {**SPLIT, "serving_attention": True},
        "serving_attention is True,",
        "Set serving_attention to False or weight_layout to 'fused'.",
    ),
    (
        {**SPLIT, "fsdp_size": 16},
        "shard_experts_on_fsdp is False with fsdp_size 16 and context_parallel_size 1,",
        "Set shard_experts_on_fsdp to True or weight_layout to 'fused'.",
    ),
    (
        {**SPLIT, "context_parallel_size": 2},
        "shard_experts_on_fsdp is False with fsdp_size 1 and context_parallel_size 2,",
        "Set shard_experts_on_fsdp to True or weight_layout to 'fused'.",
    ),
    ({**SPLIT, "num_experts": 127}, "num_experts is 127, an odd number,", "Set weight_layout to 'fused'."),
    ({**SPLIT, "hidden": 2817}, "hidden is 2817, an odd number,", "Set weight_layout to 'fused'."),
    (
        {"shard_experts_on_fsdp": True, "fsdp_size": 64, "context_parallel_size": 4},
        "fsdp_size 64 times context_parallel_size 4 is more than num_experts 128,",
        "Make fsdp_size smaller, or set shard_experts_on_fsdp to False and weight_layout to 'fused'.",
    ),
]


@pytest.mark.parametrize("kernels", [{}, {"combine_kernel": "tc", "permute_kernel": "tc"}])
@pytest.mark.parametrize(("change", "begin", "cure"), REFUSED)
def test_what_does_not_go_together(change, begin, cure, kernels):
    recipe = Recipe(**{**SIZES, **kernels, **change})
    with pytest.raises(ConfigError) as caught:
        check(recipe)
    message = str(caught.value)
    assert message.startswith(begin)
    assert cure in message
    assert "\n" not in message
    with pytest.raises(ConfigError, match=re.escape(message)):
        effective(recipe)


def test_every_rule_is_broken_by_one_of_those():
    found = set()
    for change, _, _ in REFUSED:
        recipe = Recipe(**{**SIZES, **change})
        found |= {number for number, rule in enumerate(RULES) if rule.applies(recipe) and not rule.holds(recipe)}
    assert found == set(range(len(RULES)))


def test_every_broken_rule_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check(Recipe(ring_of_experts=True, **SPLIT, quantization="int8", num_experts=3))
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "ring_of_experts",
        "quantization",
        "num_experts",
    ]


# Where the fused layout, or a size that fits, allows what the table above refuses.
ALLOWED = [
    {"quantization": "fp8"},
    {"expert_parallel_size": 8, "combine_kernel": "tc", "permute_kernel": "tc"},
    {"serving_attention": True},
    {"fsdp_size": 4096, "combine_kernel": "tc"},
    {"num_experts": 127, "hidden": 2817},
    {"shard_experts_on_fsdp": True, "fsdp_size": 64, "context_parallel_size": 2},
    {**SPLIT, "shard_experts_on_fsdp": True, "fsdp_size": 128},
    SPLIT,
]


@pytest.mark.parametrize("change", ALLOWED)
def test_what_goes_together(change):
    recipe = Recipe(**{**SIZES, **change})
    check(recipe)
    assert effective(recipe) == recipe


def test_sizes_that_are_not_known_yet_break_no_rule():
    check(Recipe(**SPLIT, shard_experts_on_fsdp=True, fsdp_size=4096))


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_the_permute_kernel_gives_way_to_quantised_tokens(quantization, caplog):
    module._log_downgrade.cache_clear()
    recipe = Recipe(permute_kernel="tc", combine_kernel="tc", quantization=quantization)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        for _ in range(2):
            assert effective(recipe) == dataclasses.replace(recipe, permute_kernel="xla")
    assert [record.getMessage() for record in caplog.records] == [
        f"MoE recipe: permute_kernel 'tc' becomes 'xla': {quantization} activations cannot be added up"
    ]
    onehot = dataclasses.replace(recipe, permute_kernel="onehot")
    assert effective(onehot) == onehot


def test_the_presets():
    combine, split = PRESETS["combine"], PRESETS["combine-permute-split"]
    assert set(PRESETS) == {"combine", "combine-permute-split"}
    assert (combine.combine_kernel, combine.permute_kernel, combine.weight_layout) == ("tc", "xla", "fused")
    assert (split.combine_kernel, split.permute_kernel, split.weight_layout) == ("tc", "tc", "split")
    for fsdp_size in (1, 128, 4096):
        assert effective(dataclasses.replace(combine, **SIZES, fsdp_size=fsdp_size)).combine_kernel == "tc"
    for fsdp_size in (1, 128):
        assert effective(dataclasses.replace(split, **SIZES, fsdp_size=fsdp_size)).permute_kernel == "tc"
    with pytest.raises(ConfigError, match="fsdp_size 256 times context_parallel_size 1 is more than num_experts 128"):
        check(dataclasses.replace(split, **SIZES, fsdp_size=256))


def test_options_and_presets_are_those_of_the_readme():
    readme = (Path(module.__file__).parent / "README.md").read_text()
    options, presets = (
        re.search(rf"\n## {name}\n(.*?)(\n## |$)", readme, re.DOTALL)[1] for name in ("Options", "Presets")
    )
    rows = re.findall(r"^\| `(\w+)`", options, re.MULTILINE)
    assert rows == [item.name for item in dataclasses.fields(Recipe)]
    assert all(item.metadata["help"] for item in dataclasses.fields(Recipe))
    assert re.findall(r"^\| `([\w-]+)`", presets, re.MULTILINE) == list(PRESETS)
