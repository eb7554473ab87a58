"""Result files of benchmarks: one JSON document, or several one after the other, as `--append-result` leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpu_serve.config import ConfigError


def read_documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a file, at least one.

    Raises:
      ConfigError: it cannot be read, or is not made of JSON objects.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not JSON.") from None
    decoder, documents, place = json.JSONDecoder(), [], 0
    try:
        while text[place:].strip():
            place += len(text[place:]) - len(text[place:].lstrip())
            value, place = decoder.raw_decode(text, place)
            documents.append(value)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise ConfigError(f"{path} is no result of a benchmark: it does not hold JSON objects.")
    return documents
