"""Timing both ways of running the experts: what is refused at the door, and where a server does it."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cases import FIXTURES
from warm_up_fakes import CONFIG, SERVED, Clock, layer, options

from tpu_serve import LLM, ConfigError
from tpu_serve.config import MoEOptions
from tpu_serve.device.chip import cpu_chip
from tpu_serve.engine import build
from tpu_serve.engine.warm_up import WarmUp, first_experts
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model
from tpu_serve.moe_plan.layer import Policy
from tpu_serve.moe_plan.planner import Planner

COMPILED = Path(os.environ["XDG_CACHE_HOME"]) / "tpu-serve" / "compile"


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A host "here" with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("platform.node", lambda: "here")
    return tmp_path / "cache" / "tpu-serve" / "tuning_tables"


HUGE = dataclasses.replace(CONFIG, hidden=2**20)
REFUSED = [
    ({"chip": cpu_chip()}, "has nothing to choose: on a CPU the fused kernel is only simulated"),
    ({"num_devices": 1}, r"has nothing to choose: on one device the fused kernel is never taken \(--tensor-parallel"),
    ({"config": HUGE}, "has nothing to choose: the fused kernel cannot run this model: .* MiB of VMEM; v6e has"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_nothing_to_choose_is_an_error_at_the_door(changes, message, home):
    with pytest.raises(ConfigError, match=f"--warm-up-measure {message}"):
        WarmUp(options(), layer(options(), **changes), SERVED, Clock())
    assert not home.exists()


def test_what_is_given_leaves_nothing_to_choose(monkeypatch):
    with pytest.raises(ConfigError, match="--warm-up-measure needs --moe-backend auto: ragged runs at every token"):
        MoEOptions("ragged", warm_up_measure=True)
    with pytest.raises(ConfigError, match="--moe-tiles is for experiments"):
        MoEOptions(warm_up_measure=True, moe_tiles={"mode": "D"})
    monkeypatch.setenv("TPU_SERVE_MOE_TILES", json.dumps({"mode": "D"}))
    with pytest.raises(ConfigError, match="--moe-tiles is for experiments"):
        MoEOptions(warm_up_measure=True)


def test_a_place_that_cannot_be_written_is_an_error_at_the_door(home, tmp_path, monkeypatch):
    experts = layer(options())
    home.parent.mkdir(parents=True)
    home.write_text("a file where the folder should be")
    with pytest.raises(
        ConfigError, match=r"--warm-up-measure cannot keep times in .*tuning_tables/v6e: Not a directory"
    ):
        WarmUp(options(), experts, SERVED, Clock())
    monkeypatch.setattr("platform.node", lambda: "")
    with pytest.raises(ConfigError, match="name of this host, which has none"):
        WarmUp(options(), experts, SERVED, Clock())


def test_a_user_without_a_home_starts_all_the_same(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert MoEOptions(moe_tuning_dir=("a",)).tuning_folders[0].name == "a"
    assert MoEOptions().tuning_folders == []
    with pytest.raises(ConfigError, match="--moe-tuning-dir must name a folder for --warm-up-measure"):
        assert MoEOptions().measured_folder


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_every_family_has_its_experts_where_they_are_looked_for(family):
    model = build_model(read_config(FIXTURES / family))
    found = first_experts(model.param_specs(jnp.dtype("float32")))
    assert found.gate_up.shape[0] == found.down.shape[0] == model.moe.num_experts
    assert first_experts({"layers": [{"mlp": None}]}) is None


def test_a_server_refuses_before_weights_and_otherwise_runs_what_was_chosen(monkeypatch):
    tiny = {
        "dtype": "float32", "token_buckets": (8,), "max_num_batched_tokens": 8, "max_model_len": 32, "num_pages": 9,
        "compile_cache_dir": str(COMPILED),
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(build, "load_params", lambda *_, **__: pytest.fail("weights were read"))
        with pytest.raises(ConfigError, match="--warm-up-measure has nothing to choose: on a CPU"):
            LLM(str(FIXTURES / "mixtral"), warm_up_measure=True, **tiny)

    class Stub:
        """Always chooses another way."""

        def __init__(self, moe, experts, buckets):
            self.experts, self.buckets = experts, buckets

        def run(self, weights):
            assert isinstance(first_experts(weights).down, jax.Array)
            old = self.experts.planner
            planner = Planner(old.layer, old.num_devices, old.chip, Policy("dense"))
            planner.prepare(self.buckets)
            return dataclasses.replace(self.experts, planner=planner)

    monkeypatch.setattr(build, "WarmUp", Stub)
    assert LLM(str(FIXTURES / "mixtral"), warm_up_measure=True, **tiny).engine.moe_plans == {("dense", "none"): 1}
