"""What was found, as rows of a table. How they get into the tables of a folder is `moe_plan.merge`."""

from __future__ import annotations

from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.moe_plan.key import Key
from tpu_serve.moe_plan.lookup import Row
from tpu_serve.moe_plan.merge import least_fused, merge_into, merged, read
from tpu_serve.tuner.trial import MEASURED, Trial
from tpu_serve.tuning_tables.table import Entry, Provenance

__all__ = ["Row", "compiled_row", "measured_row", "merge_into", "merged", "read"]


def compiled_row(key: Key, config: Config, trial: Trial, routing: str, date: str, jax: str, libtpu: str) -> Row:
    """A row about a config that the compiler accepts. It has no times, whatever its score."""
    provenance = Provenance(
        "compiled", date, jax, libtpu, score=trial.score, score_kind=trial.score_kind, routing=routing
    )
    return Entry(key, config, provenance)


def measured_row(
    key: Key, config: Config, trial: Trial, xla: Trial | None, routing: str, date: str, jax: str, libtpu: str,
    drift: float = 0.0,
) -> Row:  # fmt: skip
    """A row about a config that was measured.

    Args:
      xla: XLA's program measured with the same; None where it cannot run the problem.
      drift: how far the control moved meanwhile, which is the least that the spread is said to be.
    """
    us_xla = None if xla is None else xla.score
    assert trial.score is not None
    assert trial.score_kind == MEASURED
    least = None if us_xla is None else least_fused(key.num_tokens, trial.score, us_xla)
    provenance = Provenance(
        MEASURED, date, jax, libtpu, us=trial.score, us_xla=us_xla, iterations=trial.found["iterations"],
        spread=round(max(drift, trial.found["spread"]), 5), routing=routing,
    )  # fmt: skip
    return Entry(key, config, provenance, least)
