"""How faults are planted in the fused mixture-of-experts kernel, for the time of a trace: by replacing a small function of it.

Nothing edits text, so that the kernel can be rewritten around its functions. Where one is renamed, planting fails loudly.

A function that returns `Plant` plants a fault by itself; the others make the faulty function from the right one, for `replace`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.fused_moe_v2 import exchange, gather, ring

Plant = Callable[[pytest.MonkeyPatch], None]


def replace(owner: Any, name: str, change: Callable[[Any], Any]) -> Plant:
    """Replaces a function by `change(function)`."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def skip(owner: Any, name: str) -> Plant:
    return replace(owner, name, lambda original: lambda *arguments, **named: None)


def argument(owner: Any, function: str, name: str, change: Callable[[Any], Any]) -> Plant:
    """Replaces one argument of a function, wherever it stands, by `change(argument)`."""

    def changed(original: Any) -> Any:
        signature = inspect.signature(original)

        def call(*given: Any, **named: Any) -> Any:
            bound = signature.bind(*given, **named)
            bound.arguments[name] = change(bound.arguments[name])
            return original(*bound.args, **bound.kwargs)

        return call

    return replace(owner, function, changed)


def refilled_too_early(owner: Any) -> Plant:
    """The next load of a slot starts as soon as the slot has been waited for, before it is read."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        refill, wait = owner._refill, ring.Ring.wait
        signature = inspect.signature(refill)

        def only_the_first(*given: Any) -> None:
            bound = signature.bind(*given)
            one = bound.arguments["ring"]
            one.started = getattr(one, "started", 0) + 1
            if one.started > one.num_slots:
                return

            def start(load: Any) -> None:
                bound.arguments["load"] = load
                refill(*bound.args)

            start(bound.arguments["load"])
            one.start_later = start

        def wait_and_refill(one: Any, load: Any) -> None:
            wait(one, load)
            one.start_later(load + one.num_slots)

        patch.setattr(owner, "_refill", only_the_first)
        patch.setattr(ring.Ring, "wait", wait_and_refill)

    return plant


class _OneSlot:
    """A buffer of the ring of which all loads use slot 0."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    @property
    def at(self) -> Any:
        return self

    def __getitem__(self, slot: Any) -> Any:
        return self._buffer.at[0]


def biases_without_slots(original: Any) -> Any:
    def initialise(self: Any, shape: Any, weights: Any, scratch: Any) -> None:
        slots = {name: _OneSlot(one) if name.endswith("bias") else one for name, one in scratch["slots"].items()}
        original(self, shape, weights, scratch | {"slots": slots})

    return initialise


def biases_of_the_next_expert(original: Any) -> Any:
    def part(self: Any, field: str, array: Any, expert: Any, index: Any) -> Any:
        if field.endswith("bias"):
            expert = jax.lax.rem(jnp.int32(expert) + 1, jnp.int32(array.shape[0]))
        return original(self, field, array, expert, index)

    return part


def one_slab_of_gate_and_up(original: Any) -> Any:
    """A tile is 2 F neighbouring columns of gate and up laid side by side, which is right for a single tile only."""

    def copies(self: Any, load: Any, expert: Any, index: Any) -> list[Any]:
        slots, columns, slot = self._slots, self.shape.columns, jax.lax.rem(load, self.num_slots)
        self._slots = {name: one for name, one in slots.items() if name != "gate_up"}
        others, self._slots = original(self, load, expert, index), slots
        array, halves = self._weights.gate_up, []
        for half in range(2):
            first = (2 * index + half) * columns
            source = array.at[expert, first // array.shape[3], :, jax.ds(first % array.shape[3], columns)]
            halves.append(pltpu.make_async_copy(source, slots["gate_up"].at[slot, half], self._semaphores.at[slot]))
        return [*halves, *others]

    return copies


def waits_for_half(original: Any) -> Any:
    """Gate and up are waited for as if they were one matrix."""

    def wait(self: Any, load: Any) -> None:
        slot = jax.lax.rem(load, self.num_slots)
        for field, buffer in self._slots.items():
            one = buffer.at[slot, 0] if field == "gate_up" else buffer.at[slot]
            exchange.wait_bytes_of(one, self._semaphores.at[slot])

    return wait


def waits_for_more(original: Any) -> Any:
    def wait(self: Any, load: Any) -> None:
        original(self, load)
        slot = jax.lax.rem(load, self.num_slots)
        exchange.wait_bytes_of(self._slots["gate_up"].at[slot, 0], self._semaphores.at[slot])

    return wait


def zeros_after_entry(original: Any) -> Any:
    """The delivery buffer is cleared when peers may already write into it."""

    def source(self: Any, tables: Any, inputs: Any, outputs: Any, scratch: Any) -> Any:
        one = original(self, tables, inputs, outputs, scratch)
        start_pushes = one.dispatch

        def clear_too() -> None:
            start_pushes()
            zeros, target = scratch["done"].at[0, jax.ds(0, 8)], outputs["arrived_done"].at[jax.ds(0, 8)]
            zeros[...] = jnp.zeros_like(zeros)
            pltpu.sync_copy(zeros, target)

        one.dispatch = clear_too
        return one

    return source


def no_entry(owner: Any = None) -> Plant:
    """No barrier, and no collective id either when `owner` is the class that gives kernels theirs."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        skip(exchange, "enter")(patch)
        if owner is not None:
            argument(owner, "compiler_params", "collective_id", lambda _: None)(patch)

    return plant


def no_waits_on(owner: Any, function: str, name: str, first_only: bool = False) -> Plant:
    """Inside a method that is given `scratch`, no waits for bytes on one group of its semaphores."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original, wait = getattr(owner, function), exchange.wait_bytes_of
        signature = inspect.signature(original)

        def method(*given: Any) -> Any:
            semaphores = signature.bind(*given).arguments["scratch"][name]

            def wait_for_others(reference: Any, semaphore: Any) -> None:
                if getattr(semaphore, "ref", semaphore) is not semaphores:
                    wait(reference, semaphore)

            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(exchange, "wait_bytes_of", wait_for_others)
                return original(*given)

        patch.setattr(owner, function, method)

    return plant


def scaled_before_normalised(original: Any) -> Any:
    def normalise(rows: Any, norm: Any, weight: Any, hidden: int) -> Any:
        ones = jnp.ones_like(weight)
        return original(rows * weight, norm, ones, hidden)

    return normalise


def piece(**changes: Callable[[Any], Any]) -> Plant:
    """Changes of what `Visits.piece` returns."""

    def changed(original: Any) -> Any:
        def piece(self: Any, visit: Any, device: Any) -> tuple[Any, ...]:
            values = dict(zip(("length", "row", "place", "target"), original(self, visit, device), strict=True))
            return tuple(changes.get(name, lambda value: value)(value) for name, value in values.items())

        return piece

    return replace(gather.Visits, "piece", changed)


def drained_without_sends(original: Any) -> Any:
    def drain(self: Any, count: Any) -> None:
        self._wait_sent = lambda visit: None
        original(self, count)

    return drain


def drained_without_tokens(original: Any) -> Any:
    """Own tokens are pushed, and nobody waits until they have left."""

    def drain(self: Any) -> None:
        self._await_round(jnp.int32(self._config.rounds - 1))

    return drain


def shorter_runs(original: Any) -> Any:
    def runs(*given: Any) -> Any:
        result = original(*given)
        return result | {"send_count": jnp.maximum(result["send_count"] - 1, 1)}

    return runs


def wider_tiles(original: Any) -> Any:
    """Slots are made for tiles of another width than the ring fills them with."""

    def shapes(problem: Any, config: Any, stage: Any) -> Any:
        return {
            field: (tuple(2 * size if size == config.tile_columns else size for size in shape), dtype)
            for field, (shape, dtype) in original(problem, config, stage).items()
        }

    return shapes


def half_the_loads(original: Any) -> Any:
    """The tables take tiles for twice as wide as the kernel does."""

    def made(*given: Any) -> Any:
        result = original(*given)
        return result | {"totals": result["totals"].at[1].set(result["totals"][1] // 2)}

    return made


def inner_rows_overwritten(original: Any) -> Any:
    def store(self: Any, visit: Any) -> None:
        self._inner_copy(visit, jax.lax.rem(visit, 2)).start()

    return store


def scales_of_the_next_row(original: Any) -> Any:
    def encode(*given: Any) -> Any:
        rows, scale = original(*given)
        return rows, jnp.roll(scale, 1)

    return encode


def wrong_expert_loaded(original: Any) -> Any:
    def made(*given: Any) -> Any:
        result = original(*given)
        return result | {"loads": jnp.roll(result["loads"], 1)}

    return made
