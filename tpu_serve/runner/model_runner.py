"""Where sequences become arrays: launches steps, each with the program of its token bucket, and collects what they sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tpu_serve.layers.attention_on_mesh import AttentionPath
from tpu_serve.layers.logprobs import Logprobs
from tpu_serve.layers.sampler import Sampled
from tpu_serve.runner.buckets import pick
from tpu_serve.runner.collect import collect, collect_steps
from tpu_serve.runner.compilation import Compilation, Program
from tpu_serve.runner.compile_counter import num_compiled
from tpu_serve.runner.multi_step import Loops, loop_name, pack_loop
from tpu_serve.runner.pack import Packer, pack_masks
from tpu_serve.runner.programs import FRESH_STATE, NO_MASKS, DeviceState, Programs, step_name
from tpu_serve.runner.slot_writer import SlotWriter
from tpu_serve.scheduler.step import SampledToken, Scheduled, SchedulerOutput


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step under way on the device."""

    output: SchedulerOutput
    sampled: Sampled
    prompt: Logprobs | None = None


def programs_of(programs: Programs) -> list[Program]:
    """Everything that a runner needs compiled, in the order in which it does: what every step needs, then steps of rising size, then
    launches of several steps."""
    writers = SlotWriter(programs.state.sampler, programs.mesh).programs
    return [*programs.others, *writers, *programs.steps, *Loops(programs).programs]


class ModelRunner:
    """Runs planned steps on the device.

    Args:
      programs: of all buckets.
      params: weights on the device.
      compilation: of `programs_of(programs)`.
    """

    def __init__(self, programs: Programs, params: Any, compilation: Compilation):
        self.params, self.compilation, self._programs = params, compilation, programs
        self._layouts = programs.layouts
        self._packer = Packer(next(iter(programs.layouts.values())), programs.num_ranks)
        self._slot_writer = SlotWriter(programs.state.sampler, programs.mesh)
        self._buckets: list[int] = []  # with a program, rising
        self._missing = list(self._layouts)
        self._steps: dict[int, Any] = {}
        self._loop_layouts = Loops(programs).layouts
        self._loops: dict[int, Any] = {}
        self._no_masks: dict[int, jax.Array] = {}
        self._state: DeviceState

    @property
    def compile_count(self) -> int:
        """Programs compiled in this process so far; constant once all of the runner's are there."""
        return num_compiled()

    def start(
        self, on_progress: Callable[[int, int], None] = lambda done, total: None, *, wait_for_all: bool = True
    ) -> None:
        """Makes a fresh state, and runs each program once on padding. `launch` may follow.

        Args:
          on_progress: told how many of how many programs are there.
          wait_for_all: for the programs of all buckets, rather than of the smallest one.

        Raises:
          BaseException: what kept a program from being compiled.
        """
        smallest = step_name(min(self._layouts))
        every = self.compilation.names
        self.compilation.wait(every if wait_for_all else every[: every.index(smallest) + 1], on_progress)
        self._state = self.compilation[FRESH_STATE]()
        # Read by no row: it stands for masks where nobody has one, and need not be sent to the device.
        self._no_masks = self.compilation[NO_MASKS]()
        sampler = self._slot_writer.start(self._state.sampler, self.compilation.__getitem__)
        self._state = dataclasses.replace(self._state, sampler=sampler)
        self.take_new_programs()

    def attention_paths(self) -> tuple[AttentionPath, ...]:
        """What runs the attention of the programs that have been traced in this process."""
        return self._programs.function.attention.paths()

    def take_new_programs(self) -> int:
        """Puts programs to use that have been compiled meanwhile, each of which is run once on padding.

        Returns:
          Most tokens that a step of `launch` may have from now on, of one data rank. It never falls.

        Raises:
          BaseException: what kept a program from being compiled.
        """
        if self._missing:
            new = [size for size in self._missing if self.compilation.is_done(step_name(size))]
            for size in new:
                self._run_once(size)
                self._missing.remove(size)
                self._buckets = sorted([*self._buckets, size])
        if len(self._loops) < len(self._loop_layouts):
            for size in self._loop_layouts:
                if size not in self._loops and self.compilation.is_done(loop_name(size)):
                    self._run_loop_once(size)
        is_complete = not self._missing and len(self._loops) == len(self._loop_layouts)
        if not is_complete and self.compilation.failure is not None:
            raise self.compilation.failure
        return self._buckets[-1]

    def _run_once(self, size: int) -> None:
        """The first call of a program loads it and sets up its transfers."""
        programs = self._programs
        self._steps[size] = self.compilation[step_name(size)]
        shape, nothing = programs.mask_shape(size), self._packer.pack(((),) * programs.num_ranks, self._layouts[size])
        for masks in (self._no_masks[shape[0]], np.zeros(shape, np.uint32)):
            self._state, *sampled = self._steps[size](self.params, self._state, nothing, masks)
        jax.block_until_ready(sampled)

    def _run_loop_once(self, size: int) -> None:
        self._loops[size] = self.compilation[loop_name(size)]
        self._state, found = self._run_loop((), size)
        jax.block_until_ready(found)

    def _run_loop(self, rows: tuple[Scheduled, ...], size: int) -> tuple[DeviceState, Sampled]:
        """Nobody in it has a mask."""
        layout = self._loop_layouts[size]
        masks = self._no_masks[layout.step.num_rows]
        state, found = self._loops[size](self.params, self._state, pack_loop(rows, layout, self._packer), masks)
        return state, found

    @property
    def num_decode_steps(self) -> int:
        """Most steps of a launch from now on, 1 while the programs for more are not all there."""
        return self._programs.num_decode_steps if len(self._loops) == len(self._loop_layouts) else 1

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Starts a step, or several where the output says so, and returns at once. `start` has been called."""
        if output.num_steps > 1:
            return self._launch_several(output)
        rows, size = output.by_rank, pick(self._buckets, output.num_tokens_of_largest)
        layout = self._layouts[size]
        masks = pack_masks(rows, layout.num_rows, self._programs.vocab_size)
        sampler = self._slot_writer.write(self._state.sampler, rows)
        if sampler is not self._state.sampler:
            self._state = dataclasses.replace(self._state, sampler=sampler)
        self._state, sampled, prompt = self._steps[size](
            self.params, self._state, self._packer.pack(rows, layout),
            self._no_masks[len(rows) * layout.num_rows] if masks is None else masks,
        )  # fmt: skip
        return LaunchedStep(output, sampled, prompt)

    def _launch_several(self, output: SchedulerOutput) -> LaunchedStep:
        size = pick(list(self._loop_layouts), output.num_tokens)
        self._state, found = self._run_loop(output.scheduled, size)
        return LaunchedStep(output, found)

    def reset(self) -> None:
        """Can launch again after a launch that was cut short: state that it consumed without a successor is replaced by zeros."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            self._state = self.compilation[FRESH_STATE]()

    def collect(self, ticket: LaunchedStep) -> list[SampledToken | None]:
        """Waits for a step; one entry per scheduled row, None where it brought nothing."""
        if ticket.prompt is None:
            return collect_steps(ticket.output.scheduled, ticket.sampled)
        return collect(ticket.output.by_rank, ticket.sampled, ticket.prompt)
