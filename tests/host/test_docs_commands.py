"""Commands, options and files of the documentation are those of the program; what talks to a server is run by test_laws, Python by test_llm."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator

import pytest
from docs_blocks import PAGES, ROOT, Block, blocks, commands

from tpu_serve.cli.main import _parser

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OTHERS = {"--help", "--version"}
"""Options of every command."""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in set(action.choices.values()):
                yield from parsers(child)


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"{block.page.stem}-{block.language}")
def test_every_block_is_of_a_kind_that_is_tested(block: Block):
    assert block.language in ("bash", "python", "yaml", "json"), block.text
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "python":
        compile(block.text, block.page.name, "exec")
        assert "from tpu_serve import LLM" in block.text or block.needs_server
    elif block.is_curl:
        assert block.needs_server


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_is_understood(page: str, line: str):
    program, *words = shlex.split(line)
    if program == "tpu-serve":
        _parser().read(words)
    elif program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        target, *variables = words
        assert target in targets
        for name, value in (variable.split("=", 1) for variable in variables):
            assert name == "ARGS"
            _parser().read(["serve", *shlex.split(value)])
    else:
        assert (program, words[0]) == ("pip", "install"), f"{page}: {line}"


def test_every_configuration_file_is_understood(tmp_path):
    files = [block for block in blocks() if block.language == "yaml"]
    assert files
    for block in files:
        path = tmp_path / "config.yaml"
        path.write_text(block.text)
        _parser().read(["serve", "--config", str(path)])


def test_every_option_that_is_named_exists():
    known = OTHERS | {
        flag for parser in parsers(_parser()) for action in parser._actions for flag in action.option_strings
    }
    for page in PAGES:
        unknown = set(FLAG.findall(page.read_text(encoding="utf-8"))) - known
        assert not unknown, f"{page.name}: {sorted(unknown)}"
