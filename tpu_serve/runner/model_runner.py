"""Where sequences become arrays: compiles one program per token bucket, launches steps and collects what they sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.device.batch import zeros
from tpu_serve.layers.logprobs import Logprobs
from tpu_serve.layers.sampler import Sampled
from tpu_serve.runner.buckets import pick
from tpu_serve.runner.collect import collect
from tpu_serve.runner.compile_counter import num_compiled
from tpu_serve.runner.pack import pack, pack_masks
from tpu_serve.runner.programs import DeviceState, Programs
from tpu_serve.runner.slot_writer import SlotWriter
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput

COMPILE_THREADS = 4
"""XLA spends part of a compilation in one thread, so a few at a time keep even two cores busy."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step under way on the device."""

    output: SchedulerOutput
    sampled: Sampled
    prompt: Logprobs


class ModelRunner:
    """Runs planned steps on the device.

    Args:
      programs: of all buckets.
      params: weights on the device.
      state: fresh device state; owned by the runner from now on.
    """

    def __init__(self, programs: Programs, params: Any, state: DeviceState):
        self.params, self._state, self._programs = params, state, programs
        self._layouts = programs.layouts
        self._buckets = list(self._layouts)
        self._slot_writer = SlotWriter(state.sampler)
        self._compiled: dict[int, Any] = {}
        self._no_masks: dict[int, jax.Array] = {}

    @property
    def compile_count(self) -> int:
        """Programs compiled in this process so far; constant once `compile` has returned."""
        return num_compiled()

    def compile(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every bucket's program, several at a time, and runs each once on padding."""
        programs = self._programs
        # Read by no row: it stands for masks where nobody has one, and need not be sent to the device.
        self._no_masks = {
            rows: jnp.zeros((rows, num_words), jnp.uint32, device=programs.everywhere)
            for rows, num_words in map(programs.mask_shape, self._buckets)
        }

        def build(size: int) -> Any:
            return programs.lower(size).compile()

        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            for done, (size, program) in enumerate(zip(self._buckets, pool.map(build, self._buckets), strict=True)):
                self._compiled[size] = program
                on_progress(done + 1, len(self._buckets))
        self._state = dataclasses.replace(self._state, sampler=self._slot_writer.compile(self._state.sampler))
        for size in self._buckets:  # the first call of a program loads it and sets up its transfers
            layout = self._layouts[size]
            for masks in (self._no_masks[layout.num_rows], np.zeros(programs.mask_shape(size), np.uint32)):
                self._state, *sampled = self._compiled[size](self.params, self._state, pack((), layout), masks)
            jax.block_until_ready(sampled)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Starts a step and returns at once.

        Raises:
          KeyError: `compile` has not run.
        """
        scheduled, size = output.scheduled, pick(self._buckets, output.num_tokens)
        layout = self._layouts[size]
        masks = pack_masks(scheduled, layout.num_rows, self._programs.vocab_size)
        sampler = self._slot_writer.write(self._state.sampler, scheduled)
        self._state = dataclasses.replace(self._state, sampler=sampler)
        self._state, sampled, prompt = self._compiled[size](
            self.params, self._state, pack(scheduled, layout),
            self._no_masks[layout.num_rows] if masks is None else masks,
        )  # fmt: skip
        return LaunchedStep(output, sampled, prompt)

    def reset(self) -> None:
        """Can launch again after a launch that was cut short: state that it consumed without a successor is replaced by zeros."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            self._state = zeros(self._programs.state)

    def collect(self, ticket: LaunchedStep) -> list[SampledToken | None]:
        """Waits for a step; one entry per scheduled row, None where it brought nothing."""
        return collect(ticket.output.scheduled, ticket.sampled, ticket.prompt)
