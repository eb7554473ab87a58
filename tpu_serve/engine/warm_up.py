"""`--warm-up-measure`: both ways of running the experts, timed on this host's devices once per token count, and the choice that follows.

What is timed is what the server runs: the layer on the mesh with the first such layer's weights as they were loaded, its fused kernel by the
plan for that token count, and XLA. Tokens and their experts are random, every expert equally likely, the same at every start.

Rows of tables are for the token counts in `moe_plan.key.BUCKETS`, and so only these are timed: for a server's bucket of 96 the 128 tokens whose
row answers for it. Its row is about 128 tokens, which it says, and decides for 96 as for all that the bucket holds.

A row that was measured holds for this host alone. It goes into the first folder that was named, unless a row for all hosts, or for another one,
lies there in its place: that one stays, and the new one goes to `MoEOptions.measured_folder`, where it is found as well.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import logging
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpu_serve.config import ConfigError, MoEOptions
from tpu_serve.device.mesh import replicated
from tpu_serve.layers.moe.planned import Planned
from tpu_serve.layers.moe.routing import ExpertWeights, Routing
from tpu_serve.layers.moe.timing import Timing, time_layer
from tpu_serve.moe_plan.key import BUCKETS, KERNEL, bucket_of, key_of
from tpu_serve.moe_plan.lookup import Row, Rows
from tpu_serve.moe_plan.merge import least_fused, merge_into, read
from tpu_serve.moe_plan.plan import MoEPlan
from tpu_serve.moe_plan.planner import Planner
from tpu_serve.tuning_tables.files import table_path
from tpu_serve.tuning_tables.table import Entry, Provenance, Table

logger = logging.getLogger(__name__)

SEED = 0

Time = Callable[["Way", tuple[jax.Array, Routing, ExpertWeights]], Timing]
"""What times a way with its arguments, as `time_layer` does."""


@dataclass(frozen=True)
class Way:
    """One way of running the layer for one number of tokens, called as `time_layer` wants it.

    Attributes:
      plan: that the layer goes by.
      layer: which takes no other.
    """

    plan: MoEPlan
    layer: Planned

    def __call__(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        """[T, H] -> [T, H] in the type of x, on every device."""
        return self.layer(x, routing, weights)


class WarmUp:
    """Made before weights are loaded, to refuse what cannot be measured; run after that.

    Args:
      options: with `warm_up_measure`.
      experts: the layer with its plans.
      buckets: token counts that get a program.
      time: raises anything where it cannot, and that number of tokens goes by the rule.

    Raises:
      ConfigError: there is nothing to choose, or the rows cannot be kept.
    """

    def __init__(self, options: MoEOptions, experts: Planned, buckets: Sequence[int], time: Time = time_layer):
        self._options, self._experts, self._buckets, self._time = options, experts, tuple(buckets), time
        self._host, self._jax = platform.node(), importlib.metadata.version("jax")
        self._planner = experts.planner
        policy = self._planner.policy
        if (reason := self._nothing_to_choose()) is not None:
            raise ConfigError(f"--warm-up-measure has nothing to choose: {reason}.")
        if not self._host:
            raise ConfigError("--warm-up-measure keeps times under the name of this host, which has none.")
        self._fused = self._always(dataclasses.replace(policy, backend="fused"))
        self._xla = self._always(
            dataclasses.replace(policy, unavailable={**policy.unavailable, "fused": "XLA's time is wanted"})
        )
        self._folder = options.tuning_folders[0] if options.tuning_folders else options.measured_folder
        self._check_folder()

    def run(self, params: Any) -> Planned:
        """Times what was not timed on this host before, and logs and keeps what it finds.

        Args:
          params: weights on the devices.

        Returns:
          The layer with the plans that follow.
        """
        weights = first_experts(params)
        if weights is None:
            logger.warning("MoE warm-up: no layer has experts, nothing is measured")
            return self._experts
        new: list[Row] = []
        kept: set[Path] = set()
        missing, known = self._wanted()
        if known:
            logger.info("MoE warm-up: measured before, at %s tokens", ", ".join(map(str, known)))
        for num_tokens in missing:
            try:
                row = self._measure(num_tokens, weights)
            except Exception as error:  # of this number of tokens alone: the compiler's, the device's or the clock's
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                logger.warning("MoE warm-up: %d tokens could not be measured, the rule decides: %s", num_tokens, reason)
                continue
            new.append(row)
            try:
                kept.add(merge_into(self._folder_for(row), self._planner.chip, [row], self._jax))
            except ConfigError as error:
                logger.warning("MoE warm-up: the times for %d tokens are not kept: %s", num_tokens, error)
        if not new:
            return self._experts
        for path in sorted(kept):
            logger.info("MoE warm-up: the times are kept in %s", path)
        old, chip = self._planner.rows, self._planner.chip
        table = Table(KERNEL, chip.name, chip.vmem_bytes, tuple(old), tuple(old.thresholds))
        tables = [dataclasses.replace(table, entries=tuple(new), thresholds=()), table]
        planner = self._replanned(rows=Rows(tables, jax=self._jax, host=self._host))
        planner.prepare(self._buckets)
        return dataclasses.replace(self._experts, planner=planner)

    def _nothing_to_choose(self) -> str | None:
        planner = self._planner
        if planner.policy.backend != "auto" or planner.policy.tiles is not None:
            return "what runs the experts is given"
        if not planner.chip.is_tpu:
            return "on a CPU the fused kernel is only simulated, and its time says nothing"
        if planner.num_devices == 1:
            return "on one device the fused kernel is never taken (--tensor-parallel-size)"
        refusals = [self._refusal(num_tokens) for num_tokens in self._table_buckets()]
        if not refusals:
            return f"{self._buckets[0]} tokens are more than the {BUCKETS[-1]} that tables have rows for"
        if None not in refusals:
            return f"the fused kernel cannot run this model: {refusals[0]}"
        return None

    def _refusal(self, num_tokens: int) -> str | None:
        """Why the kernel cannot run so many tokens, or None."""
        plan = self._planner.plan(num_tokens)
        return None if plan.can_run_kernel else dict(plan.refusals)["fused"]

    def _table_buckets(self) -> list[int]:
        """Token counts of rows that answer for the server's, rising. What is more than any of them has none."""
        return sorted({bucket for bucket in map(bucket_of, self._buckets) if bucket is not None})

    def _wanted(self) -> tuple[list[int], list[int]]:
        """Token counts to be timed, and those that were, with this minor version of JAX, on a host whose times hold here."""
        missing: list[int] = []
        known: list[int] = []
        for num_tokens in self._table_buckets():
            if (reason := self._refusal(num_tokens)) is not None:
                logger.info(
                    "MoE warm-up: nothing to choose for %d tokens, the fused kernel cannot: %s", num_tokens, reason
                )
                continue
            row = self._own_row(self._fused.planner.plan(num_tokens))
            is_known = row is not None and row.min_tokens_fused is not None and row.provenance.rank(self._jax) == 0
            (known if is_known else missing).append(num_tokens)
        return missing, known

    def _own_row(self, plan: MoEPlan) -> Row | None:
        """The row for this very problem that the kernel's config is from, if it is."""
        key = key_of(plan.problem)
        return self._planner.rows.exact(key) if plan.source == "exact" and key is not None else None

    def _measure(self, num_tokens: int, weights: ExpertWeights) -> Row:
        """The row for one of the tables' token counts."""
        ways = [Way(one.planner.plan(num_tokens), one) for one in (self._fused, self._xla)]
        arguments = *self._tokens(num_tokens), weights
        timings = [self._time(way, arguments) for way in ways]
        fused, us_xla = timings[0], round(timings[1].us, 3)
        us = round(fused.us, 3)
        kernel, xla = (way.plan for way in ways)
        least = least_fused(num_tokens, us, us_xla)
        logger.info(
            "MoE warm-up: %d tokens take %.1f us with the fused kernel (%s %s, %s), %.1f us with XLA (%s): %s is taken",
            num_tokens, us, kernel.way, kernel.tiles, kernel.origin, us_xla, xla.way, "XLA" if least else "the kernel",
        )  # fmt: skip
        found = Provenance(
            "measured", datetime.datetime.now(datetime.UTC).date().isoformat(), self._jax, _libtpu(), us=us, us_xla=us_xla,
            iterations=fused.iterations, spread=round(fused.spread, 5), routing="uniform", host=self._host,
        )  # fmt: skip
        key, own = key_of(kernel.problem), self._own_row(kernel)
        assert key is not None
        assert kernel.config is not None
        # A row holds with and without a dispatch; the config that was fitted to this problem has lost its own.
        return Entry(key, kernel.config if own is None else own.value, found, least)

    def _tokens(self, num_tokens: int) -> tuple[jax.Array, Routing]:
        """[T, H] in the layer's type and where they go, the same on every device."""
        layer, random = self._planner.layer, np.random.default_rng([SEED, num_tokens])
        x = random.standard_normal((num_tokens, layer.hidden), np.float32).astype(np.dtype(layer.dtype))
        # The places of the largest of random numbers are a draw without replacement.
        ids = np.argpartition(random.random((num_tokens, layer.num_experts), np.float32), -layer.top_k, axis=1)
        shares = np.full((num_tokens, layer.top_k), 1 / layer.top_k, np.float32)
        arrays = x, shares, ids[:, -layer.top_k :].astype(np.int32)
        placed = [jax.device_put(one, replicated(self._experts.fused.mesh)) for one in arrays]
        return placed[0], Routing(*placed[1:])

    def _always(self, policy: Any) -> Planned:
        """The layer by another policy."""
        return dataclasses.replace(self._experts, planner=self._replanned(policy=policy))

    def _replanned(self, **changes: Any) -> Planner:
        old = self._planner
        given = {"policy": old.policy, "rows": old.rows, **changes}
        return Planner(old.layer, old.num_devices, old.chip, **given)

    def _folder_for(self, row: Row) -> Path:
        """The first folder, or the user's own where another host's row, or one for all of them, would be replaced."""
        held = {one.key: one.provenance.host for one in read(self._folder, self._planner.chip).entries}
        return self._folder if held.get(row.key, self._host) == self._host else self._options.measured_folder

    def _check_folder(self) -> None:
        place = table_path(self._folder, self._planner.chip.name, KERNEL).parent
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise ConfigError(
                f"--warm-up-measure cannot keep times in {place}: {error.strerror}. --moe-tuning-dir names another folder."
            ) from None


def first_experts(params: Any) -> ExpertWeights | None:
    """The experts of the first layer that has any, of a model's weights or what describes them."""
    found: Iterator[Any] = (layer["experts"] for layer in params["layers"] if "experts" in layer)
    first = next(found, None)
    return None if first is None else ExpertWeights(first["gate_up"], first["down"])


def _libtpu() -> str:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return ""
