"""What is refused and in which words, what is kept, and workers that hang or die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import VOCAB_SIZE, byte_tokenizer
from llguidance import LLParserLimits

from tpu_serve.constraint import compiler as compiler_module
from tpu_serve.constraint.check_process import CheckFailed, CheckProcess, CheckTimeout
from tpu_serve.constraint.compiler import GrammarCompiler, GrammarSpec
from tpu_serve.constraint.masks import ids_of
from tpu_serve.request import InvalidRequest

END = 256


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (END,))
    yield compiler
    compiler.close()


def nested(depth: int) -> Any:
    value: Any = {"type": "integer"}
    for _ in range((depth - 1) // 2):
        value = {"type": "array", "prefixItems": [value]}
    return value


def refusal(compiler: GrammarCompiler, kind: Any, value: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile_now(GrammarSpec(kind, value), "form")
    error = caught.value
    assert (error.param, error.status) == ("form", 400)
    assert len(error.message) < 600
    assert not re.search(r"\.rs\b|\.py\b|site-packages|\n", error.message)
    return error


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "", "must be a text that is not empty"),
        ("regex", None, "must be a text that is not empty"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a{2", "repetition"),
        ("regex", r"[^\s\S]", "no text can begin as it asks"),
        ("regex", "(" * 300 + "a" + ")" * 300, "nest"),
        ("grammar", "", "must be a text that is not empty"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", "start: ((", "Expected"),
        ("grammar", "root ::= nothing", "nothing"),
        ("grammar", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000, "too deeply nested"),
        ("grammar", 'root ::= ' + "(" * 50_000 + '"a"' + ")" * 50_000, "recursion"),
        ("choice", [], "at least one text"),
        ("choice", "abc", "at least one text"),
        ("choice", ["a", 1], "at least one text"),
        ("choice", ["\ud800"], "not valid JSON or Unicode"),
        ("json_schema", {"type": "not-a-type"}, "Invalid type: not-a-type"),
        ("json_schema", '{"type": ', "not valid JSON"),
        ("json_schema", [1], "an object or a boolean"),
        ("json_schema", None, "an object or a boolean"),
        ("json_schema", False, "schema is false"),
        ("json_schema", {"type": "string", "format": "nonsense"}, "Unknown format: nonsense"),
        ("json_schema", {"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ("json_schema", {"$ref": "#"}, "no text can begin as it asks"),
        ("json_schema", {"anyOf": [{"$ref": "#"}]}, "no text can begin as it asks"),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "no text can"),
        ("json_schema", {"$ref": "#/$defs/missing"}, "missing"),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 4}, "greater than maximum"),
        ("json_schema", {1, 2}, "not valid JSON or Unicode"),
        ("structural_tag", "[]", "must be an object"),
        ("structural_tag", {"format": {"type": "poem"}}, "format.type is 'poem'; known are const_string"),
        ("structural_tag", {"structures": [], "triggers": ["<"]}, "must be a list that is not empty"),
        ("structural_tag", {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}, "begins with none of the triggers"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(compiler: GrammarCompiler, kind: Any, value: Any, words: str) -> None:
    error = refusal(compiler, kind, value)
    assert words.lower() in error.message.lower()
    assert error.reason == "invalid_grammar"


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("json_schema", nested(67), "nests more than 64 objects and lists"),
        ("json_schema", "[" * 65 + "]" * 65, "nests more than 64"),
        ("regex", "a" * 262_145, "is 262,145 characters long; at most 262,144"),
        ("choice", ["a" * 262_144], "characters long"),
        ("json_schema", {"enum": ["é" * 300_000]}, "characters long"),
    ],
)
def test_limits(compiler: GrammarCompiler, kind: Any, value: Any, words: str) -> None:
    error = refusal(compiler, kind, value)
    assert words in error.message
    assert error.reason == "grammar_too_large"


def test_the_largest_and_the_deepest_that_are_allowed(compiler: GrammarCompiler) -> None:
    compiler.compile_now(GrammarSpec("json_schema", nested(63)), "form")
    compiler.compile_now(GrammarSpec("regex", "a" * 262_144), "form")
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        compiler.compile_now(GrammarSpec("json_schema", "[" * 200_000), "form")


def test_a_schema_that_never_ends_goes_on(compiler: GrammarCompiler) -> None:
    """It can be begun, so it is: max_tokens ends it."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    constraint = compiler.compile_now(GrammarSpec("json_schema", schema), "form")
    for byte in b'{"a":' * 300:
        constraint.accept(byte)
    assert END not in ids_of(constraint.mask or b"")
    assert not constraint.is_finished


@pytest.mark.parametrize(
    "pattern",
    ["((a{1,1000}){1,1000}){1,1000}", "(a+)+(a|aa)+b", ".*a.{200}b.{200}c.{300}", "(.*a){300}", "(" + "|".join(f"(.*w{i}.*)" for i in range(500)) + ")"],
)  # fmt: skip
def test_patterns_made_to_be_slow(compiler: GrammarCompiler, pattern: str) -> None:
    """They compile at once or are refused, and no step of them takes long: every one of them holds up all requests."""
    began = time.monotonic()
    constraint = compiler.compile_now(GrammarSpec("regex", pattern), "form")
    with contextlib.suppress(ValueError):  # it may give up, which ends that request
        for _ in range(100):
            constraint.accept(ord("a"))
    assert time.monotonic() - began < 20


def test_equal_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    check = CheckProcess.check
    monkeypatch.setattr(
        CheckProcess, "check", lambda self, *args, **options: checks.append(args) or check(self, *args, **options)
    )
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (END,), max_cached=2)

    def compiled(*values: Any) -> int:
        before = len(checks)
        for value in values:
            compiler.compile_now(GrammarSpec("json_schema", value), "form")
        return len(checks) - before

    assert compiled({"type": "null"}, {"type": "null"}) == 1
    assert compiled({"enum": ["a", "b"]}, {"enum": ["b", "a"]}) == 2, "the order counts"
    assert compiled({"enum": ["b", "a"]}, {"enum": ["a", "b"]}) == 0
    assert compiled({"type": "null"}) == 1, "only two are kept"
    assert compiled({"enum": ["a", "b"]}) == 0, "those that were used last"
    # A text of JSON and the value are not the same to every kind.
    compiler.compile_now(GrammarSpec("regex", "null"), "form")
    assert compiled("null" and '{"type": "null"}') == 1
    compiler.close()


class Hanging(CheckProcess):
    """Never answers, and is not waited for as long as others; in its place stands a program that sleeps."""

    made: list[int] = []  # noqa: RUF012

    def __init__(self, description: dict[str, object]):
        super().__init__(description, ("-c", "import time; time.sleep(600)"))
        Hanging.made.append(self.pid)

    def check(self, grammar: str, *, translate: bool, seconds: float) -> dict[str, str]:
        return super().check(grammar, translate=translate, seconds=0.5)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_grammar_whose_limit_is_used_up_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies share the states that the library has made, so the limit on them would hold for all requests together."""
    monkeypatch.setattr(compiler_module, "limits", lambda: LLParserLimits(max_lexer_states=1000, verbose_errors=False))
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (END,))
    try:
        spec, generator = GrammarSpec("regex", "[ab]*a[ab]{14}"), random.Random(0)
        for _ in range(3):
            constraint, other = compiler.compile_now(spec, "form"), compiler.compile_now(spec, "form")
            other.accept(ord("b"))
            with pytest.raises(ValueError, match="too many states"):
                for _ in range(10_000):
                    constraint.accept(generator.choice(b"ab"))
    finally:
        compiler.close()


def test_a_worker_that_hangs_is_ended_and_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (END,), max_seconds=60, num_workers=1)

    async def both() -> None:
        monkeypatch.setattr(compiler_module, "CheckProcess", Hanging)
        slow = asyncio.create_task(compiler.compile(GrammarSpec("regex", "a"), "form"))
        while not Hanging.made:
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        waiting = asyncio.create_task(compiler.compile(GrammarSpec("regex", "b"), "other"))
        with pytest.raises(InvalidRequest) as caught:
            await slow
        assert (caught.value.reason, caught.value.param) == ("grammar_too_slow", "form")
        assert "longer than 60 seconds" in caught.value.message
        assert ids_of((await waiting).mask or b"") == [ord("b")]

    asyncio.run(both())
    assert Hanging.made
    assert not any(map(is_running, Hanging.made))
    compiler.close()


def test_requests_behind_too_many_are_refused(monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler) -> None:
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 3)
    compiler.compile_now(GrammarSpec("choice", ["kept"]), "form")

    async def crowd() -> list[Any]:
        specs = [GrammarSpec("choice", [f"{index}"]) for index in range(6)]
        asked = [compiler.compile(spec, "form") for spec in [*specs, GrammarSpec("choice", ["kept"])]]
        return await asyncio.gather(*asked, return_exceptions=True)

    found = asyncio.run(crowd())
    refused = [answer for answer in found if isinstance(answer, InvalidRequest)]
    assert [(error.status, error.reason) for error in refused] == [(503, "overloaded")] * 3
    assert not isinstance(found[-1], Exception), "what is kept waits for nobody"
    assert asyncio.run(crowd())[:3] != refused


def test_a_worker_that_dies_is_an_error_of_that_request() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (END,))
    compiler.compile_now(GrammarSpec("regex", "a"), "form")
    os.kill(compiler._idle.queue[0].pid, 9)
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile_now(GrammarSpec("regex", "b"), "form")
    assert caught.value.reason == "grammar_too_large"
    assert compiler.compile_now(GrammarSpec("regex", "b"), "form").mask is not None
    compiler.close()


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise SystemExit", CheckFailed),
        ("print('not JSON')", CheckFailed),
        ("import time; time.sleep(60)", CheckTimeout),
    ],
)
def test_a_process_that_answers_nothing(program: str, error: type[Exception]) -> None:
    process = CheckProcess({}, ("-c", program))
    with pytest.raises(error):
        process.check("x" * 300_000, translate=False, seconds=0.5 if error is CheckTimeout else 30)
    assert not is_running(process.pid)


def test_workers_end_with_the_compiler() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (END,))
    compiler.warm_up()
    deadline = time.monotonic() + 30
    while compiler._idle.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = compiler._idle.queue[0].pid
    assert is_running(pid)
    compiler.close()
    assert not is_running(pid)
    compiler.warm_up()  # too late, and no error
    forgotten = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (END,))
    forgotten.compile_now(GrammarSpec("regex", "a"), "form")
    pid = forgotten._idle.queue[0].pid
    del forgotten
    assert not is_running(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_worker_is_small_and_takes_nothing_of_the_server(compiler: GrammarCompiler) -> None:
    compiler.compile_now(GrammarSpec("regex", "small"), "form")
    status = Path(f"/proc/{compiler._idle.queue[0].pid}/status").read_text()
    size = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    assert size < 100_000, f"{size} kB"


def test_cancelled_requests_leave_the_compiler_usable(compiler: GrammarCompiler) -> None:
    async def leave() -> None:
        tasks = [asyncio.create_task(compiler.compile(GrammarSpec("choice", [f"gone {i}"]), "form")) for i in range(8)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert compiler._num_waiting == 0
        assert (await compiler.compile(GrammarSpec("choice", ["here"]), "form")).mask is not None

    asyncio.run(leave())
