"""`--config FILE`: the file says what the command line does not."""

import pytest

from tpu_serve.cli import main as cli
from tpu_serve.cli.options import add_engine_options, add_others, add_server_options, engine_config, server_config
from tpu_serve.cli.parser import Parser
from tpu_serve.config import ConfigError, EngineConfig, ServerConfig


@pytest.fixture
def read(tmp_path):
    """Reads a file of some text beside a command line."""

    def read(text, *words):
        path = tmp_path / "serve.yaml"
        path.write_text(text, encoding="utf-8")
        parser = Parser(prog="test")
        add_engine_options(parser)
        add_server_options(parser)
        add_others(parser)
        arguments = parser.read(["--config", str(path), *words])
        return engine_config(arguments), server_config(arguments), getattr(arguments, "notes", [])

    return read


def test_every_kind_of_value(read):
    engine, server, _ = read(
        """
# a comment
model: some/where
max_model_len: 32k
hf-overrides: {num_hidden_layers: 2}
enable_prefix_caching: no
compile_cache_dir: off
device_memory_utilization: .5
token_buckets: [16, 32]
seed: -7
port: 0
served-model-name: [a, "b c"]
api_key:
  - 0123
  - second
strict_fields: true
root_path: ""
tokenizer: null
"""
    )
    assert (engine.model.model, engine.model.max_model_len, engine.model.seed) == ("some/where", 32 * 1024, -7)
    assert engine.model.hf_overrides == {"num_hidden_layers": 2}
    assert engine.model.tokenizer is None
    assert not engine.cache.enable_prefix_caching
    assert engine.cache.device_memory_utilization == 0.5
    assert engine.compile.compile_cache_dir == "off", "and not the truth that YAML takes it for"
    assert engine.compile.token_buckets == (16, 32)
    assert (server.port, server.served_model_name, server.strict_fields) == (0, ("a", "b c"), True)
    assert server.api_key == ("0123", "second")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_says_nothing(read, text):
    assert read(text) == (EngineConfig(), ServerConfig(), [])


def test_json_is_yaml(read):
    assert read('{"port": 1, "hf_overrides": {"a": [1, null]}}')[1].port == 1


def test_the_command_line_wins(read):
    text = "model: one\nport: 1\nserved_model_name: [a, b]\nenable_prefix_caching: false\napi_key: x\nseed: 5\n"
    words = ["--port", "2", "--served-model-name", "c", "--enable-prefix-caching", "--api-key", "y"]
    engine, server, _ = read(text, *words)
    assert (server.port, server.served_model_name, server.api_key) == (2, ("c",), ("y",))
    assert engine.cache.enable_prefix_caching
    assert (engine.model.model, engine.model.seed) == ("one", 5)
    assert read(text, "two")[0].model.model == "two"
    assert read(text, "--model", "two")[0].model.model == "two"


def test_a_later_file_wins_over_an_earlier_one(read, tmp_path):
    (tmp_path / "more.yaml").write_text("port: 2\n")
    engine, server, _ = read("port: 1\nseed: 3\n", f"--config={tmp_path / 'more.yaml'}")
    assert (engine.model.seed, server.port) == (3, 2)


def test_aliases_and_other_programs_flags(read):
    engine, _, notes = read("gpu-memory-utilization: 0.5\ntp_size: 2\ndisable-radix-cache: true\nenforce_eager: true\n")
    assert (engine.cache.device_memory_utilization, engine.parallel.tensor_parallel_size) == (0.5, 2)
    assert not engine.cache.enable_prefix_caching
    assert len(notes) == 1
    assert notes[0].startswith("--enforce-eager")
    assert read("enforce_eager: false\nenable-chunked-prefill: true\n")[2] == []


WRONG = {
    "port: 1\nmax_modl_len: 3\n": "line 2: unknown option max_modl_len; did you mean max-model-len?",
    "qqqqqqqqqqqq: 3\n": "line 1: unknown option qqqqqqqqqqqq.",
    "\n\nport: many\n": "line 3: argument --port: 'many' is not an integer",
    "port: [1, 2]\n": "line 1: port takes one value, not a list",
    "port: {a: 1}\n": "line 1: argument --port: '{\"a\": 1}' is not an integer",
    "port: 1\nPORT: 2\n": "line 2: unknown option PORT",
    "port: 1\nport: 2\n": "line 2: port is in line 1 already",
    "max-model-len: 1k\nmax_model_len: 2k\n": "line 2: max_model_len is in line 1 already",
    "strict_fields: maybe\n": "line 1: strict_fields is true or false, got 'maybe'",
    "strict_fields: 1\n": "line 1: strict_fields is true or false, got '1'",
    "--port: 1\n": "line 1: write port without dashes in front",
    "config: other.yaml\n": "line 1: config is for the command line only",
    "help: true\n": "line 1: help is for the command line only",
    "dtype: half\n": "line 1: argument --dtype: half: no arithmetic in float16",
    "api_server_count: 2\n": "line 1: --api-server-count=2 is not supported"[:26],
    "enable_chunked_prefill: false\n": "line 1: --no-enable-chunked-prefill is not supported",
    "served_model_name: [a, [b]]\n": "line 1: served_model_name may hold a list of single values only",
    "[1, 2]: 3\n": "line 1: an option's name must be a word",
    "port: [1, 2\n": "line 2: this is not YAML: expected ',' or ']'",
    "port: !!python/object:os.system x\n": "this is not YAML: could not determine a constructor",
    "a list\n": "the file must hold option names with their values",
    "- port\n": "the file must hold option names with their values",
    "port: 1\n---\nport: 2\n": "this is not YAML",
    "port: \x00\n": "this is not YAML",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_said_with_its_line(read, text, tmp_path):
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert str(raised.value).startswith(str(tmp_path / "serve.yaml"))
    assert WRONG[text] in str(raised.value)
    assert "python/object" not in str(raised.value) or "constructor" in str(raised.value)


def test_a_file_that_cannot_be_read(tmp_path, capsys):
    assert cli.main(["serve", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml cannot be read: No such file" in capsys.readouterr().err
    assert cli.main(["serve", "--config", str(tmp_path)]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert cli.main(["serve", f"--config={tmp_path / 'binary'}"]) == 2
    assert "is not a text file in UTF-8" in capsys.readouterr().err
    assert cli.main(["serve", "--config"]) == 2
    assert "--config: expected one argument" in capsys.readouterr().err


def test_what_a_command_requires_may_come_from_the_file(tmp_path, capsys):
    (tmp_path / "batch.yaml").write_text(
        f"input-file: {tmp_path / 'none'}\noutput-file: {tmp_path / 'out'}\nunordered: true\n"
    )
    assert cli.main(["batch", "--config", str(tmp_path / "batch.yaml")]) == 2
    assert "none cannot be read: No such file" in capsys.readouterr().err


def test_a_file_for_serve_does_for_check(tmp_path, capsys):
    (tmp_path / "serve.yaml").write_text("port: 80\napi-key: [secret]\nhost: 0.0.0.0\nmax_num_seqs: 0\n")
    assert cli.main(["check", "--config", str(tmp_path / "serve.yaml")]) == 2
    assert "--max-num-seqs must be at least 1" in capsys.readouterr().err
