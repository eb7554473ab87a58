"""config.json and generation_config.json: two dialects, one dictionary."""

import json
from pathlib import Path

import pytest

from tpu_serve.config import ConfigError
from tpu_serve.hf_config import HFConfig, eos_token_ids, read_config, read_generation_config

FIXTURES = Path(__file__).parent.parent / "fixtures"
MODELS = ["qwen3_moe", "qwen3_moe_tied"]

NESTED = {
    "architectures": ["OuterForConditionalGeneration"],
    "model_type": "outer",
    "eos_token_id": [1, 106],
    "tie_word_embeddings": False,
    "vision_config": {"hidden_size": 5},
    "quantization_config": {"quant_method": "fp8"},
    "text_config": {
        "architectures": None,
        "model_type": "outer_text",
        "eos_token_id": 7,
        "hidden_size": 64,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    },
}


def write(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def config_of(**values):
    return HFConfig(Path("model"), values)


@pytest.mark.parametrize("model", MODELS)
def test_both_dialects_say_the_same(model):
    published = read_config(FIXTURES / model)
    v5 = read_config(FIXTURES / model / "v5_style")
    raw = json.loads((FIXTURES / model / "v5_style" / "config.json").read_text())
    assert "num_experts" not in raw
    assert "rope_theta" not in raw
    different = {
        name: (published.get(name, None), v5.get(name, None))
        for name in published.values.keys() | v5.values.keys()
        if published.get(name, None) != v5.get(name, None)
    }
    assert different == {"transformers_version": ("4.51.0", "5.24.0")}
    assert v5.get("num_experts") == 8
    assert v5.get("dtype") == "bfloat16"
    assert v5.architecture == "Qwen3MoeForCausalLM"


def test_rope_of_both_dialects():
    plain, yarn = (read_config(FIXTURES / model) for model in MODELS)
    assert (plain.get("rope_theta"), plain.get("rope_scaling", None)) == (1e6, None)
    assert yarn.get("rope_theta") == 1e4
    assert yarn.get("rope_scaling") == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def test_older_spelling_of_the_rope_type(tmp_path):
    write(tmp_path, config={"rope_scaling": {"type": "yarn", "factor": 2.0}, "torch_dtype": "torch.float32"})
    config = read_config(tmp_path)
    assert config.get("rope_scaling") == {"rope_type": "yarn", "factor": 2.0}
    assert config.get("dtype") == "float32"


def test_rope_per_kind_of_layer_is_left_alone(tmp_path):
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert read_config(write(tmp_path, config={"rope_parameters": rope})).get("rope_parameters") == rope


def test_text_config_is_lifted(tmp_path):
    config = read_config(write(tmp_path, config=NESTED))
    assert config.architecture == "OuterForConditionalGeneration"
    assert config.get("model_type") == "outer"
    assert config.get("tie_word_embeddings") is False
    assert config.get("hidden_size") == 64
    assert config.get("quantization_config") == {"quant_method": "fp8"}
    assert config.get("partial_rotary_factor") == 0.25
    assert config.get("rope_theta", kind=float) == 1e7
    assert config.get("rope_scaling", None) is None
    assert eos_token_ids(config) == {1, 7, 106}


@pytest.mark.parametrize("folder", ["qwen3_moe_tied", "qwen3_moe_tied/v5_style"])
@pytest.mark.parametrize(
    ("overrides", "name", "value"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers", 1),
        ({"text_config": {"num_hidden_layers": 1}}, "num_hidden_layers", 1),
        ({"num_local_experts": 4}, "num_experts", 4),
        ({"rope_theta": 5.0}, "rope_theta", 5.0),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta", 5.0),
        ({"rope_parameters": {"rope_theta": 5.0}}, "num_experts", 8),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling",
         {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}),
        ({"rope_scaling": None}, "rope_scaling", None),
        ({"torch_dtype": "float32"}, "dtype", "float32"),
        ({"eos_token_id": 3}, "eos_token_id", [3]),
        ({"our_own_key": 1}, "our_own_key", 1),
    ],
)  # fmt: skip
def test_overrides_win_in_either_dialect(folder, overrides, name, value):
    assert read_config(FIXTURES / folder, overrides).values[name] == value


def test_overrides_of_a_nested_config(tmp_path):
    write(tmp_path, config=NESTED)
    assert read_config(tmp_path, {"hidden_size": 32}).get("hidden_size") == 32
    with pytest.raises(ConfigError, match="--hf-overrides: text_config must be an object, got 3"):
        read_config(tmp_path, {"text_config": 3})


def test_required_keys():
    config = config_of(size="64", nothing=None, flag=True)
    with pytest.raises(ConfigError, match=r"model.config.json: hidden_size is missing"):
        config.get("hidden_size")
    with pytest.raises(ConfigError, match="nothing is null"):
        config.get("nothing")
    with pytest.raises(ConfigError, match="size must be an integer, got '64'"):
        config.get("size", kind=int)
    with pytest.raises(ConfigError, match="flag must be an integer, got True"):
        config.get("flag", 1)
    with pytest.raises(ConfigError, match="architectures must hold one name"):
        _ = config_of(architectures=["A", "B"]).architecture


def test_defaults_give_the_type():
    config = config_of(theta=10, eps=1e-6, nothing=None, layers=[1])
    assert type(config.get("theta", 1.0)) is float
    assert config.get("nothing", 5) == 5
    assert config.get("absent", None) is None
    assert config.get("layers", ()) == [1]
    with pytest.raises(ConfigError, match="eps must be a list"):
        config.get("eps", [])
    with pytest.raises(ConfigError, match="eps must be true or false"):
        config.get("eps", False)


def test_generation_config_keeps_only_what_is_there():
    defaults = read_generation_config(FIXTURES / "qwen3_moe_tied")
    assert defaults.sampling == {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_k": None}, {"temperature": 0.0}),
        ({"temperature": 1, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": True}, {}),
    ],
)
def test_generation_config(tmp_path, generation, sampling):
    assert read_generation_config(write(tmp_path, generation_config=generation)).sampling == sampling


def test_what_generation_config_forbids_and_what_is_left_out(tmp_path):
    read = read_generation_config(FIXTURES / "gemma4")
    assert read.suppressed_ids == tuple(sorted(json.loads(read_file(FIXTURES / "gemma4"))["suppress_tokens"]))
    assert (read.suppressed_ids != (), read.unused) == (True, ())
    given = {
        "num_beams": 4,
        "typical_p": 1.0,
        "bad_words_ids": [[3]],
        "no_repeat_ngram_size": 0,
        "suppress_tokens": None,
    }
    read = read_generation_config(write(tmp_path, generation_config=given))
    assert (read.suppressed_ids, read.unused) == ((), ("bad_words_ids", "num_beams"))
    folder = write(tmp_path, generation_config={"suppress_tokens": ["x"]})
    with pytest.raises(ConfigError, match="suppress_tokens must be an integer or a list of integers"):
        read_generation_config(folder)


def read_file(folder):
    return (folder / "generation_config.json").read_text()


def test_folder_without_generation_config(tmp_path):
    assert read_generation_config(tmp_path).sampling == {}


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [2, 3]}, {1, 2, 3}),
        ({"eos_token_id": [1, 106]}, {"eos_token_id": 50}, {1, 50, 106}),
        ({"eos_token_id": None}, {"eos_token_id": 2}, {2}),
        ({}, {}, set()),
    ],
)
def test_ends_are_the_union(tmp_path, config, generation, ends):
    write(tmp_path, config=config, generation_config=generation)
    assert eos_token_ids(read_config(tmp_path)) == ends


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json; is it a Hugging Face model folder\?"):
        read_config(tmp_path)
    write(tmp_path, config='{\n "a": 1,\n "b" 2\n}')
    with pytest.raises(ConfigError, match=r"config\.json is not JSON: line 3, column 6"):
        read_config(tmp_path)
    write(tmp_path, config="[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object, not a list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="byte 7 is not UTF-8"):
        read_config(tmp_path)
    write(tmp_path, config={}, generation_config={"top_k": "20"})
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_k must be an integer, got '20'"):
        read_generation_config(tmp_path)
    write(tmp_path, generation_config={"eos_token_id": ["</s>"]})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be an integer or a list"):
        eos_token_ids(read_config(tmp_path))
