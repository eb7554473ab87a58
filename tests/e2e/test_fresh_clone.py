"""The README's first command on a fresh clone in a new virtual environment."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_serve_on_a_fresh_clone(tmp_path):
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a git checkout: there is nothing to clone")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS"))
    }
    process = subprocess.Popen(
        ["make", "serve", "ARGS=--port 0"],
        cwd=clone,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        log = []
        for line in process.stderr:
            log.append(line)
            if match := re.search(r"Serving \S+ at (http://\S+) after", line):
                break
        else:
            pytest.fail("the server did not start:\n" + "".join(log))
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        answer = httpx.post(f"{match[1]}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.stderr.close()
        process.wait(timeout=60)
