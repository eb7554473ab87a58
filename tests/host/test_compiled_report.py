"""What a report says beside the kernels: copies of XLA's, what the modelled time leaves out, compilers that are not wanted any more."""

import subprocess
import threading

import pytest

from tpu_serve.bench.compiled.compiler import copied_bytes
from tpu_serve.bench.compiled.report import report, untimed

HLO = """HloModule jit_f, is_scheduled=true

ENTRY %main.1 (x: bf16[8192,2048], w: f32[100,8]) -> bf16[4096,2048] {{
  %x = bf16[8192,2048]{{1,0:T(8,128)(2,1)}} parameter(0)
  {}
  ROOT %done = bf16[8192,2048]{{1,0:T(8,128)(2,1)S(1)}} copy-done(%start)
}}
"""


@pytest.mark.parametrize(
    ("instruction", "size"),
    [
        ("%start = (bf16[8192,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[8192,2048]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)",
         8192 * 2048 * 2),
        ("%start = (s32[128]{0:T(128)}, s32[128]{0:T(128)S(1)}, u32[]{:S(2)}) copy-start(%x)", 512),
        # Within HBM it is read and written; the innermost dimensions, here 8 by 100, are those of the layout and padded to tiles.
        ("%start = (f32[100,8]{0,1:T(8,128)}, f32[100,8]{0,1:T(8,128)}, u32[]{:S(2)}) copy-start(%w)", 2 * 8 * 128 * 4),
        ("%start = (pred[128,256]{1,0}, pred[128,256]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%w)", 128 * 256),
        # Only the slice is moved.
        ("%start = ((bf16[64,256]{1,0:T(8,128)(2,1)}), bf16[8,256]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%x)", 4096),
        ("%start = (u32[]{:S(1)}, u32[], u32[]{:S(2)}) copy-start(%w)", 0),
        ("%other = bf16[8192,2048]{1,0:T(8,128)(2,1)} copy(%x)", 0),
    ],
)  # fmt: skip
def test_copies_beside_the_kernels(instruction, size):
    assert copied_bytes(HLO.format(instruction)) == size


def test_what_is_not_in_the_time_is_named():
    found = {"chip": "v6e", "modelled_us": 10.0, "kernels": {"a": {"us": 10.0, "depends_on_unknown": False}}}
    assert untimed(found | {"outside": {"fusion": 3, "copy-start": 1}, "copied_bytes": 160_000}) == {}
    assert untimed(found | {"copied_bytes": 164_000}) == {"copies": 0.1}
    kernels = {"a": {"error": "?"}, "b": {"us": 1.0, "depends_on_unknown": True}}
    kernels["c"] = {"us": 1.0, "depends_on_unknown": True, "operation": "all-gather"}
    outside = {"while": 1, "conditional": 2, "all-gather-start": 1, "all-reduce": 1, "call-start": 1}
    assert untimed(found | {"kernels": kernels, "outside": outside}) == {
        "unread": ["a"], "unknown": ["b"], "loops": 3, "collectives": 2, "sparse core": 1,
    }  # fmt: skip


def test_a_compiler_that_is_no_longer_wanted_is_killed(monkeypatch):
    started, stop = [], threading.Event()

    class Sleeper(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(["sleep", "600"], **options)
            started.append(self)
            threading.Timer(0.3, stop.set).start()

    monkeypatch.setattr(subprocess, "Popen", Sleeper)
    assert report("module:name", {}, "v6e", 1, 500, stop=stop)["error"] == "stopped"
    assert started[0].poll() is not None
    assert report("module:name", {}, "v6e", 1, 0.1)["error"] == "no answer after 0.1 s"
    assert started[1].poll() is not None
