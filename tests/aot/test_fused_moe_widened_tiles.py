"""Tiles of 4-bit weights as large as `check` allows: what the compiler keeps beside them must have been counted."""

import pytest

from tpu_serve.bench.compiled.compiler import compile_here
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.bench.fused_moe import layer
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.legality import check
from tpu_serve.kernels.fused_moe_v2.problem import Problem

pytestmark = pytest.mark.aot

TPU7X = TPU_CHIPS["tpu7x"]


@pytest.mark.parametrize(("columns", "slots", "tokens"), [(1024, 3, 128), (1536, 2, 32)])
def test_the_widest_legal_layer_compiles(columns, slots, tokens):
    config = Config("D", columns, slots)
    problems = [Problem(tokens, 16, 4, hidden, 2 * columns, 4, "mxfp4") for hidden in range(1024, 8192, 128)]
    problem = [one for one in problems if check(one, config, TPU7X) is None][-1]
    made = compile_here(*layer(problem, config, TPU7X, target_devices(topology("tpu7x", 4))))
    assert made.error is None, f"hidden {problem.hidden}: {made.error}"
