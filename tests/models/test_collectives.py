"""What devices send one another in a step: what splitting the weights costs, and nothing else."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from cases import FIXTURES

from tpu_serve.bench.compiled.collectives import collectives
from tpu_serve.config import EngineConfig
from tpu_serve.device.chip import cpu_chip
from tpu_serve.device.mesh import make_mesh
from tpu_serve.device.ranks import Ranks
from tpu_serve.engine.design import design_engine
from tpu_serve.engine.programs import make_programs
from tpu_serve.hf_config import read_config
from tpu_serve.layers.mixing import PagedMixing
from tpu_serve.runner.programs import Allowed

TOKENS, HIDDEN, VOCABULARY = 16, 64, 509
DENSE = ("qwen3", "gemma3")


def programs_of(name, num_devices, num_layers, num_ranks=1):
    overrides = {"num_hidden_layers": num_layers, "vocab_size": VOCABULARY}
    experts = {} if name in DENSE else {"moe_backend": "dense"}
    config = EngineConfig.from_options(
        model=str(FIXTURES / name), dtype="float32", hf_overrides=overrides, token_buckets=[TOKENS],
        max_num_batched_tokens=TOKENS, max_model_len=64, max_num_seqs=8, page_size=8, num_pages=20,
        data_parallel_size=num_ranks, **experts,
    )  # fmt: skip
    hf_config = read_config(FIXTURES / name, overrides)
    design = design_engine(config, hf_config, cpu_chip(), make_mesh(jax.devices()[:num_devices], num_ranks))
    return make_programs(config, design, design.plan(config), Allowed(500))


def forward_text(programs):
    """Of the model alone: the sampler takes most of the time that a step takes to compile."""
    step, layout, ranks = programs.function, programs.layouts[TOKENS], Ranks(programs.mesh)

    def forward(params, caches, packed):
        batch = ranks.each(layout.unpack)(packed)
        mixing = PagedMixing(batch, step.windows, step.attention)
        tokens = ranks.together((batch.token_ids, batch.positions, batch.seq_of_token >= 0))
        return step.model.forward(params, *tokens, caches, mixing, step.experts)

    shardings = programs.by_rank, jax.tree.map(lambda x: x.sharding, programs.state.caches)
    packed = jax.ShapeDtypeStruct(programs.packed_shape(TOKENS), jnp.int32, sharding=programs.by_rank)
    jitted = jax.jit(forward, donate_argnums=1, out_shardings=shardings)
    return jitted.lower(programs.params, programs.state.caches, packed).compile().as_text()


@pytest.mark.parametrize(
    ("name", "num_devices", "num_layers", "sums"),
    [
        ("qwen3", 8, 1, 2),
        ("gemma3", 8, 1, 2),
        ("mixtral", 4, 1, 2),
        ("gpt_oss", 8, 2, 2),
        ("qwen2_moe", 4, 1, 3),  # the third is that of the shared expert
        ("gemma4", 4, 2, 3),  # or of the MLP beside the experts; a layer of either kind
        ("qwen3_next", 4, 4, 3),
    ],
)
def test_a_layer_adds_up_what_the_devices_have_of_it(name, num_devices, num_layers, sums):
    """One sum of [T, H] behind the tokens' mixing and one behind the experts or the MLP; KV heads are fewer than devices."""
    found = collectives(forward_text(programs_of(name, num_devices, num_layers)))
    assert {one.operation for one in found} == {"all-reduce"}
    assert all(one.always_runs and one.num_devices == num_devices for one in found)
    assert len(found) == 1 + 2 * num_layers, list(
        map(str, found)
    )  # the compiler sums in one go what is beside the experts
    arrays = Counter(array for one in found for array in one.arrays)
    assert arrays == {f"f32[{TOKENS},{HIDDEN}]": 1 + sums * num_layers}, list(map(str, found))


def test_data_ranks_meet_in_the_experts_alone():
    """Two ranks of two devices: each sums by itself, but for the experts, which are sent the tokens of both and where these go."""
    num_ranks, num_devices, num_layers = 2, 4, 1
    programs = programs_of("qwen2_moe", num_devices, num_layers, num_ranks)
    found = collectives(forward_text(programs))
    listed = list(map(str, found))
    assert all(one.always_runs for one in found), listed
    of_rank, of_all = f"f32[{TOKENS},{HIDDEN}]", f"f32[{num_ranks * TOKENS},{HIDDEN}]"
    sums = [one for one in found if one.operation == "all-reduce"]
    arrays = Counter(array for one in sums for array in one.arrays)
    assert arrays == {of_rank: 1 + 2 * num_layers, of_all: num_layers}, (
        listed
    )  # twice: of attention and of the shared expert
    gathered = [one for one in found if one not in sums]
    assert {one.operation for one in gathered} == {"all-gather"}, listed
    assert {one.num_devices for one in gathered} == {num_ranks}, listed
    assert [one.arrays for one in gathered].count((of_all,)) == num_layers, listed
    limit = 4 * num_ranks * TOKENS * programs.function.model.moe.num_experts  # of the router's scores
    assert all(one.num_bytes <= limit for one in gathered if one.arrays != (of_all,)), listed


def test_the_sampler_never_gathers_logits_unasked():
    """Each device has its share of the vocabulary; rows agree on numbers, and on 20 ids where log-probabilities are wanted."""
    programs = programs_of("qwen3_moe", 8, 1)
    found = collectives(programs.lower(TOKENS).compile().as_text())
    inside = [one for one in found if one.scope.startswith(("sampler", "prompt_logprobs"))]
    rest = Counter((one.operation, one.scope.split("/")[0]) for one in found if one not in inside)
    assert rest == Counter({("all-reduce", scope): 1 for scope in ("embedding", "attention", "experts")})
    rows = programs.layouts[TOKENS].num_rows
    for one in inside:
        if one.scope.endswith(
            "top_k"
        ):  # the CPU's compiler gathers here, where a TPU's sends the best 20 of each device
            assert one.is_conditional
        else:
            assert one.num_bytes <= 8 * 4 * max(rows, TOKENS), str(one)
    assert sum(one.always_runs for one in inside) <= 4, list(map(str, inside))
