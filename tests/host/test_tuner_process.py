"""The process that tries configs: it may hang, die or print, and the next request is answered all the same."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import PostNorm, Problem
from tpu_serve.tuner.compiling import Compile
from tpu_serve.tuner.process import Worker, WorkerFailed
from tpu_serve.tuner.run import Settings, Tuner
from tpu_serve.tuner.trial import Stopped, Task

NAME = os.path.splitext(os.path.basename(__file__))[0]


def handler(greeting="hello", broken=False):
    """In the process: does what it is asked to."""
    if broken:
        raise ModuleNotFoundError("No module named 'chips'")

    def answer(request):
        match request["do"]:
            case "greet":
                print("not an answer")
                return {"said": greeting, "pid": os.getpid()}
            case "raise":
                raise ValueError("no\nsuch thing")
            case "hang":
                time.sleep(600)
            case "die":
                print("last words", file=sys.stderr)
                sys.stderr.flush()
                os._exit(11)
            case "long":
                return {"said": "x" * 300000}
        return {}

    return answer


@pytest.fixture
def worker():
    made = Worker(f"{NAME}:handler", {"greeting": "good morning"}, {"SOME": "thing"})
    yield made
    made.close()


def greet(worker):
    answer = worker.ask({"do": "greet"}, 60)
    assert answer["said"] == "good morning"
    return answer["pid"]


def test_one_process_answers_many_requests(worker):
    first = greet(worker)
    with pytest.raises(WorkerFailed, match=r"^ValueError: no such thing$"):
        worker.ask({"do": "raise"}, 60)
    assert len(worker.ask({"do": "long"}, 60)["said"]) == 300000
    assert greet(worker) == first != os.getpid()
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert greet(worker) != first


def test_a_process_that_hangs_is_replaced(worker):
    first = greet(worker)
    with pytest.raises(WorkerFailed, match=r"^no answer after 0\.3 s$"):
        worker.ask({"do": "hang"}, 0.3)
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert greet(worker) != first


def test_a_process_that_dies_is_replaced(worker):
    first = greet(worker)
    with pytest.raises(WorkerFailed, match=r"^the process ended with 11: last words$"):
        worker.ask({"do": "die"}, 60)
    assert greet(worker) != first


def test_it_ends_at_once_when_nobody_wants_more():
    stop = threading.Event()
    worker = Worker(f"{NAME}:handler", {}, {}, stop)
    pid = worker.ask({"do": "greet"}, 60)["pid"]
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(Stopped):
        worker.ask({"do": "hang"}, 60)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_cannot_start_is_an_error_of_the_whole_run():
    broken = Worker(f"{NAME}:handler", {"broken": True}, {})
    with pytest.raises(ConfigError, match="cannot start: ModuleNotFoundError: No module named 'chips'"):
        broken.ask({"do": "greet"}, 60)
    absent = Worker("no_such_module:handler", {}, {})
    with pytest.raises(ConfigError, match="cannot start: ModuleNotFoundError"):
        absent.ask({"do": "greet"}, 60)


def hostile():
    """A compiler that dies over the first config, hangs over the second, refuses the third, and accepts what then comes."""
    path = os.environ["TUNER_TEST_COUNT"]

    def answer(request):
        task = Task.of_json(request)
        with open(path, "a+") as file:
            file.write(f"{task.config.tile_columns}\n")
            file.seek(0)
            number = len(file.readlines())
        if number == 1:
            os._exit(139)
        if number == 2:
            time.sleep(600)
        return {"against": "MosaicError: no" if number == 3 else None, "found": {"temporary_bytes": 1}}

    return answer


def test_bad_candidates_do_not_end_a_job(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNER_TEST_COUNT", str(tmp_path / "count"))
    from tuner_fakes import job

    executor = Compile(1.0, handler=f"{NAME}:hostile")
    try:
        result = Tuner(executor, Settings(4, "2026-01-31", "", "")).tune(job(4096))
    finally:
        executor.close()
    outcomes = [(trial.outcome, trial.reason) for _, trial in result.trials]
    assert outcomes == [
        ("failed", "the process ended with 139"),
        ("failed", "no answer after 1 s"),
        ("refused", "MosaicError: no"),
        ("worked", ""),
    ]
    assert result.chosen == result.trials[3][0]
    assert result.row.provenance.score_kind == "bytes"


@pytest.mark.parametrize(
    "config", [Config("D", 128, compact_rows=32), Config("G", 256, 4, 64, 32, resident=True), None]
)
def test_a_task_crosses_to_the_process_unchanged(config):
    gpt = WORKLOADS["GPT-OSS-120B"].problem(64, 8, "mxfp4")
    normed = Problem(8, 4, 2, 128, 128, post_norm=PostNorm(1e-6, True), combine_dtype="float32")
    for problem in (gpt, normed):
        task = Task("some", TPU_CHIPS["tpu7x"], problem, config)
        assert Task.of_json(task.as_json()) == task


def test_a_process_that_hangs_ends_with_the_one_that_asked():
    """Also when that one has no time to end it, as after `kill -9` or a lost connection."""
    code = (
        f"from tpu_serve.tuner.process import Worker; worker = Worker('{NAME}:handler', {{}}, {{}})\n"
        "print(worker.ask({'do': 'greet'}, 60)['pid'], flush=True)\n"
        "worker.ask({'do': 'hang'}, 600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    asking = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    pid = int(asking.stdout.readline())
    asking.kill()
    asking.wait()
    asking.stdout.close()
    for _ in range(300):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] == "Z":
            return  # ended; who inherited it has not looked yet
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("it lives on")
