"""Timing a layer: the arithmetic with a clock of its own, and a real program on the CPU."""

import jax
import jax.numpy as jnp
import pytest

from tpu_serve.layers.moe.timing import TIMED_SECONDS, TooShort, chained, time_calls, time_layer


class Device:
    """Takes `launch` seconds for a program and `call` seconds for each call in it, more by a factor of its own each time."""

    def __init__(self, launch, call, factors=(1.0,)):
        self.now, self.launch, self.call = 0.0, launch, call
        self.factors, self.numbers = list(factors), []

    def __call__(self, number):
        self.numbers.append(number)
        factor = self.factors[len(self.numbers) % len(self.factors)]
        self.now += self.launch + number * self.call * factor

    def clock(self):
        return self.now


def test_launching_is_not_part_of_the_time():
    device = Device(launch=0.5, call=100e-6)
    found = time_calls(device, 5, 10, device.clock)
    assert found.us == pytest.approx(100)
    assert found.spread == pytest.approx(0, abs=1e-6)
    assert found.iterations == 5 * 40
    assert device.numbers == [1, *[10, 30] * 5]


def test_one_slow_repeat_does_not_matter():
    device = Device(launch=1e-3, call=100e-6, factors=[1, 1, 1, 1, 1, 1, 1, 1, 9, 1, 1])
    found = time_calls(device, 5, 10, device.clock)
    assert found.us == pytest.approx(100)


def test_the_spread_is_that_of_the_middle_half():
    times = iter([1, 1, 101, 1, 111, 1, 121, 1, 131, 1, 901, 1, 1001, 1, 151, 1, 141])
    device = Device(0, 0)

    def chain(number):
        device.now += next(times)

    # Differences are 100, 110, 120, 130, 140, 150, 900 and 1000; of eight the middle half is 120 to 150.
    found = time_calls(chain, 8, 1, device.clock)
    assert found.us == pytest.approx(135 / 2 * 1e6)
    assert found.spread == pytest.approx(30 / 135)


def test_so_many_calls_that_the_clock_is_no_matter():
    device = Device(launch=5e-3, call=10e-6)
    assert time_calls(device, 1, clock=device.clock).us == pytest.approx(10)
    number = device.numbers[-2]
    assert TIMED_SECONDS <= 5e-3 + number * 10e-6 < 4 * TIMED_SECONDS
    assert device.numbers[-1] == 3 * number
    slow = Device(launch=5e-3, call=1.0)
    assert time_calls(slow, 1, clock=slow.clock).us == pytest.approx(1e6)
    assert slow.numbers == [1, 1, 1, 3]


def test_no_time_is_no_answer():
    device = Device(launch=1e-3, call=0.0)
    with pytest.raises(TooShort, match="4096 calls and 12288 take the same time"):
        time_calls(device, 3, clock=device.clock)
    with pytest.raises(ValueError, match="at least 1"):
        time_calls(device, 0, clock=device.clock)


def test_a_machine_that_was_busy_is_timed_with_more_calls():
    device = Device(launch=0.0, call=TIMED_SECONDS)
    busy = iter([0, 0, 1.0])  # compiling, choosing the number of calls, and the shorter program of the first pair

    def chain(number):
        device.now += next(busy, 0.0)
        device(number)

    found = time_calls(chain, 1, clock=device.clock)
    assert found.us == pytest.approx(TIMED_SECONDS * 1e6)
    assert device.numbers == [1, 1, 1, 3, 4, 12]
    assert found.iterations == 16


def test_each_call_works_on_what_the_last_one_returned():
    program = chained(lambda x, step: 2 * x + step)
    assert program(3, jnp.float32(1), jnp.float32(1)) == 15


def test_on_a_cpu():
    x, w = jnp.ones((64, 64)), jnp.ones((64, 64)) / 64
    traced = []

    def layer(x, w):
        traced.append(1)
        return x @ w

    found = time_layer(layer, (x, w), repeats=3)
    assert 0 < found.us < 1e5
    assert found.iterations >= 3 * 8
    assert len(traced) == 1, "one program for all numbers of calls"
    assert jax.numpy.allclose(x @ w, x)
