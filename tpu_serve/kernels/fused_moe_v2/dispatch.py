"""Mode G's dispatch: tokens of the group come to every device, by XLA before the kernel or by pushes inside it, into HBM or VMEM."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.fused_moe_v2 import exchange
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.exchange import wait_rows
from tpu_serve.kernels.fused_moe_v2.gather import Gather, Visits
from tpu_serve.kernels.fused_moe_v2.problem import Problem, ceil_div


class Dispatch:
    """Source of gathered rows: pushes own tokens, then gathers the rows of each visit once their round is there.

    Tokens of round r (see `tables.py`) are counted on semaphore r, by sender and receiver alike.
    """

    def __init__(
        self,
        problem: Problem,
        config: Config,
        axis: str,
        tables: dict[str, Any],
        inputs: dict[str, Any],
        outputs: dict[str, Any],
        scratch: dict[str, Any],
    ) -> None:
        self._problem, self._config, self._axis = problem, config, axis
        self._tables, self._inputs, self._scratch = tables, inputs, scratch
        self._pushes = config.dispatch != "xla_ag"
        self._moves = self._pushes or config.resident
        self._rows = scratch["tokens"] if config.resident else outputs["tokens"] if self._pushes else inputs["x"]
        self._visits = Visits(problem, tables)
        self._gather = Gather(problem, config, tables, inputs, self._rows, scratch)

    def prepare(self, visit: Any) -> None:
        self._gather.start_windows(visit)

    def dispatch(self) -> None:
        """Starts all pushes. The nearest peers come first: round by round, every device with another receiver."""
        if not self._moves:
            return
        self._scratch["rounds_here"][0] = jnp.int32(0)
        if not self._pushes:
            pltpu.make_async_copy(self._inputs["x"], self._rows, self._scratch["token_arrived"].at[0]).start()
            return
        p = self._problem
        for distance in range(p.num_devices):
            arrived = self._scratch["token_arrived"].at[distance * self._config.rounds // p.num_devices]
            device = exchange.peer(self._axis, p.num_devices, distance)
            if self._config.dispatch == "push_ag":
                self._push(0, p.local_tokens, device, arrived)
            else:
                self._push_runs(device, arrived)

    def _push(self, first: Any, count: Any, device: Any, arrived: Any) -> None:
        p = self._problem
        here = jax.lax.axis_index(self._axis) * p.local_tokens + first
        exchange.push(
            self._inputs["x"].at[pl.ds(first, count)], self._rows.at[pl.ds(here, count)],
            self._scratch["token_sent"], arrived, self._axis, device,
        )  # fmt: skip

    def _push_runs(self, device: Any, arrived: Any) -> None:
        limit = ceil_div(self._problem.local_tokens, 2)

        def one(index: Any, _: None) -> None:
            run = device * limit + index
            self._push(self._tables["send_first"][run], self._tables["send_count"][run], device, arrived)

        jax.lax.fori_loop(0, self._tables["send_runs"][device], one, None)

    def start(self, visit: Any) -> None:
        if self._moves:
            self._await_round(self._visits.field("virtual", visit) // self._problem.local_experts)
        self._gather.start_rows(visit)

    def _await_round(self, needed: Any) -> None:
        """Waits for the tokens of all rounds up to `needed` that have not been waited for."""
        here = self._scratch["rounds_here"][0]

        def one(index: Any, _: None) -> None:
            self._wait_round(index)

        jax.lax.fori_loop(here, needed + 1, one, None)
        self._scratch["rounds_here"][0] = jnp.maximum(here, needed + 1)

    def _wait_round(self, index: Any) -> None:
        wait_rows(self._rows, self._tables["totals"][3 + index], self._scratch["token_arrived"].at[index])

    def wait(self, visit: Any) -> None:
        self._gather.wait_rows(visit)

    def drain(self) -> None:
        """What nobody needed must still be counted, and own tokens must have left before their buffer is somebody else's."""
        if not self._moves:
            return
        p = self._problem
        self._await_round(jnp.int32(self._config.rounds - 1))
        if not self._pushes:
            return
        if self._config.dispatch == "push_ag":
            sent: Any = jnp.int32(p.group_tokens)
        else:
            sent = jnp.int32(0)
            for device in range(p.num_devices):
                sent = sent + self._tables["send_tokens"][device]
        wait_rows(self._rows, sent, self._scratch["token_sent"])
