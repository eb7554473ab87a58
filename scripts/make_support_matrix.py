"""Writes docs/support.md from what the code declares and the tests show: `python scripts/make_support_matrix.py`. A test compares the two."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from tpu_serve.cli.foreign import Foreign
from tpu_serve.cli.foreign_table import ENGINE_FLAGS, SERVER_FLAGS
from tpu_serve.config import ServerConfig
from tpu_serve.models.registry import MODELS
from tpu_serve.server.app import create_app
from tpu_serve.server.parameters import HARMLESS, UNSUPPORTED
from tpu_serve.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from tpu_serve.server.responses_protocol import ResponseRequest
from tpu_serve.server.state import ServerState
from tpu_serve.server.unserved import UNSERVED

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "support.md"
BODIES: Mapping[str, tuple[type[BaseModel], ...]] = {
    "completions": (CompletionRequest,),
    "chat": (ChatCompletionRequest,),
    "responses": (ResponseRequest,),
    "tokenize": (TokenizeTextRequest, TokenizeChatRequest),
    "detokenize": (DetokenizeRequest,),
}
YES, NO = "yes", ""
TEXT = """\
# What is supported

Everything in these tables is declared in the code, and what is served names a test that shows it. Nothing else is understood: a field that is
not here is named in the response header `x-tpu-serve-ignored`, or refused with `--strict-fields`.

## Endpoints

| endpoint | shown by |
|---|---|
{served}

These answer 501 and say what to do instead:

| endpoint | what the answer says |
|---|---|
{unserved}

## Fields of requests

`/invocations` takes what `/v1/completions` and `/v1/chat/completions` take. Of [/v1/responses](https://platform.openai.com/docs/api-reference/responses)
those parts are served that need no memory.

| field | {columns} | shown by |
|---|{dashes}|---|
{fields}

Accepted with any value, since they never change an answer: {harmless}.

Known and refused with a 400, unless the value asks for nothing:

| field | what to do instead |
|---|---|
{refused}

## Models

| `model_type` of config.json | shown by |
|---|---|
{models}

## Flags of other servers

`tpu-serve serve --help` lists the options of this one. Flags of vLLM and sglang-jax that are none of them:

| flag | what becomes of it |
|---|---|
{flags}
"""


def page() -> str:
    """The page as it should be.

    Raises:
      KeyError: something is served and the table of tests has no row for it.
    """
    shown = table()
    fields = sorted({name for body in BODIES.values() for name in _fields(body)})
    return TEXT.format(
        served=_rows((f"`{name}`", _links(shown.ENDPOINTS[name])) for name in endpoints()),
        unserved=_rows(_grouped(UNSERVED)),
        columns=" | ".join(BODIES),
        dashes="|".join(["---"] * len(BODIES)),
        fields=_rows(
            (
                f"`{name}`",
                *(YES if name in _fields(body) else NO for body in BODIES.values()),
                _links(shown.FIELDS[name]),
            )
            for name in fields
        ),
        harmless=", ".join(f"`{name}`" for name in sorted(HARMLESS)),
        refused=_rows(_grouped({name: entry.hint for name, entry in UNSUPPORTED.items()})),
        models=_rows((f"`{name}`", _links([shown.MODELS[name]])) for name in sorted(MODELS)),
        flags=_rows(
            (", ".join(f"`{flag}`" for flag in row.flags), _fate(row)) for row in (*ENGINE_FLAGS, *SERVER_FLAGS)
        ),
    )


def table() -> ModuleType:
    """What tests/support_table.py declares."""
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "tests" / "support_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def endpoints() -> list[str]:
    """Method and path of everything that a server with all of its options answers."""
    config = ServerConfig(enable_tokenizer_info_endpoint=True, profile_dir="traces")
    paths = create_app(config, ServerState(config, ("model",), "model")).openapi()["paths"]
    return [f"{method.upper()} {path}" for path, operations in paths.items() for method in operations]


def _fields(models: Iterable[type[BaseModel]]) -> set[str]:
    return {name for model in models for name in model.model_fields}


def _grouped(hints: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names with the same hint in one row."""
    names: dict[str, list[str]] = {}
    for name, hint in hints.items():
        names.setdefault(hint, []).append(f"`{name}`")
    return [(", ".join(group), hint) for hint, group in names.items()]


def _fate(row: Foreign) -> str:
    """What becomes of a flag of another server, in words."""
    if row.sets:
        return f"sets {', '.join(f'`{name}` to `{value}`' for name, value in row.sets.items())}"
    if not row.says:
        return "is done in any case"
    return f"{'accepted: it ' if row.note else ''}{row.says}"


def _links(tests: Iterable[str]) -> str:
    """Links to tests, which are named as `FILE` or `FILE::NAME` under tests/."""
    parts = [test.partition("::") for test in tests]
    return "; ".join(f"[{_words(name or Path(file).stem)}](../tests/{file})" for file, _, name in parts)


def _words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _rows(rows: Iterable[tuple[Any, ...]]) -> str:
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


if __name__ == "__main__":
    sys.exit(PAGE.write_text(page(), encoding="utf-8") == 0)
