"""Mode G's output side: finished rows of a visit leave in runs while the next visit computes."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.fused_moe_v2 import exchange
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.exchange import wait_rows
from tpu_serve.kernels.fused_moe_v2.gather import Visits
from tpu_serve.kernels.fused_moe_v2.problem import Problem


class Delivery:
    """Sends from the buffer of the visit's parity; a buffer is used again once everything sent from it has left.

    With `combine="push"` each run goes to the owner of its tokens, who counts what arrives. With "rs", and on one device, all rows stay in a
    local slab.
    """

    def __init__(
        self,
        problem: Problem,
        config: Config,
        axis: str,
        tables: dict[str, Any],
        outputs: dict[str, Any],
        scratch: dict[str, Any],
    ) -> None:
        self._problem, self._axis, self._tables = problem, axis, tables
        self._outputs, self._scratch = outputs, scratch
        self._stays = config.combine == "rs" or problem.num_devices == 1
        self._visits = Visits(problem, tables)
        self._parts = [(name, f"arrived_{name}") for name in ("done", "done_scale") if name in scratch]

    def reuse(self, visit: Any) -> None:
        """Waits until the buffer's rows of two visits ago have left."""

        @pl.when(visit >= 2)
        def _() -> None:
            self._wait_sent(visit - 2)

    def _wait_sent(self, visit: Any) -> None:
        parity, count = jax.lax.rem(visit, 2), self._visits.field("num_rows", visit)
        for name, _ in self._parts:
            rows = self._scratch[name].at[parity, pl.ds(0, count)]
            exchange.wait_bytes_of(rows, self._scratch["done_sent"].at[parity])

    def send(self, visit: Any) -> None:
        me = jax.lax.axis_index(self._axis)
        for distance in range(1, self._problem.num_devices + 1):  # peers first, from the next one on; own rows last
            device = jax.lax.rem(me + distance, self._problem.num_devices)
            length, row, _, target = self._visits.piece(visit, device)

            @pl.when(length > 0)
            def _(device: Any = device, length: Any = length, row: Any = row, target: Any = target) -> None:
                self._send_run(jax.lax.rem(visit, 2), device, length, row, target)

    def _send_run(self, parity: Any, device: Any, length: Any, row: Any, target: Any) -> None:
        sent = self._scratch["done_sent"].at[parity]
        for name, output in self._parts:
            source = self._scratch[name].at[parity, pl.ds(row, length)]
            place = self._outputs[output].at[pl.ds(target, length)]
            if self._stays:
                pltpu.make_async_copy(source, place, sent).start()
            else:
                exchange.push(source, place, sent, self._scratch["done_arrived"], self._axis, device)

    def store_inner(self, visit: Any) -> None:
        """First stage: activated rows of a whole visit to HBM. The copy of the visit before has left by the time the next begins."""
        parity = jax.lax.rem(visit, 2)
        self._inner_copy(visit, parity).start()

        @pl.when(visit >= 1)
        def _() -> None:
            self._inner_copy(visit - 1, 1 - parity).wait()

    def _inner_copy(self, visit: Any, parity: Any) -> Any:
        return pltpu.make_async_copy(
            self._scratch["inner"].at[parity], self._outputs["inner"].at[visit], self._scratch["done_sent"].at[parity]
        )

    def drain(self, count: Any) -> None:
        """Waits for everything that left and everything that must come."""
        if "inner" in self._outputs:

            @pl.when(count > 0)
            def _() -> None:
                self._inner_copy(count - 1, jax.lax.rem(count - 1, 2)).wait()

            return
        for back in (2, 1):

            @pl.when(count >= back)
            def _(back: int = back) -> None:
                self._wait_sent(count - back)

        if not self._stays:
            for _name, output in self._parts:
                wait_rows(self._outputs[output], self._tables["totals"][2], self._scratch["done_arrived"])
