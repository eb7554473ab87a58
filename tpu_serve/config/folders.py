"""Where this program keeps what it makes for the user."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Of this program among those of the user's others."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tpu-serve"
