"""What commands that talk to a server take from the environment."""

from __future__ import annotations

import os

DEFAULT_URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLES = ("TPU_SERVE_API_KEY", "OPENAI_API_KEY")


def client_api_key(given: str | None) -> str | None:
    """The key to send: the given one, or that of the first variable that is set."""
    return given or next((key for name in KEY_VARIABLES if (key := os.environ.get(name))), None)
