"""Where sampling defaults come from, and that the log says so."""

import json
import logging

import pytest

from tpu_serve.config import ConfigError, EngineConfig, SamplingOptions
from tpu_serve.config.sampling import DEFAULTS, MOST_LOGPROBS
from tpu_serve.engine.build import _default_params
from tpu_serve.request import MAX_LOGPROBS, SamplingParams

FILE = {
    "do_sample": True,
    "temperature": 0.7,
    "presence_penalty": 1.5,
    "repetition_penalty": 1.1,
    "min_new_tokens": 3,
    "num_beams": 4,
    "eos_token_id": [1, 2],
}
OURS = {"temperature": 0.7, "presence_penalty": 1.5, "repetition_penalty": 1.1, "min_tokens": 3}


@pytest.fixture
def folder(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "generation_config.json").write_text(json.dumps(FILE))
    return tmp_path


def test_the_models_own_are_taken_penalties_among_them(folder, caplog):
    assert _default_params(folder, SamplingOptions()) == OURS
    assert "from generation_config.json: temperature=0.7, " in caplog.text
    assert "presence_penalty=1.5" in caplog.text
    assert "asks for num_beams, which is not supported" in caplog.text


def test_none_are_taken_on_request(folder, caplog):
    assert _default_params(folder, SamplingOptions(generation_config="vllm")) == {}
    assert "are not used: temperature=0.7" in caplog.text
    assert "num_beams" not in caplog.text


def test_overrides_win_and_null_takes_away(folder, caplog):
    overrides = {"temperature": 0.2, "top_k": 5, "presence_penalty": None, "min_new_tokens": 1}
    expected = {"temperature": 0.2, "repetition_penalty": 1.1, "min_tokens": 1, "top_k": 5}
    assert _default_params(folder, SamplingOptions(override_generation_config=overrides)) == expected
    assert "from --override-generation-config: temperature=0.2, top_k=5" in caplog.text
    options = SamplingOptions(generation_config="vllm", override_generation_config=overrides)
    assert _default_params(folder, options) == {"temperature": 0.2, "min_tokens": 1, "top_k": 5}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"override_generation_config": {"num_beams": 2}}, "cannot set 'num_beams'; what it can set is temperature, "),
        ({"max_logprobs": 21}, "--max-logprobs must be between 0 and 20, got 21"),
        ({"max_logprobs": -1}, "between 0 and 20, got -1"),
        ({"logprobs_mode": "raw"}, "--logprobs-mode must be one of raw_logprobs"),
        ({"generation_config": "folder"}, "--generation-config must be one of auto, vllm"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy must be one of fcfs, priority"),
        ({"max_num_queued_tokens": 0}, "--max-num-queued-tokens must be at least 1"),
    ],
)
def test_impossible_options(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(**options)


@pytest.mark.parametrize("value", [{"temperature": 9}, {"top_k": "many"}])
def test_impossible_values_name_their_origin(tmp_path, value):
    with pytest.raises(ConfigError, match="--override-generation-config: "):
        _default_params(tmp_path, SamplingOptions(override_generation_config=value))


def test_names_and_limits_are_those_of_requests():
    assert MOST_LOGPROBS == MAX_LOGPROBS
    assert set(DEFAULTS.values()) <= set(SamplingParams.__dataclass_fields__)
