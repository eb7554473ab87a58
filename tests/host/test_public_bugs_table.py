"""Every bug of the table has a test that is there, and every case a row."""

import ast
import functools
from pathlib import Path

import pytest
from bug_cases import CHATTED, REFUSED, SAID
from public_bugs import PUBLIC_BUGS

TESTS = Path(__file__).parents[1]
CASES = {"test_refused": REFUSED, "test_said": SAID, "test_chatted": CHATTED}


@functools.cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_numbers_are_unique_and_without_gaps():
    assert [bug.number for bug in PUBLIC_BUGS] == list(range(1, 56))


@pytest.mark.parametrize("bug", PUBLIC_BUGS, ids=lambda bug: str(bug.number))
def test_the_tests_of_a_bug_are_there(bug):
    assert bug.tests
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert name in functions(file), test
        if name in CASES:
            assert bug.number in {case.number for case in CASES[name]}, f"{name} has no case of it"


def test_every_case_belongs_to_a_bug():
    for name, cases in CASES.items():
        named = {bug.number for bug in PUBLIC_BUGS if any(test.endswith(f"::{name}") for test in bug.tests)}
        assert {case.number for case in cases} == named
