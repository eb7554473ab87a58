"""Log lines: as text, as JSON, and which of them there are."""

import json
import logging
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tpu_serve.config import ConfigError, ServerConfig
from tpu_serve.server.context import current_scope
from tpu_serve.server.logs import configure_logging, shown_prompt

OURS, ACCESS, HTTP = (logging.getLogger(name) for name in ("tpu_serve.x", "uvicorn.access", "uvicorn.error"))


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Configures logging, and gives what was written since as lines."""
    loggers = [logging.getLogger(name) for name in (None, "tpu_serve", "uvicorn.access", "uvicorn.error")]
    before = [(one, one.handlers[:], one.level, one.filters[:], one.disabled) for one in loggers]

    class Log:
        def configure(self, **options: Any) -> None:
            configure_logging(ServerConfig(**options))

        def lines(self) -> list[str]:
            return capsys.readouterr().err.splitlines()

        def entries(self) -> list[dict[str, Any]]:
            return [json.loads(line) for line in self.lines()]

    yield Log()
    logging.captureWarnings(False)
    for one, handlers, level, filters, disabled in before:
        one.handlers, one.filters, one.disabled = handlers, filters, disabled
        one.setLevel(level)


def ask(path: str, status: int = 200) -> None:
    ACCESS.info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", path, "1.1", status)


def test_a_json_line_is_one_object_whatever_it_says(log):
    log.configure(log_format="json")
    before = datetime.now(UTC)
    OURS.info("two\nlines of %s", 'a "é" \udc80')
    (entry,) = log.entries()
    time = datetime.fromisoformat(entry.pop("time"))
    assert abs((time - before).total_seconds()) < 5
    assert entry == {"level": "INFO", "logger": "tpu_serve.x", "message": 'two\nlines of a "é" \udc80'}


def test_exceptions_are_text_in_the_same_object(log):
    log.configure(log_format="json")
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        OURS.exception("It failed")
    OURS.error("no exception", exc_info=False)
    OURS.error("none at hand", exc_info=True)
    failed, plain, none = log.entries()
    assert failed["message"] == "It failed"
    assert failed["exception"].startswith("Traceback (most recent call last):\n")
    assert failed["exception"].endswith("ValueError: bad\nthing")
    assert "exception" not in plain
    assert "exception" not in none


def test_the_request_at_hand_is_named_as_the_body_named_it(log):
    log.configure(log_format="json")
    scope = {"type": "http", "state": {"request_id": "first"}}
    token = current_scope.set(scope)
    OURS.info("a")
    scope["state"]["request_id"] = "second"
    OURS.info("b")
    current_scope.reset(token)
    OURS.info("c")
    assert [entry.get("request_id") for entry in log.entries()] == ["first", "second", None]


def test_access_lines_have_their_parts(log):
    log.configure(log_format="json")
    ask("/v1/models?x=1", 404)
    (entry,) = log.entries()
    assert entry["message"] == '1.2.3.4:5 - "GET /v1/models?x=1 HTTP/1.1" 404'
    assert [entry[name] for name in ("client", "method", "path", "status")] == [
        "1.2.3.4:5", "GET", "/v1/models?x=1", 404,
    ]  # fmt: skip


def test_warnings_of_python_are_json_too(log):
    log.configure(log_format="json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)
    (entry,) = log.entries()
    assert "DeprecationWarning: old" in entry["message"]


def test_text_lines_are_level_time_and_message(log):
    log.configure()
    OURS.info("hello %d", 3)
    (line,) = log.lines()
    level, day, time, *message = line.split()
    assert (level, message) == ("INFO", ["hello", "3"])
    datetime.strptime(f"2024-{day} {time}", "%Y-%m-%d %H:%M:%S")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, ["/v1/models", "/metricsx"]),
        ({"disable_access_log": True}, []),
        (
            {"disable_access_log_for_endpoints": ("/v1/models,/metrics",)},
            ["/health?deep=1", "/ping", "/load", "/metricsx"],
        ),
        ({"uvicorn_log_level": "error"}, []),
        ({"log_level": "error", "uvicorn_log_level": "info"}, ["/v1/models", "/metricsx"]),
        (
            {"uvicorn_log_level": "debug"},
            ["/v1/models", "/health?deep=1", "/ping", "/metrics", "/metrics/", "/load", "/metricsx"],
        ),
        ({"log_level": "warning"}, []),
    ],
)
def test_which_access_lines_there_are(log, options, shown):
    log.configure(**options)
    for path in ("/v1/models", "/health?deep=1", "/ping", "/metrics", "/metrics/", "/load", "/metricsx"):
        ask(path)
    assert [line.split()[-3] for line in log.lines()] == shown


def test_levels_of_the_http_server_are_its_own(log):
    log.configure(uvicorn_log_level="critical")
    HTTP.error("theirs")
    OURS.error("ours")
    (line,) = log.lines()
    assert "ours" in line


@pytest.mark.parametrize(
    ("body", "most", "shown"),
    [
        ({"prompt": "secret words"}, 6, "'secret…'"),
        ({"prompt": "secret"}, 6, "'secret'"),
        ({"prompt": [1, 2, 3]}, 80, "'[1, 2, 3]'"),
        ({"messages": [{"role": "user", "content": "é\n"}]}, 80, """'[{"role": "user", "content": "é\\\\n"}]'"""),
        ({"input": "x"}, 8, "'x'"),
        ({}, 8, "''"),
        ([1], 8, "''"),
    ],
)
def test_a_prompt_is_shown_as_far_as_was_asked(body, most, shown):
    assert shown_prompt(body, most) == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_format": "yaml"}, "--log-format must be one of text, json, got 'yaml'."),
        ({"uvicorn_log_level": "loud"}, "--uvicorn-log-level must be one of debug, info, warning, error, critical"),
        ({"max_log_len": -1}, "--max-log-len must be at least 0, got -1."),
        ({"disable_access_log_for_endpoints": ("health",)}, "takes paths such as /health, got 'health'."),
        ({"metrics_prefix": "a:b"}, "--metrics-prefix must be letters, digits and _, got 'a:b'."),
        ({"otlp_traces_endpoint": "collector:4317"}, "must be an address as in http://localhost:4318/v1/traces"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError) as error:
        ServerConfig(**options)
    assert message in str(error.value)
