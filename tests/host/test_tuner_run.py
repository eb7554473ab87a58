"""A job from its first config to its row: bad candidates, controls, XLA's time."""

import threading

import pytest
from tuner_fakes import SETTINGS, Fake, job

from tpu_serve.config import ConfigError
from tpu_serve.tuner.run import Tuner, tune_all
from tpu_serve.tuner.trial import BYTES, FAILED, REFUSED, SCHEDULE, WORKED, Stopped, Trial


def is_xla(task):
    return task.config is None


def tuned(answer, kind="measured", **changes):
    fake = Fake(answer, kind)
    return Tuner(fake, SETTINGS).tune(job(**changes)), fake


def test_the_best_is_chosen_and_the_row_says_how_it_was_found():
    result, fake = tuned(lambda task, number: [100.0, 90.0, 95.0, 120.0][number], SCHEDULE)
    assert result.outcome == "tuned"
    assert len(fake.tasks) == SETTINGS.num_candidates
    assert result.chosen == fake.tasks[1].config
    found = result.row.provenance
    assert (found.kind, found.score, found.score_kind, found.routing) == ("compiled", 90.0, "schedule", "uniform")
    assert (found.date, found.jax, found.libtpu) == ("2026-01-31", "0.10.2", "0.0.42")
    assert (found.us, found.us_xla, result.row.min_tokens_fused) == (None, None, None)
    assert (result.row.key, result.row.value) == (job().key, result.chosen)


def test_what_the_kernel_does_not_support_is_not_tried():
    result, fake = tuned(lambda task, number: 1.0, format="fp8_channel")
    assert (result.outcome, result.row, fake.tasks) == ("refused", None, [])
    assert "float8_e4m3fn, which v6e has no arithmetic for" in result.reason


BAD = {
    "raises": RuntimeError("the device\nis gone"),
    "refused": Trial(REFUSED, "MosaicError: no"),
    "failed": Trial(FAILED, "no answer after 600 s"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_candidate_does_not_end_the_job(bad):
    result, fake = tuned(lambda task, number: BAD[bad] if number in (0, 2) else 100.0 - number, SCHEDULE)
    assert result.outcome == "tuned"
    assert result.chosen == fake.tasks[3].config
    assert [trial.outcome for _, trial in result.trials][1::2] == [WORKED, WORKED]
    assert result.trials[0][1].reason in (
        "RuntimeError: the device is gone",
        "MosaicError: no",
        "no answer after 600 s",
    )


def test_a_job_without_a_config_that_works_fails():
    result, fake = tuned(lambda task, number: Trial(REFUSED, "MosaicError: no"), BYTES)
    assert (result.outcome, result.row, len(fake.tasks)) == ("failed", None, 4)
    assert result.reason == "none of 4 configs works; the heuristic's: MosaicError: no"


@pytest.mark.parametrize("error", [Stopped(), ConfigError("no process")])
def test_what_is_not_a_candidates_fault_ends_the_job(error):
    with pytest.raises(type(error)):
        tuned(lambda task, number: error, BYTES)


def test_scores_of_another_kind_are_not_compared():
    """A candidate whose schedule cannot be read has a calculated score, which is lower than any modelled one."""
    other = Trial(WORKED, "its schedule cannot be read", 1.0, BYTES)
    result, fake = tuned(lambda task, number: other if number == 1 else 100.0 + number, SCHEDULE)
    assert result.chosen == fake.tasks[0].config
    assert result.row.provenance.score == 100.0
    result, fake = tuned(lambda task, number: other if number == 0 else 0.5, SCHEDULE)
    assert result.chosen == fake.tasks[0].config
    assert result.row.provenance.score_kind == "bytes"


def test_measured_with_a_control_and_xla():
    result, fake = tuned(lambda task, number: 250.0 if is_xla(task) else [100, 80, 90, 90, 101][number])
    assert [is_xla(task) for task in fake.tasks] == [False] * 5 + [True]
    assert fake.tasks[4].config == fake.tasks[0].config, "the control"
    found = result.row.provenance
    assert (found.kind, found.us, found.us_xla, found.iterations) == ("measured", 80.0, 250.0, 40)
    assert (found.score, found.score_kind) == (None, "")
    assert found.spread == pytest.approx(0.01), "the control moved by more than the repeats"
    assert result.row.min_tokens_fused == 0


def test_where_xla_is_faster_the_kernel_starts_beyond_the_bucket():
    result, _ = tuned(lambda task, number: 50.0 if is_xla(task) else 100.0)
    assert result.row.min_tokens_fused == 1025


def test_where_xla_cannot_run_nothing_is_said_about_it():
    result, _ = tuned(lambda task, number: Trial(REFUSED, "unquantised only") if is_xla(task) else 100.0)
    assert result.row.provenance.us_xla is None
    assert result.row.min_tokens_fused is None


def test_a_control_that_moves_repeats_the_job_once():
    times = [100, 80, 80, 80, 104, *[100, 85, 85, 85, 102], 200]
    result, fake = tuned(lambda task, number: times[number])
    assert [is_xla(task) for task in fake.tasks] == [False] * 10 + [True]
    assert result.drift == pytest.approx(0.02)
    assert result.row.provenance.us == 85


def test_differences_smaller_than_the_controls_move_are_none():
    result, fake = tuned(lambda task, number: 80.0 if number % 5 == 1 else 100.0 + 30 * (number % 5 == 4))
    assert len(fake.tasks) == 11, "repeated once and not more"
    assert result.drift == pytest.approx(0.3)
    assert result.chosen == fake.tasks[0].config
    assert result.row.provenance.spread == pytest.approx(0.3)
    result, fake = tuned(lambda task, number: BAD["failed"] if number % 5 == 4 else 100.0 - 50 * (number % 5 == 1))
    assert result.drift == 1.0
    assert result.chosen == fake.tasks[0].config


def test_jobs_run_beside_each_other_and_all_executors_are_closed():
    both = threading.Barrier(2, timeout=60)
    made = []

    def answer(task, number):
        if number == 0:
            both.wait()
        return 1.0

    def executor():
        made.append(Fake(answer, BYTES))
        return made[-1]

    jobs = [job(64), job(128)]
    results = list(tune_all(jobs, executor, SETTINGS, None, 2, threading.Event()))
    assert {one.job for one in results} == set(jobs)
    assert [one.closed for one in made] == [True, True]


def test_no_more_jobs_start_when_nobody_wants_results():
    stop = threading.Event()

    def answer(task, number):
        assert number == 0 or stop.wait(60)
        return Stopped() if stop.is_set() else 1.0

    fake = Fake(answer, BYTES)
    settings = SETTINGS.__class__(1, *["2026-01-31", "", ""])
    made = tune_all([job(8 << place) for place in range(8)], lambda: fake, settings, None, 1, stop)
    next(made)
    made.close()
    assert len(fake.tasks) <= 2
    assert fake.closed
