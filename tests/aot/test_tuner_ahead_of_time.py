"""One key tuned with the TPU's compiler, from the command line to the row."""

import json

import jax
import pytest

from tpu_serve.bench.compiled.compiler import compile_here
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.bench.fused_moe import layer
from tpu_serve.cli import main as cli
from tpu_serve.cli import tune
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.device.mesh import make_mesh, replicated
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.layers.moe.timing import loop
from tpu_serve.tuner import rows
from tpu_serve.tuner.compiling import copied_weights

pytestmark = pytest.mark.aot


def test_a_key_for_v6e(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "COMMANDS", (tune,))
    words = [
        *["tune", "fused_moe_v2", "--compile-only", "--score", "bytes", "--candidates", "2", "--timeout", "200"],
        *["--chip", "v6e", "--workload", "Qwen3-30B-A3B", "--format", "bfloat16", "--num-devices", "4"],
    ]
    assert cli.main([*words, "--num-tokens", "16", "--output-dir", str(tmp_path)]) == 0, capsys.readouterr().err
    head, first, second = map(json.loads, (tmp_path / "tune.jsonl").read_text().splitlines())
    assert head["versions"]["libtpu"] is not None
    for line in (first, second):
        assert line["trial"]["outcome"] == "worked", line["trial"]["reason"]
        assert line["trial"]["found"]["compile_seconds"] > 0, "by the compiler"
        assert line["trial"]["found"]["temporary_bytes"] < 2**20
    problem = WORKLOADS["Qwen3-30B-A3B"].problem(16, 4, "bfloat16")
    assert first["what"]["config"]["tile_columns"] == heuristic(problem, TPU_CHIPS["v6e"]).tile_columns
    (row,) = rows.read(tmp_path, TPU_CHIPS["v6e"]).entries
    assert (row.provenance.kind, row.provenance.score_kind) == ("compiled", "bytes")
    assert (row.provenance.us, row.min_tokens_fused) == (None, None)


def test_a_loop_of_calls_copies_no_weights():
    """What is timed on a TPU is the layer, and not moving its weights into the loop."""
    chip, problem = TPU_CHIPS["v6e"], WORKLOADS["Qwen3-30B-A3B"].problem(16, 4, "bfloat16")
    devices = target_devices(topology("v6e", 4))
    run, arguments = layer(problem, heuristic(problem, chip), chip, devices)
    number = jax.ShapeDtypeStruct((), jax.numpy.int32, sharding=replicated(make_mesh(devices)))
    made = compile_here(loop(run), [number, *arguments])
    assert made.error is None, made.error
    assert copied_weights(made.text, problem) == []
    assert made.temporary_bytes < 2**20
