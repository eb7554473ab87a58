"""The command line as a whole: quick, one line per error, the right exit codes."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_serve.cli import main as cli
from tpu_serve.config import ConfigError

ROOT = Path(__file__).parents[2]
COMMANDS = [
    [],
    ["serve"],
    ["batch"],
    ["run-batch"],
    ["check"],
    ["bench"],
    ["bench", "prefill"],
    ["bench", "decode"],
    ["bench", "kernels"],
    ["bench", "moe"],
    ["plan"],
    ["tune"],
    ["convert"],
    ["chat"],
    ["complete"],
    ["doctor"],
    ["collect-env"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_every_command(words, capsys):
    assert cli.main([*words, "--help"]) == 0
    shown = capsys.readouterr()
    assert "usage: tpu-serve" in shown.out
    assert not shown.err


def test_help_shows_only_what_holds_a_word(capsys):
    assert cli.main(["serve", "--help=PREFIX_cach"]) == 0
    shown = capsys.readouterr().out
    assert "--enable-prefix-caching" in shown
    assert "--port" not in shown
    assert cli.main(["serve", "--help=zzz"]) == 0
    assert "No option of tpu-serve serve holds 'zzz'" in capsys.readouterr().out


def test_words_after_help_do_not_matter(capsys):
    assert cli.main(["serve", "--help", "folder"]) == 0
    assert "--port" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tpu-serve ")
    assert cli.main(["-v"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: COMMAND"),
        (["serv"], "unknown command 'serv'; did you mean serve? there are serve, chat,"),
        (["frobnicate"], "unknown command 'frobnicate'; there are"),
        (["bench", "prefil"], "unknown command 'prefil'; did you mean prefill?"),
        (["serve", "--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["batch", "-i", "x"], "required: -o/--output-file"),
        (["bench"], "required: BENCHMARK"),
        (["bench", "prefill", "--num-iters", "0"], "'0' is not a positive integer"),
        (["bench", "decode", "--enable-prefix-cache"], "unknown flag --enable-prefix-cache"),
        (["batch", "-i", "x", "-o", "y", "--output-fil", "z"], "did you mean --output-file?"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(words, message, capsys):
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith("tpu-serve: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def with_command(run, monkeypatch):
    class Command:
        @staticmethod
        def register(subparsers):
            parser = subparsers.add_parser("try")
            parser.set_defaults(run=run, parser=parser)

    monkeypatch.setattr(cli, "COMMANDS", (Command,))


@pytest.mark.parametrize(("error", "code"), [(ConfigError("it\ndoes not fit"), 2), (KeyboardInterrupt(), 130)])
def test_an_exception_becomes_an_exit_code(error, code, monkeypatch, capsys):
    def run(arguments):
        raise error

    with_command(run, monkeypatch)
    assert cli.main(["try"]) == code
    assert capsys.readouterr().err in ("tpu-serve: error: it does not fit\n", "tpu-serve: interrupted\n")


def test_the_exit_code_is_the_command_s(monkeypatch):
    with_command(lambda arguments: 7, monkeypatch)
    assert cli.main(["try"]) == 7


def test_help_imports_nothing_heavy_and_is_quick():
    program = (
        "import sys; from tpu_serve.cli.main import main; code = main(['serve', '--help'])\n"
        "heavy = {'asyncio', 'jax', 'jaxlib', 'numpy', 'fastapi', 'starlette', 'uvicorn', 'pydantic', 'tokenizers', 'jinja2', 'tqdm', "
        "'huggingface_hub', 'safetensors', 'yaml', 'http.client', 'ssl'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    seconds = []
    for _ in range(3):
        before = processor_seconds()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds.append(processor_seconds() - before)
        assert done.stderr == "[]\n"
    assert min(seconds) < 1  # 0.25 on a quiet machine; importing jax alone takes more than this


def processor_seconds():
    """Of child processes: unlike the clock on the wall it does not count what else the machine does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_server_py_is_serve():
    done = subprocess.run(
        [sys.executable, str(ROOT / "server.py"), "--help=port"], capture_output=True, text=True, check=True
    )
    assert "--port" in done.stdout
    assert "usage: tpu-serve batch" not in done.stdout
    done = subprocess.run([sys.executable, str(ROOT / "server.py"), "--prot"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "tpu-serve: error: unknown flag --prot; did you mean --port?\n")


def test_a_model_folder_that_served_model_name_swallowed_is_refused(tmp_path, capsys):
    assert cli.main(["serve", "--served-model-name", "gpt", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"--served-model-name took the folder {tmp_path} as a name" in error
    assert f"--model {tmp_path}" in error
