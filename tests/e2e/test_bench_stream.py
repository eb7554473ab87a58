"""`bench stream` streams what it says through the whole server, in memory and through a socket. How long that takes is not asked here."""

import json

import pytest

from tpu_serve.bench.stream import CASES, StreamPlan, bench_stream
from tpu_serve.bench.stream_core import script
from tpu_serve.cli.bench_stream import _host
from tpu_serve.cli.main import main
from tpu_serve.config import EMBEDDED_MODEL, ConfigError
from tpu_serve.text.tokenizer import Tokenizer

SMALL = ["--num-streams", "3", "--num-tokens", "24", "--num-warmups", "2", "--repeat", "1"]


def test_every_case_runs_and_its_result_can_be_compared(tmp_path, capsys):
    files = [tmp_path / name for name in ("before.json", "after.json")]
    assert main(["bench", "stream", *SMALL, "--output-json", str(files[0])]) == 0
    assert main(["bench", "stream", *SMALL, "--case", "chat", "completions", "--output-json", str(files[1])]) == 0
    shown = capsys.readouterr().out
    before, after = (json.loads(file.read_text()) for file in files)
    assert list(before["num_bytes"]) == list(CASES)
    assert all(name in shown for name in CASES)
    for document in (before, after):
        (figures,) = document["repeats"]
        assert list(figures) == [f"{name}_us_per_token" for name in document["num_bytes"]]
        assert all(value > 0 for value in figures.values())
    # A role, a text or nothing for each token, and the end: never more than one message a token.
    sends = before["num_sends"]
    assert sends["chat_socket"] == 0
    assert 3 * 4 < sends["chat"] <= 3 * (24 + 2)
    assert sends["completions"] <= 3 * (24 + 1)
    assert before["num_bytes"]["chat_usage"] > before["num_bytes"]["chat"] + 3 * 20 * len('"usage"')
    assert before["num_bytes"]["chat_socket"] > before["num_bytes"]["chat"], "chunks have their sizes there"
    assert before["num_bytes"]["completions"] == after["num_bytes"]["completions"]
    main(["bench", "compare", *map(str, files)])
    assert "completions_us_per_token" in capsys.readouterr().out


def test_a_stream_that_fails_is_an_error():
    class Broken:
        def __init__(self, config, engine):
            self._real = _host(config, engine)

        async def app(self, scope, receive, send):
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b"no luck"})

        async def close(self):
            await self._real.close()

    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    with pytest.raises(RuntimeError, match="answered 503: no luck"):
        bench_stream(Broken, tokenizer, "m", StreamPlan(2, 16, 2, 1), ["chat"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-tokens", "6", "--num-warmups", "4"], "--num-tokens 6 leaves nothing to measure"),
        (["--case", "chatt"], "--case chatt is not known; there are chat, "),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, capsys):
    assert main(["bench", "stream", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_script_has_its_parts_in_equal_shares():
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    ids = script(tokenizer, ("aaaa", "b"), 10)
    assert len(ids) == 10
    assert set(tokenizer.decode(ids[:5])) == {"a"}
    assert set(tokenizer.decode(ids[5:])) == {"b"}
    with pytest.raises(ConfigError, match="1 tokens are not enough for the 2 parts"):
        script(tokenizer, ("a", "b"), 1)
