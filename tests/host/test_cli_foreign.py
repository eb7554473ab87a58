"""Flags that users of other servers type: each is done, explained, or refused with what to do instead."""

import re

import pytest

from tpu_serve.cli.foreign import Foreign, add_foreign_flags
from tpu_serve.cli.foreign_table import ENGINE_FLAGS, SERVER_FLAGS, VALUE_HINTS
from tpu_serve.cli.options import add_engine_options, add_others, add_server_options, engine_config, server_config
from tpu_serve.cli.parser import Parser
from tpu_serve.config import ConfigError, EngineConfig, ServerConfig, engine_options

TABLE = (*ENGINE_FLAGS, *SERVER_FLAGS)


def make_parser():
    parser = Parser(prog="test")
    add_engine_options(parser)
    add_server_options(parser)
    add_others(parser)
    return parser


def read(*words):
    arguments = make_parser().read(words)
    return engine_config(arguments), server_config(arguments), getattr(arguments, "notes", [])


DEFAULTS = (EngineConfig(), ServerConfig(), [])

DONE_ANYWAY = [
    ["--enable-chunked-prefill"], ["--enable_chunked_prefill"], ["--enable-chunked-prefill=True"], ["--async-scheduling"],
    ["--enable-prompt-tokens-details"], ["--enable-server-load-tracking"], ["--no-enforce-eager"],
    ["--data-parallel-size", "1"], ["-dp", "1"], ["--pipeline-parallel-size=1"], ["--tokenizer-mode", "auto"],
    ["--tokenizer-mode", "AUTO"], ["--prefix-caching-hash-algo", "sha256"], ["--long-prefill-token-threshold", "0"],
    ["--structured-outputs-config", '{"backend": "auto"}'], ["--guided-decoding-backend", "guidance"], ["--precompile", "full"],
    ["--runner", "generate"], ["--swap-space", "0"], ["--disable-log-requests"], ["--no-trust-remote-code"],
]  # fmt: skip


@pytest.mark.parametrize("words", DONE_ANYWAY, ids=" ".join)
def test_what_is_done_anyway_is_accepted_and_changes_nothing(words):
    assert read(*words) == DEFAULTS


REFUSED = {
    "--no-enable-chunked-prefill": "--max-num-batched-tokens",
    "--enable-chunked-prefill=false": "--max-num-batched-tokens",
    "--no-async-scheduling": "always plans",
    "--api-server-count 2": "one process takes all requests",
    "--api_server_count=2": "one process takes all requests",
    "-asc 2": "one process takes all requests",
    "--pipeline-parallel-size 2": "--tensor-parallel-size",
    "--mesh tp=4,ep=2": "it names the axes data and model",
    "--ep-size 4": "--data-parallel-size times --tensor-parallel-size",
    "--tokenizer-mode slow": "tokenizer.json",
    "--prefix-caching-hash-algo xxhash": "SHA-256",
    "--long-prefill-token-threshold 512": "--max-num-batched-tokens",
    '--structured-outputs-config {"backend":"outlines"}': "llguidance",
    "--precompile lazy": "--compile-cache-dir",
    "--disable-precompile": "--compile-cache-dir",
    "--batch-buckets 1 2": "--token-buckets",
    "--precompile-bs-paddings 1 2": "--token-buckets",
    "--cudagraph-capture-sizes 1 2 4": "--token-buckets",
    "--compilation-config 3": "--token-buckets",
    "-O3": "--token-buckets",
    "--max-prefill-tokens 4096": "--max-num-batched-tokens",
    "--max-total-tokens 4096": "--num-pages",
    '--rope-scaling {"factor":2}': "--hf-overrides",
    "--enable-lora": "merge the adapter",
    "--speculative-config {}": "no speculative decoding",
    "--download-dir /x": "HF_HUB_CACHE",
    "--hf-token abc": "HF_TOKEN",
    "--device cpu": "JAX_PLATFORMS",
    "--profiler-config {}": "--profile-dir",
    "--nnodes 2": "one host",
    "--runner pooling": "generate text",
    "--chat-template-content-format openai": "joined to one text",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_done_is_refused_with_what_to_do(line):
    with pytest.raises(ConfigError) as raised:
        read(*line.split())
    message = str(raised.value)
    if "=false" not in line:
        assert message.startswith(re.split("[ =]", line)[0].replace("_", "-").replace("-O3", "-O"))
    assert REFUSED[line] in message
    assert message.endswith(".")


NOTED = ["--enforce-eager", "--trust-remote-code", "--limit-mm-per-prompt {}", "--distributed-executor-backend ray"]


@pytest.mark.parametrize("line", NOTED)
def test_what_means_nothing_is_accepted_and_explained(line):
    engine, server, notes = read(*line.split())
    assert (engine, server) == DEFAULTS[:2]
    (note,) = notes
    assert note.startswith(line)
    assert re.search(r"means nothing here|has no effect", note)


def test_flags_that_are_options_of_ours_under_another_name():
    assert not read("--disable-radix-cache")[0].cache.enable_prefix_caching
    assert read("--log-requests")[1].enable_log_requests
    assert read("--tp-size", "2")[0].parallel.tensor_parallel_size == 2
    assert read("-dp", "2", "-tp", "4")[0].parallel.num_devices == 8
    assert read("--precompile-token-paddings", "16", "32")[0].compile.token_buckets == (16, 32)
    sglang = [
        "--model-path",
        "m",
        "--mem-fraction-static",
        "0.5",
        "--context-length",
        "4k",
        "--max-running-requests",
        "8",
    ]
    more = ["--chunked-prefill-size", "1k", "--page-size", "32", "--random-seed", "3"]
    engine = read(*sglang, *more)[0]
    assert (engine.model.model, engine.model.max_model_len, engine.model.seed) == ("m", 4096, 3)
    assert (engine.cache.device_memory_utilization, engine.cache.page_size) == (0.5, 32)
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (8, 1024)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, hints in VALUE_HINTS.items() for value in hints])
def test_values_of_other_programs_are_explained(name, value):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError) as raised:
        read(flag, value)
    assert f"{flag}" in str(raised.value)
    assert f"{value}: {VALUE_HINTS[name][value]}" in str(raised.value)


def test_hints_are_for_values_that_are_not_known():
    fields = {name: item for _, name, item in engine_options()}
    for name, hints in VALUE_HINTS.items():
        assert not set(hints) & set(fields[name].metadata["choices"])


def test_no_flag_is_in_two_rows():
    flags = [flag for row in TABLE for flag in row.flags]
    assert len(flags) == len(set(flags))
    for row in TABLE:
        assert row.sets or row.done is not None or row.says, row.flags
        assert not row.says.endswith("."), "a clause"


def test_no_row_is_about_an_option_of_ours():
    parser = Parser(prog="test")
    add_engine_options(parser)
    add_server_options(parser)
    ours = {flag for action in parser._actions for flag in action.option_strings}
    assert [flag for row in TABLE for flag in row.flags if flag in ours] == []


def test_they_are_hidden(capsys):
    with pytest.raises(SystemExit):
        make_parser().read(["--help"])
    assert "--enforce-eager" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        make_parser().read(["--help=eager"])
    assert "--enforce-eager" not in capsys.readouterr().out


def test_they_are_not_what_an_unknown_flag_is_likened_to():
    with pytest.raises(ConfigError) as raised:
        read("--enforce-eagle")
    assert "enforce-eager" not in str(raised.value)


def test_an_option_of_ours_goes_before_a_row_of_the_same_name():
    parser = Parser(prog="test")
    parser.add_argument("--mine", type=int)
    add_foreign_flags(parser, [Foreign(flags=("--mine", "--yours"), says="is not supported")])
    assert parser.read(["--mine", "3"]).mine == 3
    with pytest.raises(ConfigError, match=r"--yours 3 is not supported\."):
        parser.read(["--yours", "3"])


@pytest.mark.parametrize("words", [["--port", "1"], ["--no-strict-fields"], ["--served-model-name", "a", "b"]])
def test_flags_of_the_http_server_are_noted_elsewhere(words):
    parser = Parser(prog="test")
    add_engine_options(parser)
    add_others(parser)
    arguments = parser.read([*words, "--seed", "3"])
    assert engine_config(arguments).model.seed == 3
    assert arguments.notes == [f"{words[0]} is about the HTTP server and changes nothing here."]


def test_a_switch_may_be_given_a_truth():
    assert not read("--enable-prefix-caching=False")[0].cache.enable_prefix_caching
    assert read("--no_enable_prefix_caching=false")[0].cache.enable_prefix_caching
    assert read("--strict-fields=true")[1].strict_fields
    with pytest.raises(ConfigError, match=r"--enforce-eager.*: ignored explicit argument"):
        read("--enforce-eager=maybe")
    assert (
        read(
            "model",
            "--",
        )[0].model.model
        == "model"
    )


def test_lists_may_be_json():
    assert read("--served-model-name", '["a", "b"]')[1].served_model_name == ("a", "b")
    assert read("--served-model-name", "[x")[1].served_model_name == ("[x",)
