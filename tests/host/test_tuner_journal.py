"""The tuner's journal: what is in it is not tried again."""

import json

import pytest
from tuner_fakes import SETTINGS, Fake, job

from tpu_serve.config import ConfigError
from tpu_serve.tuner.journal import Journal
from tpu_serve.tuner.run import Tuner
from tpu_serve.tuner.trial import FAILED, REFUSED, Trial

SCORES = [100.0, 90.0, 95.0, 80.0]


def tune(path, answer=lambda task, number: SCORES[number], *, resume=True, kind="schedule", **changes):
    fake = Fake(answer, kind)
    with Journal(path, resume=resume) as journal:
        result = Tuner(fake, SETTINGS, journal).tune(job(**changes))
    return result, fake.tasks


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tune.jsonl"


def test_a_line_for_each_try(path):
    path.write_text("what was there before\n" * 100)
    result, _ = tune(path, resume=False)
    head, *lines = lines_of(path)
    assert set(head["versions"]) == {"jax", "libtpu", "tpu_serve"}
    assert "these two were not measured" in head["note"]
    assert [line["trial"]["score"] for line in lines] == SCORES
    assert lines[0]["what"]["label"] == "Qwen3-30B-A3B-v6e-bfloat16-D8-T1024"
    assert (lines[0]["what"]["role"], lines[0]["what"]["kind"]) == ("candidate", "schedule")
    assert result.row.provenance.score == 80.0


def test_what_is_there_is_not_tried_again(path):
    first, tasks = tune(path)
    again, none = tune(path, lambda task, number: AssertionError)
    assert (len(tasks), none) == (4, [])
    assert again == first
    assert len(lines_of(path)) == 5
    _, others = tune(path, num_tokens=512)
    assert len(others) == 4, "another key"
    _, others = tune(path, kind="bytes")
    assert len(others) == 4, "another score"


def test_a_measured_job_with_its_control_and_xla(path):
    def answer(task, number):
        return 200.0 if task.config is None else 130.0 if number == 4 else 100.0

    first, tasks = tune(path, answer, kind="measured")
    assert len(tasks) == 5 + 6, "the control moved, so all was repeated"
    again, none = tune(path, kind="measured")
    assert (again, none) == (first, [])
    roles = [(line["what"]["role"], line["what"]["attempt"]) for line in lines_of(path)[1:]]
    assert roles == [*[("candidate", 1)] * 4, ("control", 1), *[("candidate", 2)] * 4, ("control", 2), ("xla", 2)]


def test_an_interrupted_job_goes_on_where_it_was(path):
    def interrupt(task, number):
        return KeyboardInterrupt() if number == 2 else SCORES[number]

    with pytest.raises(KeyboardInterrupt):
        tune(path, interrupt)
    result, tasks = tune(path, lambda task, number: SCORES[number + 2])
    assert len(tasks) == 2
    assert result.row.provenance.score == 80.0


@pytest.mark.parametrize(("outcome", "again"), [(REFUSED, 0), (FAILED, 1)])
def test_what_failed_by_time_is_tried_again_and_what_was_refused_is_not(path, outcome, again):
    tune(path, lambda task, number: Trial(outcome, "why") if number == 1 else SCORES[number])
    result, tasks = tune(path, lambda task, number: 150.0)
    assert len(tasks) == again
    assert result.trials[1][1].score == (150.0 if again else None)


def test_a_line_that_was_cut_off_is_tried_again(path):
    tune(path)
    whole = path.read_text()
    path.write_text(whole[:-20])
    _, tasks = tune(path, lambda task, number: SCORES[3])
    assert len(tasks) == 1
    assert path.read_text() == whole


def test_without_resume_it_is_replaced(path):
    tune(path)
    _, tasks = tune(path, resume=False)
    assert len(tasks) == 4
    assert len(lines_of(path)) == 5


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda lines: [lines[0] | {"versions": {"jax": "0.1"}}, *lines[1:]], r"written with jax 0\.1 \(here"),
        (lambda lines: lines[1:], "not written by this command"),
        (lambda lines: [lines[0] | {"kind": "other"}, *lines[1:]], "not written by this command"),
        (lambda lines: [*lines[:2], {"what": {}, "trial": {"outcome": "worked"}}], "Its line 3 is not a try"),
        (lambda lines: [*lines[:2], []], "Its line 3 is not a try"),
    ],
)
def test_a_file_that_cannot_be_continued(path, spoil, words):
    tune(path)
    path.write_text("".join(json.dumps(line) + "\n" for line in spoil(lines_of(path))))
    before = path.read_text()
    with pytest.raises(ConfigError, match=words):
        Journal(path, resume=True)
    assert path.read_text() == before


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match=r"--journal .* cannot be written"):
        Journal(tmp_path / "no" / "where", resume=False)
