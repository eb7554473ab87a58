"""`benchmarks/soak.py`: a short soak of a server whose model is a script, and which runs it finds fault with."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from fakes import FakeRunner, live_server

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from processes import ServerFailed, free_port, resident_bytes, running
from soak import FLAT_BYTES, Soak, soak

MIB = 2**20


def good(**changes):
    memory = [(float(second), 1000 * MIB) for second in range(50)]
    counts = Counter({"answered": 5, "given up": 3, "refused with 503": 2})
    return Soak(**{"seconds": 50.0, "counts": counts, "memory": memory, "compiled": (4.0, 4.0), **changes})


def test_a_short_soak_of_a_sound_server():
    with live_server(runner=FakeRunner(seconds=0.002), max_num_queued=4, num_pages=65) as (url, _):
        found = asyncio.run(soak(url, os.getpid(), 2.0, 24, max_tokens=24))
    assert found.counts["answered"] > 0
    assert found.counts["given up"] > 0
    assert not any(what.startswith("unexpected") for what in found.counts), found.counts
    assert (found.running, found.waiting, found.kv_usage) == (0, 0, 0)
    assert found.most_kv_usage > 0
    assert len(found.memory) > 5


def test_a_run_without_a_fault():
    assert good().faults() == []
    assert good().text().endswith("all checks hold")
    filling = [(float(second), (100 * second if second < 10 else 1000) * MIB) for second in range(50)]
    assert good(memory=filling).faults() == [], "what the first fifth fills is no leak"
    assert good(memory=[(float(second), (1000 + second // 10 * 5) * MIB) for second in range(50)]).faults() == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kv_usage": 0.001}, "0.10% of the KV cache is in use"),
        ({"running": 1.0}, "1 requests run and 0 wait"),
        ({"waiting": 2.0}, "0 requests run and 2 wait"),
        ({"compiled": (4.0, 5.0)}, "1 programs were compiled while serving"),
        (
            {"memory": [(float(second), (1000 + second) * MIB) for second in range(50)]},
            "memory rose from 1014 to 1044 MiB",
        ),
        (
            {"counts": Counter({"answered": 5, "given up": 1, "unexpected status 500: b''": 1})},
            "1 answers: unexpected status 500",
        ),
        ({"counts": Counter({"given up": 1})}, "not one request was answered"),
        ({"counts": Counter({"answered": 1})}, "not one request was given up"),
    ],
)
def test_every_fault_is_found(changes, fault):
    (found,) = good(**changes).faults()
    assert fault in found
    assert "1 checks do not hold" in good(**changes).text()


def test_the_limit_of_small_processes_is_in_bytes():
    memory = [(float(second), 100 * MIB + (FLAT_BYTES if second >= 25 else 0)) for second in range(50)]
    assert good(memory=memory).faults() == []


def test_memory_of_children_counts():
    eats = "import time; held = bytearray(64 * 2**20); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {eats!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        ends = time.monotonic() + 60
        while resident_bytes(process.pid) < 64 * MIB:
            assert time.monotonic() < ends, "the child's memory is not seen"
            time.sleep(0.05)
        own = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert own < 64 * MIB
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_that_does_not_answer_is_ended_with_its_children(tmp_path):
    note = tmp_path / "child"
    child = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with (
        pytest.raises(ServerFailed, match="did not answer in time"),
        running([sys.executable, "-c", parent], free_port(), ready_body=b"{}", timeout_s=5.0),
    ):
        raise AssertionError("nothing answers")
    pid, ends = int(note.read_text()), time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < ends, "the child still runs"
        time.sleep(0.05)


def test_a_server_that_ends_says_why():
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(ServerFailed, match="it ended with 1: no such model"),
        running(command, free_port(), ready_body=b"{}"),
    ):
        raise AssertionError("nothing answers")
