"""The decode step of published models with a layer of each kind, two at least, as libtpu compiles it for the slices they are meant for: it compiles,
takes the memory that was planned, sends what the layers must, and runs the kernels of the plan.

All layers and more steps are in docs/tpu_programs.md, which `tpu-serve bench models` writes. Two models differ from others only in sizes or
in the slice; their programs are made but not compiled, which would take another minute.
"""

import re
from collections import Counter

import pytest

from tpu_serve.bench.compiled.collectives import collectives
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.bench.models.cells import all_layers
from tpu_serve.bench.models.published import MODELS
from tpu_serve.bench.models.step import DECODE, Step
from tpu_serve.bench.models.target import make
from tpu_serve.device.chip import MIB

pytestmark = pytest.mark.aot

STEP = Step.of(DECODE, 8)
DENSE_SUM = {"mlp": 2}
"""Of what stands beside the experts, whose kernel adds up its own."""
COMPILED = {
    "Qwen3-30B-A3B": ({"ragged_paged_attention": 2}, {"attention": 2}),
    "Qwen3.5-397B-A17B-FP8": (
        {"ragged_paged_attention": 1, "gated_delta_rule": 1},
        {"attention": 1, "delta_net": 1} | DENSE_SUM,
    ),
    "gemma-4-26B-A4B": ({"ragged_paged_attention": 2}, {"attention": 2} | DENSE_SUM),
    "gpt-oss-120b": ({"ragged_paged_attention": 2}, {"attention": 2}),
}
"""Of each the kernels beside that of the experts, and the sums over all devices by what they belong to, the embedding's left out."""
LOWERED = [(model, one) for model in MODELS for one in MODELS[model] if (model, one) != (model, MODELS[model][0])]
LOWERED += [("Qwen3-Coder-480B-A35B-FP8", MODELS["Qwen3-Coder-480B-A35B-FP8"][0])]


def made(model, place):
    kinds = list(dict.fromkeys(all_layers(model)))
    layers = kinds if len(kinds) > 1 else kinds * 2
    target = make(target_devices(topology(place.chip, place.num_devices)), model, STEP, layers)
    assert target.moe.way.startswith("fused "), target.moe.reason
    return target, {f"fused_moe_{target.moe.way.removeprefix('fused ').lower()}": 2}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", COMPILED)
def test_two_layers_compile_as_planned(model):
    place = MODELS[model][0]
    target, kernels = made(model, place)
    beside, sums = COMPILED[model]
    compiled = target.programs.lower(STEP.num_tokens).compile()
    text, memory, plan = compiled.as_text(), compiled.memory_analysis(), target.plan

    kept = plan.sampler_bytes + plan.cache_bytes
    planned = target.design.param_bytes + kept
    assert planned <= memory.argument_size_in_bytes <= 1.0002 * planned + MIB
    assert memory.alias_size_in_bytes >= kept, "what lasts is given back where it lay"
    assert memory.temp_size_in_bytes <= plan.temporary_bytes
    assert memory.generated_code_size_in_bytes <= plan.code_bytes
    assert planned + plan.temporary_bytes + plan.code_bytes <= target.chip.memory_bytes

    called = re.findall(
        r"^ +(?:ROOT )?%([\w\-]+)[\w.]* = .* custom-call\(.*custom_call_target=\"tpu_custom_call\"", text, re.MULTILINE
    )
    assert Counter(called) == kernels | beside

    found = [one for one in collectives(text) if not one.scope.startswith(("sampler", "prompt_logprobs"))]
    listed = list(map(str, found))
    assert Counter(one.scope.split("/")[0] for one in found) == {"embedding": 1} | sums, listed
    hidden = target.design.hf_config.positive("hidden_size")
    for one in found:
        assert (one.operation, one.arrays) == ("all-reduce", (f"bf16[{STEP.num_tokens},{hidden}]",)), str(one)
        assert (one.num_devices, one.always_runs) == (place.num_devices, True), str(one)


@pytest.mark.parametrize(("model", "place"), LOWERED, ids=lambda value: getattr(value, "name", value))
def test_two_layers_are_lowered_as_planned(model, place):
    target, kernels = made(model, place)
    text = target.programs.lower(STEP.num_tokens).as_text()
    assert Counter(re.findall(r'kernel_name = "(\w+)"', text)) == kernels | {"ragged_paged_attention": 2}
