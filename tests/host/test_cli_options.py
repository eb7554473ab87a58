"""Flags and configuration say the same: every option has its flag, in both spellings, and nothing else reaches the configuration."""

import argparse
import dataclasses

import pytest

from tpu_serve.cli.options import REPEATED, SIZES, add_engine_options, add_server_options, engine_config, server_config
from tpu_serve.cli.parser import Parser
from tpu_serve.config import ConfigError, EngineConfig, ServerConfig, engine_options

ENGINE_FIELDS = {name: item for _, name, item in engine_options()}
SERVER_FIELDS = {item.name: item for item in dataclasses.fields(ServerConfig)}
FIELDS = {**ENGINE_FIELDS, **SERVER_FIELDS}

# A value other than the default for every option: what the user types, what the configuration holds.
EXAMPLES = {
    "model": (["folder"], "folder"),
    "tokenizer": (["other"], "other"),
    "revision": (["main"], "main"),
    "load_format": (["dummy"], "dummy"),
    "dtype": (["float32"], "float32"),
    "quantization": (["int8"], "int8"),
    "requantize": (["off"], "off"),
    "max_model_len": (["2k"], 2048),
    "hf_overrides": (['{"num_hidden_layers": 2}'], {"num_hidden_layers": 2}),
    "moe_backend": (["dense"], "dense"),
    "moe_permute": (["onehot"], "onehot"),
    "moe_tuning_dir": (["tables", "more"], ("tables", "more")),
    "moe_strict_tables": ([], True),
    "warm_up_measure": ([], True),
    "moe_tiles": (['{"mode": "D"}'], {"mode": "D"}),
    "moe_combine": (["tc"], "tc"),
    "moe_grouped_matmul": (["xla"], "xla"),
    "seed": (["-7"], -7),
    "page_size": (["32"], 32),
    "num_pages": (["100"], 100),
    "kv_cache_memory_bytes": (["2g"], 2 * 2**30),
    "device_memory_utilization": (["0.5"], 0.5),
    "enable_prefix_caching": ([], False),
    "num_state_snapshots": (["6"], 6),
    "kv_cache_dtype": (["fp8"], "fp8"),
    "max_num_seqs": (["3"], 3),
    "max_num_batched_tokens": (["256"], 256),
    "max_num_queued_reqs": (["9"], 9),
    "max_num_queued_tokens": (["9000"], 9000),
    "scheduling_policy": (["priority"], "priority"),
    "num_decode_steps": (["8"], 8),
    "attention_backend": (["xla"], "xla"),
    "serve_while_compiling": ([], True),
    "on_recompile": (["count"], "count"),
    "generation_config": (["vllm"], "vllm"),
    "override_generation_config": (['{"top_k": 3}'], {"top_k": 3}),
    "max_logprobs": (["5"], 5),
    "logprobs_mode": (["processed_logits"], "processed_logits"),
    "tensor_parallel_size": (["2"], 2),
    "data_parallel_size": (["2"], 2),
    "mesh": (["data=1,model=1"], "data=1,model=1"),
    "enable_expert_parallel": ([], False),
    "token_buckets": (["16", "64"], (16, 64)),
    "compile_cache_dir": (["off"], "off"),
    "host": (["0.0.0.0"], "0.0.0.0"),
    "port": (["0"], 0),
    "served_model_name": (["a", "b"], ("a", "b")),
    "api_key": (["secret"], ("secret",)),
    "chat_template": (["file.jinja"], "file.jinja"),
    "strict_fields": ([], True),
    "max_request_bytes": (["1m"], 2**20),
    "shutdown_timeout": (["1.5"], 1.5),
    "log_stats_interval": (["0"], 0.0),
    "log_level": (["debug"], "debug"),
    "disable_log_stats": ([], True),
    "log_format": (["json"], "json"),
    "disable_access_log": ([], True),
    "disable_access_log_for_endpoints": (["/a", "/b,/c"], ("/a", "/b", "/c")),
    "uvicorn_log_level": (["error"], "error"),
    "enable_log_requests": ([], True),
    "max_log_len": (["80"], 80),
    "metrics_prefix": (["tpu_serve"], "tpu_serve"),
    "otlp_traces_endpoint": (["http://collector:4318/v1/traces"], "http://collector:4318/v1/traces"),
    "api_key_file": (["keys"], "keys"),
    "metrics_without_key": ([], True),
    "uds": (["/tmp/socket"], "/tmp/socket"),
    "root_path": (["/llm"], "/llm"),
    "ssl_keyfile": (["key.pem"], "key.pem"),
    "ssl_certfile": (["cert.pem"], "cert.pem"),
    "ssl_ca_certs": (["ca.pem"], "ca.pem"),
    "ssl_cert_reqs": (["1"], 1),
    "allowed_origins": (["https://a", "https://b"], ("https://a", "https://b")),
    "allowed_methods": (["GET"], ("GET",)),
    "allowed_headers": (["x-a"], ("x-a",)),
    "allow_credentials": ([], True),
    "enable_request_id_headers": ([], False),
    "disable_fastapi_docs": ([], True),
    "enable_tokenizer_info_endpoint": ([], True),
    "profile_dir": (["traces"], "traces"),
    "trust_request_chat_template": ([], True),
    "default_chat_template_kwargs": (['{"enable_thinking": false}'], {"enable_thinking": False}),
    "reasoning_parser": (["none"], "none"),
    "tool_call_parser": (["none"], "none"),
    "enable_auto_tool_choice": ([], False),
    "reasoning_content": ([], False),
    "stream_interval": (["4"], 4),
    "enable_force_include_usage": ([], True),
    "enable_scripted_output": ([], True),
    "body_timeout": (["5"], 5.0),
    "h11_max_incomplete_event_size": (["2048"], 2048),
    "h11_max_header_count": (["9"], 9),
    "queue_full_status": (["429"], 429),
    "sse_keep_alive_interval": (["15"], 15.0),
}

# What an option asks of others before it may be set.
OF_GROUPED = ("moe_permute", "moe_combine", "moe_grouped_matmul")
OF_SSL = ("--ssl-certfile", "cert.pem")
NEEDS = {
    **dict.fromkeys(OF_GROUPED, ("--moe-backend", "grouped")),
    "ssl_keyfile": OF_SSL,
    "ssl_ca_certs": OF_SSL,
    "ssl_cert_reqs": (*OF_SSL, "--ssl-ca-certs", "ca.pem"),
}


def make_parser():
    parser = Parser(prog="test")
    add_engine_options(parser)
    add_server_options(parser)
    return parser


def read(*words):
    """The named options of a command line, engine and server alike."""
    arguments = make_parser().read(words)
    engine, server = engine_config(arguments), server_config(arguments)
    values = {name: getattr(getattr(engine, part), name) for part, name, _ in engine_options()}
    return values | {name: getattr(server, name) for name in SERVER_FIELDS}


def test_every_option_has_an_example():
    assert set(EXAMPLES) == set(FIELDS), "a new option needs a line in EXAMPLES"


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("mark", ["-", "_"])
def test_a_flag_sets_its_option_and_no_other(name, mark):
    words, value = EXAMPLES[name]
    stem = f"no_{name}" if value is False else name
    needs = NEEDS.get(name, ())
    changed = read(*needs, f"--{stem.replace('_', mark)}", *words)
    assert changed == {**read(*needs), name: value}


@pytest.mark.parametrize("name", OF_GROUPED)
def test_an_option_of_another_backend_is_refused(name):
    words, value = EXAMPLES[name]
    flag = f"--{name.replace('_', '-')}"
    for backend in ("auto", "dense", "ragged", "fused"):
        with pytest.raises(
            ConfigError, match=f"{flag} {value} needs --moe-backend grouped: {backend} has no such part"
        ):
            read("--moe-backend", backend, flag, *words)


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_has_help_and_its_aliases(name):
    actions = {action.dest: action for action in make_parser()._actions if action.option_strings}
    assert actions[name].help
    assert FIELDS[name].metadata["help"].replace("%", "%%") in actions[name].help
    assert {f"--{name.replace('_', '-')}", *FIELDS[name].metadata["aliases"]} <= set(actions[name].option_strings)


@pytest.mark.parametrize(("name", "alias"), [(n, a) for n, item in FIELDS.items() for a in item.metadata["aliases"]])
def test_an_alias_is_the_flag(name, alias):
    words, value = EXAMPLES[name]
    assert read(alias, *words)[name] == value
    if alias.startswith("--"):
        assert read(alias.replace("-", "_").replace("__", "--", 1), *words)[name] == value


@pytest.mark.parametrize("name", FIELDS)
def test_defaults_are_shown(name):
    default = FIELDS[name].default
    help = next(action.help for action in make_parser()._actions if action.dest == name)
    if default not in (None, "", (), dataclasses.MISSING):
        shown = " ".join(default) if isinstance(default, tuple) else default
        assert f"(default: {'on' if default is True else 'off' if default is False else shown})" in help


def test_without_flags_the_defaults_hold():
    arguments = make_parser().read([])
    assert engine_config(arguments) == EngineConfig()
    assert server_config(arguments) == ServerConfig()
    assert not [name for name in FIELDS if hasattr(arguments, name)]


def test_sizes_are_those_whose_help_says_so():
    assert {name for name, item in FIELDS.items() if "suffixes allowed" in item.metadata["help"]} == SIZES
    assert {name for name, item in FIELDS.items() if "may be repeated" in item.metadata["help"]} == REPEATED


@pytest.mark.parametrize("words", [("auto",), ("AUTO",), ("-1",)])
def test_the_longest_sequences_that_fit(words):
    assert read("--max-model-len", *words)["max_model_len"] == -1


def test_lists():
    assert read("--api-key", "one", "--api_key=two")["api_key"] == ("one", "two")
    assert read("--served-model-name", "a", "b", "--port", "1")["served_model_name"] == ("a", "b")
    assert read("--api-key", "one", "folder")["model"] == "folder", "a key takes one word"


@pytest.mark.parametrize(
    "words", [["folder"], ["--model", "folder"], ["--model=folder"], ["folder", "--model", "folder"]]
)
def test_the_model_has_two_names(words):
    assert read(*words)["model"] == "folder"
    assert read("--port", "1", *words, "--seed", "2")["model"] == "folder"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one", "--model", "two"], "named twice"),
        (["one", "two"], "unexpected argument 'two'"),
        (["--port", "many"], "--port: 'many' is not an integer"),
        (["--port", "70000"], "--port must be between 0 and 65535, got 70000"),
        (["--shutdown-timeout", "soon"], "'soon' is not a number"),
        (["--max-model-len", "long"], "'long' is not a number such as 4096, 32k or 2g"),
        (["--max-model-len", "9" * 400], "is not a number such as"),
        (["--max-model-len", "١٢k"], "is not a number such as"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--max-model-len", "1"], "--max-model-len must be at least 2, got 1"),
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--hf-overrides", "{"], "'{' is not JSON"),
        (["--hf-overrides", "[1]"], "'[1]' is not a JSON object"),
        (["--token-buckets", "16", "x"], "'x' is not an integer"),
        (["--token-buckets", "32", "16"], "--token-buckets must be positive and rising"),
        (["--page-size", "24"], "--page-size must be a power of two, got 24"),
        (["--port"], "--port: expected one argument"),
        (["--max-modl-len", "9"], "unknown flag --max-modl-len; did you mean --max-model-len?"),
        (["--max_modl_len=9"], "unknown flag --max-modl-len; did you mean --max-model-len?"),
        (["--max-model"], "unknown flag --max-model; did you mean --max-model-len?"),
        (["--zzz"], "unknown flag --zzz"),
        (["-tp", "0"], "--tensor-parallel-size must be at least 1, got 0"),
        (["-tp", "2", "--no-enable-expert-parallel"], "splitting inside an expert is not supported"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(words, message):
    with pytest.raises(ConfigError) as raised:
        read(*words)
    assert message in str(raised.value)


def test_options_can_be_left_out_and_forced():
    parser = Parser(prog="test")
    add_engine_options(parser, without={"enable_prefix_caching"})
    add_server_options(parser, only={"chat_template"})
    with pytest.raises(ConfigError, match="unknown flag"):
        parser.read(["--enable-prefix-caching"])
    with pytest.raises(ConfigError, match="unknown flag"):
        parser.read(["--port", "1"])
    assert not engine_config(parser.read([]), enable_prefix_caching=False).cache.enable_prefix_caching


def test_a_flag_value_keeps_its_underscores_and_dashes():
    values = read("--tokenizer=some_folder/a-b", "--revision", "a_b")
    assert (values["tokenizer"], values["revision"]) == ("some_folder/a-b", "a_b")


def test_words_after_two_dashes_are_not_flags():
    assert read("--", "--a_b")["model"] == "--a_b"


def test_only_given_flags_are_in_the_namespace():
    arguments = make_parser().read(["--port", "1"])
    assert isinstance(arguments, argparse.Namespace)
    assert {name for name in FIELDS if hasattr(arguments, name)} == {"port"}
