"""A server, and a Python program, on several devices that nobody has set up."""

import subprocess
import sys

import httpx
import pytest
from test_laws import Server

SMALL = ("--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--token-buckets", "32")


@pytest.fixture(autouse=True)
def _nothing_is_set_up(monkeypatch):
    for name in ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_serve_on_two_devices():
    server = Server("--tensor-parallel-size", "2", *SMALL)
    try:
        log = "".join(server.lines)
        assert "on each of 2 cpu devices" in log
        assert (
            "ragged on each of 2 devices (ragged by rule, not measured; not fused: on a CPU the kernel is only simulated)"
            in log
        )
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    finally:
        assert server.stop() == 0


def test_a_program_that_has_used_jax_before_is_told_what_to_set():
    program = "import jax; jax.devices()\nfrom tpu_serve import LLM\nLLM(tensor_parallel_size=2, load_format='dummy')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "--tensor-parallel-size 2 is more than the 1 cpu devices" in done.stderr
    assert "set JAX_NUM_CPU_DEVICES=2 and NPROC=" in done.stderr
