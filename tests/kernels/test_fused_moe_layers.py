"""Two layers of different shape, weights and routing in one program, on devices that are late: nothing of the first is taken for the second's."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import pytest
from fused_moe_driver import AXIS, BOTH, compare, mesh_of, padded_arguments, tokens_of, tokens_spec
from fused_moe_inputs import make
from jax.sharding import PartitionSpec as P
from simulator import delayed, simulate

from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.op import fused_moe_v2
from tpu_serve.kernels.fused_moe_v2.problem import Problem

pytestmark = pytest.mark.usefixtures("plain_sums")

D, G = Config("D", 128, 2), Config("G", 128, 2, block_rows=32, tile_rows=32)
FIRST = Problem(14, 8, 2, 128, 256, 3)
# Nothing but the tokens is as in the first: other experts, more choices, another intermediate size and a bias.
SECOND = replace(FIRST, num_experts=5, top_k=4, intermediate=384, down_bias=True)


@dataclass(frozen=True)
class Late:
    """Seconds by which each device is late at each of the two layers."""

    first: tuple[float, ...]
    second: tuple[float, ...]


CASES = {
    "D then D": (D, D, SECOND, Late((0, 0.3, 0), (0.3, 0, 0))),
    "D then G": (D, replace(G, dispatch="push_ag", rounds=3), SECOND, Late((0.3, 0, 0), (0, 0, 0))),
    "G then D": (replace(G, dispatch="dedup_push"), D, SECOND, Late((0, 0, 0.3), (0, 0, 0))),
    "G then G": (G, replace(G, dispatch="dedup_push", rounds=2), SECOND, Late((0, 0.3, 0), (0.3, 0, 0))),
    # The same buffers and semaphores, and a routing in which the first device had nothing to send.
    "G then the same G": (replace(G, dispatch="push_ag"), replace(G, dispatch="push_ag"), FIRST, Late((0, 0, 0.3), (0.3, 0, 0))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_two_layers_in_one_program(name):
    first_config, second_config, second_problem, late = CASES[name]
    layers = ((FIRST, first_config, late.first), (second_problem, second_config, late.second))
    inputs = [make(FIRST, 1, "idle device"), make(second_problem, 2, "partial")]
    tokens, experts = tokens_spec(FIRST), P(AXIS)

    def program(interpret: Any, *arguments: Any) -> Any:
        def both(x: jax.Array, *of_layers: Any) -> Any:
            results = []
            for (problem, config, seconds), (ids, routing, weights) in zip(layers, of_layers, strict=True):
                layer = functools.partial(
                    fused_moe_v2, problem=problem, config=config, call=Call(AXIS, cpu_chip(), interpret)
                )
                x = layer(delayed(x, AXIS, seconds), ids, routing, weights)
                results.append(x)
            return results

        return jax.shard_map(
            both,
            mesh=mesh_of(FIRST.num_devices),
            in_specs=(tokens, *[(tokens, tokens, experts)] * 2),
            out_specs=experts,
            check_vma=False,
        )(*arguments)

    arguments = [padded_arguments(problem, one) for (problem, *_), one in zip(layers, inputs, strict=True)]
    outputs = simulate(program, arguments[0][0], *[one[1:4] for one in arguments])
    for mode, output in zip(BOTH, outputs, strict=True):
        between, end = (tokens_of(FIRST, rows) for rows in output)
        compare(FIRST, first_config, inputs[0], between, f"first layer, copies {mode}")
        second = replace(inputs[1], x=between.astype(inputs[0].x.dtype))
        compare(second_problem, second_config, second, end, f"second layer, copies {mode}")
