"""`tpu-serve doctor`: what it finds wrong, with what to do, on machines that are made up."""

import json
import resource
import socket

import pytest

from tpu_serve.cli import doctor_checks, doctor_devices
from tpu_serve.cli.finding import Finding, size
from tpu_serve.cli.main import main
from tpu_serve.config import environment

GIB = 2**30
CPU = {"platform": "cpu", "kind": "cpu", "count": 1, "bytes": None}
TPU = {"platform": "tpu", "kind": "TPU v6 lite", "count": 8, "bytes": 32 * GIB}


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    """What JAX would find, without asking it."""
    answer = [(CPU, "")]
    monkeypatch.setattr(doctor_devices, "ask_jax", lambda: answer[0])
    monkeypatch.setattr(doctor_devices, "has_tpu_files", lambda: False)
    return answer


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
    return str(number)


def test_a_machine_that_works(capsys, free_port, tmp_path):
    assert main(["doctor", "--port", free_port, "--compile-cache-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    for name in ("tpu-serve", "Python", "jax", "devices", "memory", "compile cache", f"port {free_port}", "clock"):
        assert any(line[2:].startswith(name) for line in shown.out.splitlines()), name
    assert "problems (!): 0" in shown.out


def test_json(capsys, free_port, tmp_path, devices):
    words = ["collect-env", "--json", "--port", free_port, "--compile-cache-dir", str(tmp_path)]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["works"]
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert findings["devices"] == {
        "name": "devices", "status": "hint", "value": "1 x cpu, no TPU", "advice": "a CPU serves small models for development",
    }  # fmt: skip
    devices[0] = (None, "RuntimeError: broken")
    assert main(words) == 1
    assert not json.loads(capsys.readouterr().out)["works"]


def test_a_port_that_is_taken(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["doctor", "--port", str(port), "--compile-cache-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f"! port {port}" in shown
    assert "serve with another --port" in shown
    assert "problems (!): 1" in shown
    assert doctor_checks.look_at_port("127.0.0.1", 99999).status == "problem"
    assert doctor_checks.look_at_port("no-such-host.invalid", 8000).status == "problem"
    assert doctor_checks.look_at_port("127.0.0.1", 0).status == "ok"


class TestDevices:
    def test_tpus(self, devices):
        devices[0] = (TPU, "")
        assert doctor_devices.look_at_devices() == [Finding("devices", "8 x TPU v6 lite, 32.0 GiB each")]

    @pytest.mark.parametrize(("libtpu", "advice"), [(None, "pip install 'tpu-serve[tpu]'"), ("here", "JAX_PLATFORMS")])
    def test_tpus_that_jax_does_not_see(self, monkeypatch, libtpu, advice):
        monkeypatch.setattr(doctor_devices, "has_tpu_files", lambda: True)
        monkeypatch.setattr(doctor_devices, "find_spec", lambda _: libtpu)
        (finding,) = doctor_devices.look_at_devices()
        assert finding.status == "problem"
        assert advice in finding.advice

    def test_a_gpu(self, devices):
        devices[0] = ({**CPU, "platform": "gpu", "kind": "H100"}, "")
        (finding,) = doctor_devices.look_at_devices()
        assert (finding.status, finding.value) == ("problem", "1 x H100")

    @pytest.mark.parametrize(
        ("error", "advice"),
        [
            ("ABORTED: The TPU is already in use by process with pid 7", "end the one that holds it"),
            ("no answer within 90 s", "end the one that holds it"),
            ("ModuleNotFoundError: No module named 'jax'", "pip install"),
            ("else", "JAX_PLATFORMS=cpu"),
        ],
    )
    def test_none(self, devices, error, advice):
        devices[0] = (None, error)
        (finding,) = doctor_devices.look_at_devices()
        assert (finding.status, finding.value) == ("problem", f"JAX finds none: {error}")
        assert advice in finding.advice


REAL_ASK = doctor_devices.ask_jax


def test_the_process_that_is_asked():
    assert REAL_ASK("print('noise'); print('{\"count\": 2}')") == ({"count": 2}, "")
    assert REAL_ASK("raise RuntimeError('the TPU is away')") == (None, "RuntimeError: the TPU is away")
    assert REAL_ASK("raise SystemExit(3)") == (None, "the process ended with code 3")
    assert REAL_ASK("import time; time.sleep(60)", seconds=0.2) == (None, "no answer within 0.2 s")


def test_memory(tmp_path):
    info, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    info.write_text(f"MemTotal:  {8 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {4 * 2**20} kB\n")
    assert doctor_checks.look_at_memory(info, limit) == Finding("memory", "4.0 GiB free of 8.0 GiB")
    limit.write_text("max\n")
    assert doctor_checks.look_at_memory(info, limit).status == "ok"
    limit.write_text(f"{GIB}\n")
    finding = doctor_checks.look_at_memory(info, limit)
    assert finding.status == "hint"
    assert "this container may use 1.0 GiB" in finding.value
    assert doctor_checks.look_at_memory(tmp_path / "none", limit).value == "unknown on this system"


def test_the_compile_cache(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(2048))
    finding = doctor_checks.look_at_cache(tmp_path)
    assert finding.status == "ok"
    assert finding.value.startswith(f"{tmp_path}: 1 files, 2.0 KiB; ")
    assert doctor_checks.look_at_cache(tmp_path / "not" / "yet").status == "ok"
    assert doctor_checks.look_at_cache(tmp_path / "a").value == f"{tmp_path / 'a'} is no folder"
    assert doctor_checks.look_at_cache(None).status == "hint"
    monkeypatch.setattr(doctor_checks.os, "access", lambda *_: False)
    finding = doctor_checks.look_at_cache(tmp_path)
    assert (finding.status, finding.value) == ("problem", f"{tmp_path} cannot be written")
    assert "--compile-cache-dir" in finding.advice


def test_limits(monkeypatch):
    limits = {resource.RLIMIT_NOFILE: (1024, 8192), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(doctor_checks.resource, "getrlimit", limits.get)
    (files,) = doctor_checks.look_at_limits(has_tpu=False)
    assert (files.status, files.value) == ("hint", "1024 at most")
    assert "ulimit -n 8192" in files.advice
    names = [finding.name for finding in doctor_checks.look_at_limits(has_tpu=True)]
    assert names[:2] == ["open files", "locked memory"]
    limits[resource.RLIMIT_NOFILE] = (resource.RLIM_INFINITY,) * 2
    assert doctor_checks.look_at_limits(has_tpu=False) == [Finding("open files", "no limit")]


def test_the_clock():
    assert doctor_checks.look_at_clock().status == "ok"
    finding = doctor_checks.look_at_clock(0.0)
    assert finding.status == "hint"
    assert finding.value.startswith("1970-01-01 00:00:00 UTC, which is before")


def test_packages(monkeypatch):
    assert all(finding.status == "ok" for finding in doctor_checks.look_at_packages())
    monkeypatch.setattr(
        doctor_checks.metadata, "requires", lambda _: ["jax>=99", "no-such-thing<3", "x; extra == 'test'"]
    )
    wrong = {finding.name: finding for finding in doctor_checks.look_at_packages() if finding.status == "problem"}
    assert set(wrong) == {"jax", "no-such-thing"}
    assert wrong["jax"].advice == "pip install 'jax>=99'"
    assert wrong["no-such-thing"].value == "is missing"
    monkeypatch.setattr(doctor_checks, "_version", {"jax": "0.10.2", "jaxlib": "0.9.1"}.get)
    monkeypatch.setattr(doctor_checks, "_unmet_requirements", dict)
    assert doctor_checks.look_at_packages()[-1].advice == "pip install 'jaxlib==0.10.2'"


def test_the_environment(monkeypatch):
    for name in list(environment.os.environ):
        monkeypatch.delenv(name)
    assert doctor_checks.look_at_environment() == []
    for name in ("JAX_PLATFORMS", "HF_TOKEN", "TPU_SERVE_API_KEY", "VLLM_XLA_CACHE_PATH", "OTHER"):
        monkeypatch.setenv(name, "secret" if name in ("HF_TOKEN", "TPU_SERVE_API_KEY") else "value")
    *ours, foreign = doctor_checks.look_at_environment()
    assert [(finding.name, finding.value) for finding in ours] == [
        ("$HF_TOKEN", "(set)"),
        ("$JAX_PLATFORMS", "value"),
        ("$TPU_SERVE_API_KEY", "(set)"),
    ]
    assert foreign.value == "VLLM_XLA_CACHE_PATH: without effect here"


def test_sizes():
    assert [size(number) for number in (512, 2**20, 3 * 2**30, 2**41)] == [
        "0.5 KiB",
        "1.0 MiB",
        "3.0 GiB",
        "2048.0 GiB",
    ]
