"""Lines about a load that is under way."""

import pytest

from tpu_serve.checkpoint.progress import LoadProgress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def started(**options):
    clock, lines = Clock(), []
    return clock, lines, LoadProgress(lines.append, clock=clock, **options)


def test_rate_and_time_left():
    clock, _, progress = started()
    progress(0, 61_100_000_000)
    clock.now += 7
    progress(12_300_000_000, 61_100_000_000)
    assert progress.line(12_300_000_000, 61_100_000_000) == "12.3 of 61.1 GB, 1.8 GB/s, 28 s left"


def test_a_line_now_and_then():
    clock, lines, progress = started(every=3)
    for second in range(11):
        clock.now = 100 + second
        progress(second * 10**9, 10 * 10**9)
    assert lines == [
        "3.0 of 10.0 GB, 1.0 GB/s, 7 s left",
        "6.0 of 10.0 GB, 1.0 GB/s, 4 s left",
        "9.0 of 10.0 GB, 1.0 GB/s, 1 s left",
    ]


def test_a_quick_load_writes_nothing():
    clock, lines, progress = started(every=3)
    for done in (0, 5, 10):
        clock.now += 0.9
        progress(done, 10)
    assert lines == []


def test_the_rate_is_that_of_the_recent_past():
    clock, _, progress = started(window=10)
    progress(0, 100 * 10**9)
    clock.now += 100
    progress(10**9, 100 * 10**9)  # a slow start
    for second in range(1, 21):
        clock.now += 1
        progress((1 + 2 * second) * 10**9, 100 * 10**9)
    assert progress.rate == pytest.approx(2e9)


def test_one_long_silence_is_not_forgotten():
    """Reports further apart than the window still make a rate."""
    clock, _, progress = started(window=1)
    for at, done in ((0, 0), (50, 10**9), (100, 3 * 10**9)):
        clock.now = 100.0 + at
        progress(done, 10**10)
    assert progress.rate == pytest.approx(2e9 / 50)


def test_nothing_is_known_at_the_start():
    clock, _, progress = started()
    assert progress.rate is None
    progress(0, 10**10)
    assert progress.line(0, 10**10) == "0.0 of 10.0 GB"
    clock.now += 5
    progress(0, 10**10)
    assert progress.rate is None


@pytest.mark.parametrize(("seconds", "words"), [(119, "119 s"), (120, "2 min 00 s"), (3785, "63 min 05 s")])
def test_long_times_are_in_minutes(seconds, words):
    clock, _, progress = started()
    progress(0, (seconds + 1) * 10**9)
    clock.now += 1
    progress(10**9, (seconds + 1) * 10**9)
    assert progress.line(10**9, (seconds + 1) * 10**9).endswith(f", 1.0 GB/s, {words} left")
