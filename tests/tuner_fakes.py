"""Executors that answer by rule, and small jobs for them."""

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.tuner.jobs import Job
from tpu_serve.tuner.run import Settings
from tpu_serve.tuner.trial import MEASURED, WORKED, Trial

SETTINGS = Settings(num_candidates=4, date="2026-01-31", jax="0.10.2", libtpu="0.0.42")


def job(num_tokens=1024, format="bfloat16", chip="v6e", num_devices=8):
    problem = WORKLOADS["Qwen3-30B-A3B"].problem(num_tokens, num_devices, format)
    return Job("Qwen3-30B-A3B", TPU_CHIPS[chip], problem)


class Fake:
    """Calls `answer(task, number)`, the number counting from 0; what it returns is a score, a trial, or raised."""

    routing = "uniform"

    def __init__(self, answer, kind=MEASURED):
        self.answer, self.kind = answer, kind
        self.tasks, self.closed = [], False

    def run(self, task):
        self.tasks.append(task)
        found = self.answer(task, len(self.tasks) - 1)
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, Trial):
            return found
        return Trial(WORKED, "", float(found), self.kind, {"spread": 0.004, "iterations": 40})

    def close(self):
        self.closed = True
