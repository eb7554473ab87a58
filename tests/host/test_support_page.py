"""docs/support.md is what the code declares, and what it says is served is shown by tests that are there."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest
import support_table

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


@functools.cache
def source(file: str) -> str:
    return (TESTS / file).read_text(encoding="utf-8")


@functools.cache
def functions(file: str) -> frozenset[str]:
    return frozenset(
        node.name for node in ast.parse(source(file)).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_the_page_is_what_the_code_declares():
    spec = importlib.util.spec_from_file_location("make_support_matrix", ROOT / "scripts" / "make_support_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    served = {name for body in module.BODIES.values() for model in body for name in model.model_fields}
    assert set(support_table.FIELDS) == served, "tests/support_table.py names the tests of every field, and of no other"
    assert set(support_table.ENDPOINTS) == set(module.endpoints())
    assert set(support_table.MODELS) == set(module.MODELS)
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == module.page(), "run scripts/make_support_matrix.py"
    for link in re.findall(r"\]\((\.\./[^)]+)\)", page):
        assert (ROOT / "docs" / link).exists(), link


@pytest.mark.parametrize("kind", ["FIELDS", "ENDPOINTS"])
def test_tests_are_there_and_speak_of_what_they_show(kind: str):
    for name, tests in getattr(support_table, kind).items():
        assert tests, name
        word = re.compile(rf"\b{re.escape(name.split(' ')[-1].partition('{')[0].strip('/'))}\b")
        mentioned = False
        for test in tests:
            file, _, function = test.partition("::")
            assert not function or function in functions(file), test
            # A field may stand in a table that several tests share.
            mentioned |= bool(word.search(source(file))) or "bug_cases" in source(file)
        assert mentioned, f"no test of {name} has it in its file"
