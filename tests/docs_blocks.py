"""The code in the documentation, so that tests can run it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
ADDRESS = "http://127.0.0.1:8000"
"""Of the server that examples talk to."""


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str

    @property
    def is_curl(self) -> bool:
        return self.language == "bash" and self.text.startswith("curl")

    @property
    def needs_server(self) -> bool:
        return ADDRESS in self.text


def blocks() -> list[Block]:
    """Every fenced block, in order."""
    return [
        Block(page, match[1], match[2])
        for page in PAGES
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    ]


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every command in them that is not sent to a server; continued lines are joined and comments left out."""
    return [
        (block.page.name, re.sub(r"\s+#.*", "", line).strip())
        for block in blocks()
        if block.language == "bash" and not block.is_curl
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip()
    ]
