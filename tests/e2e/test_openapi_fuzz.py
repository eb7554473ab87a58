"""Random requests, valid and invalid, made from /openapi.json: none may hurt the server."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from fakes import FakeRunner, live_server, parse_events
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from tpu_serve.config import ServerConfig
from tpu_serve.server.app import create_app
from tpu_serve.server.state import ServerState

NUM_EXAMPLES = {
    "POST /v1/chat/completions": 30,  # whose bodies take longest to make up
    "POST /v1/completions": 80,
    "POST /v1/responses": 40,
    "POST /invocations": 40,
    "POST /tokenize": 40,
    "POST /detokenize": 40,
    "GET /v1/models/{id}": 30,
}
NUM_OTHER_EXAMPLES = 5
NUM_HAND_MADE = 250
"""Requests put together from known values, since few of those made from the document are valid."""
SECONDS = 5.0
"""For any answer."""
SILENT = frozenset({"/start_profile", "/stop_profile"})


def document() -> dict[str, Any]:
    config = ServerConfig()
    described = create_app(config, ServerState(config, ("tiny",), "fake/root")).openapi()
    return {**described, "paths": {path: entry for path, entry in described["paths"].items() if path not in SILENT}}


def operations() -> list[Any]:
    generation = GenerationConfig(modes=list(GenerationMode))
    config = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=generation)))
    schema = schemathesis.openapi.from_dict(document(), config=config)
    return [result.ok() for result in schema.get_all_operations()]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with live_server(runner=FakeRunner()) as (url, _):
        yield url


def test_the_reader_of_the_document_finds_every_operation():
    names = {(operation.method.upper(), operation.path) for operation in operations()}
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/invocations",
    ):
        assert ("POST", path) in names
    assert ("GET", "/v1/models/{id}") in names
    assert len(names) >= 15


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.label)
@pytest.mark.filterwarnings("ignore")
def test_random_requests_do_no_harm(operation: Any, server: str):
    statuses: Counter[int] = Counter()
    strategies = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

    @hypothesis.settings(
        max_examples=NUM_EXAMPLES.get(operation.label, NUM_OTHER_EXAMPLES),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(hypothesis.strategies.one_of(strategies))
    def run(case: Any) -> None:
        started = time.monotonic()
        response = case.call(base_url=server, timeout=SECONDS)
        statuses[response.status_code] += 1
        assert time.monotonic() - started < SECONDS
        # This model says what it wants, whatever it is held to; the server sees that and ends the request.
        is_disobedient = "request_failed" in response.text and "Token " in response.text
        assert response.status_code < 500 or response.status_code in (501, 503) or is_disobedient, response.text
        assert response.status_code != 503 or "queue_full" in response.text, response.text
        if response.status_code >= 400 and case.method != "HEAD":
            error = json.loads(response.content)["error"]
            assert error["message"]
            assert error["reason"]
            assert "Traceback" not in error["message"]
            assert len(response.content) < 20_000

    run()
    assert sum(statuses.values()) >= 1
    check_that_nothing_is_left(server)


VALID: dict[str, list[Any]] = {
    "max_tokens": [1, 7, 10_000],
    "temperature": [None, 0, 0.7, 2],
    "top_p": [0.1, 1],
    "top_k": [-1, 0, 5, 10_000],
    "min_p": [0, 1],
    "n": [1, 3],
    "seed": [0, -1, 2**63 - 1],
    "stop": [None, "zz", ["a", "bc"]],
    "stop_token_ids": [[], [7]],
    "ignore_eos": [True, False],
    "presence_penalty": [-2, 1.5],
    "repetition_penalty": [0.5, 2],
    "logit_bias": [{}, {"5": -100, "6": 3}],
    "min_tokens": [0, 1],
    "stream": [True, False],
    "skip_special_tokens": [True, False],
    "return_token_ids": [True],
    "user": ["somebody"],
    "unknown_field": [{"a": [1]}],
    "cache_salt": ["salt"],
    "truncate_prompt_tokens": [1, -1],
}
INVALID: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.5, "7", {}],
    "temperature": [-1, 3, "hot", [], 1e400],
    "top_p": [0, 2],
    "top_k": [-2, 0.5],
    "n": [0, 10**6],
    "seed": [2**63, "x"],
    "stop": ["", [1], ["x"] * 50],
    "stop_token_ids": [[-1], [10**9], "x"],
    "logit_bias": [{"x": 1}, {"99999": 1}, {"1": 1000}, []],
    "min_tokens": [-1, 10**6],
    "presence_penalty": [9],
    "model": ["nobody", 5],
    "cache_salt": ["", "/"],
    "stream": ["yes"],
}


@hypothesis.strategies.composite
def bodies(draw: hypothesis.strategies.DrawFn) -> tuple[str, dict[str, Any], bool]:
    """A path, a body for it, and whether it is valid."""
    path, start = draw(
        hypothesis.strategies.sampled_from(
            [
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/completions", {"prompt": ["a", "é😀", "b"]}),
                ("/v1/completions", {"prompt": [1, 2, 3]}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/chat/completions", {"messages": [{"role": "system", "content": ""}] * 3}),
                ("/invocations", {"prompt": "hi"}),
            ]
        )
    )
    names = draw(hypothesis.strategies.sets(hypothesis.strategies.sampled_from(sorted(VALID)), max_size=8))
    body = {
        **start,
        "max_tokens": 5,
        **{name: draw(hypothesis.strategies.sampled_from(VALID[name])) for name in sorted(names)},
    }
    wrong = draw(hypothesis.strategies.none() | hypothesis.strategies.sampled_from(sorted(INVALID)))
    if wrong is not None:
        body[wrong] = draw(hypothesis.strategies.sampled_from(INVALID[wrong]))
    return path, body, wrong is None


def test_random_valid_requests_are_answered_and_random_wrong_ones_refused(server: str):
    statuses: Counter[int] = Counter()

    @hypothesis.settings(
        max_examples=NUM_HAND_MADE,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(bodies())
    def run(made: tuple[str, dict[str, Any], bool]) -> None:
        path, body, is_valid = made
        content = json.dumps(body)
        response = client.post(f"{server}{path}", content=content, headers={"content-type": "application/json"})
        statuses[response.status_code] += 1
        if is_valid:
            assert response.status_code == 200, response.text
            if body.get("stream"):
                assert "error" not in [key for event in parse_events(response.text) for key in event]
            else:
                assert len(response.json()["choices"]) == body.get("n", 1) * (
                    3 if len(body.get("prompt", "")) == 3 and "a" in body["prompt"] else 1
                )
        else:
            assert response.status_code in (400, 404), response.text
            assert response.json()["error"]["param"] in (*INVALID, "prompt")

    with httpx.Client(timeout=SECONDS) as client:
        run()
    assert statuses[200] > NUM_HAND_MADE // 5
    assert statuses[400] > NUM_HAND_MADE // 5
    check_that_nothing_is_left(server)


def check_that_nothing_is_left(server: str) -> None:
    """No request, page or thread of work is left, and a control request answers."""
    with httpx.Client(base_url=server) as client:
        until_idle(client)
        answer = client.post("/v1/completions", json={"prompt": "control", "max_tokens": 3})
    assert answer.status_code == 200
    assert threading.active_count() < 60


def until_idle(client: httpx.Client) -> None:
    deadline = time.monotonic() + 3
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while True:
        metrics = client.get("/metrics").text
        left = [
            line
            for line in metrics.splitlines()
            if line.startswith(tuple(f"vllm:{name}{{" for name in gauges)) and not line.endswith(" 0.0")
        ]
        if not left and client.get("/load").json() == {"server_load": 0}:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
