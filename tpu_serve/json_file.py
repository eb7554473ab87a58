"""Reading one JSON object from a file, with errors that say where it is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpu_serve.config import ConfigError


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
      ConfigError: the file is missing, unreadable, not JSON (with the line) or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{file.parent} has no {file.name}; is it a Hugging Face model folder?") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not JSON: byte {error.start} is not UTF-8.") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(value).__name__}.")
    return value
