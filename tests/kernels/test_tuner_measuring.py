"""The measuring way of the tuner from end to end, on simulated devices: what it finds is no measurement of a TPU."""

import jax
import numpy as np

from tpu_serve.device.chip import cpu_chip
from tpu_serve.device.mesh import EXPERT_AXIS, expert_mesh, make_mesh
from tpu_serve.kernels.fused_moe_v2 import reference
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.kernels.fused_moe_v2.tolerance import Errors, errors
from tpu_serve.tuner import inputs
from tpu_serve.tuner.inputs import ROUTINGS
from tpu_serve.tuner.jobs import Job
from tpu_serve.tuner.journal import Journal
from tpu_serve.tuner.measuring import Measure, xla_layer
from tpu_serve.tuner.run import Settings, Tuner

TINY = Problem(8, 4, 2, 128, 128, 2)


def test_a_tiny_layer_in_a_process_of_its_own(tmp_path):
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "NPROC": "24"}
    executor = Measure(240, ROUTINGS[:1], repeats=1, environment=environment)
    try:
        assert executor.devices() == ("cpu", "cpu", 2)
        with Journal(tmp_path / "tune.jsonl", resume=False) as journal:
            job = Job("tiny", cpu_chip(), TINY)
            result = Tuner(executor, Settings(1, "2026-01-31", jax.__version__, ""), journal).tune(job)
    finally:
        executor.close()
    assert result.outcome == "tuned", result.reason
    found, (_, trial) = result.row.provenance, result.trials[0]
    assert (found.kind, found.routing) == ("measured", "uniform")
    assert found.us == trial.score > 100, "a simulated kernel is slow"
    assert found.us_xla is not None, result.xla.reason
    assert found.iterations >= 4
    assert result.row.min_tokens_fused == 9
    assert trial.found["errors"]["uniform"]["max_error"] < 1e-2


def test_xlas_layer_computes_the_same_and_leaves_tokens_where_they_are():
    problem = Problem(16, 8, 3, 130, 128, 4)
    mesh = expert_mesh(make_mesh(jax.devices()[:4]))
    x, shares = inputs.tokens_and_weights(problem)
    ids, weights = inputs.expert_ids(problem, ROUTINGS[1]), inputs.expert_weights(problem)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(EXPERT_AXIS))
    arguments = [jax.device_put(array, split) for array in (x, ids, shares, weights)]
    result = jax.jit(xla_layer(problem, mesh, cpu_chip()))(*arguments)
    assert result.sharding.is_equivalent_to(split, 2)
    assert result.shape == x.shape
    expected = reference.dense(problem, x, ids, shares, weights)
    assert errors(np.asarray(result), expected).within(Errors(2e-2, 1e-2, 0.9999)), "inner values are rounded too"
