"""Which implementation a token count goes to: the fused kernel where it pays, XLA elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.heuristic import mode_d_tokens
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.moe_plan.key import bucket_of
from tpu_serve.moe_plan.lookup import Found, Rows
from tpu_serve.tuning_tables.table import PORTED, Threshold

PATHS = ("dense", "ragged", "grouped", "gathered", "fused")
"""Every expert on every token; sorted by expert, with XLA's grouped product; the same made of kernels for one device; each expert in use on every
token; the expert-parallel kernel."""

LEAST_GATHERED_TOKENS = 512
"""Tokens from which the kernel's mode G is taken where nobody measured: published measurements on eight tpu7x devices see kernels that gather
rows get ahead of XLA between 128 and 1024 tokens."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the kernel is worth it, and why or why not."""

    is_worth_it: bool
    reason: str


def is_fused_worth_it(problem: Problem, chip: Chip, found: Found, rows: Rows) -> Verdict:
    """By what was measured if there is such, else by the regimes: so few tokens that mode D runs at the speed of reading the weights, or so
    many that gathering rows pays. Quantised experts are for the kernel at any number of tokens: see `Ragged` for what XLA would do."""
    tokens, weights = problem.num_tokens, problem.weights
    if problem.num_devices == 1 and not weights.scaled:
        return Verdict(False, "on one device nothing travels between experts")
    row = found.row
    is_its_bucket = row is not None and found.source in ("exact", "bucket") and bucket_of(tokens) == row.key.num_tokens
    if row is not None and row.min_tokens_fused is not None and is_its_bucket and rows.is_measured(row):
        measured, least = row.provenance, row.min_tokens_fused
        times = f"{measured.us:.0f} us against {measured.us_xla:.0f} us of XLA, measured at {row.key.num_tokens} tokens"
        if tokens < least:
            return Verdict(False, f"it pays from {least} tokens ({times})")
        return Verdict(True, times)
    if weights.scaled:
        return Verdict(True, f"XLA would widen all experts from {weights.weight} to {problem.dtype} at every call")
    few = mode_d_tokens(problem, chip)
    if tokens <= few and found.config.mode == "D":  # rows too long for it, or filled up to too many, are gathered
        return Verdict(True, f"up to {few} tokens it runs at the speed of reading the weights (calculated)")
    many, origin = least_gathered(problem, rows)
    if tokens >= many:
        return Verdict(True, f"from {many} tokens gathering rows pays ({origin})")
    return Verdict(
        False, f"{tokens} tokens are more than the {few} of mode D and fewer than the {many} of mode G ({origin})"
    )


def least_gathered(problem: Problem, rows: Rows) -> tuple[int, str]:
    """Tokens from which gathering rows is expected to pay, and who says so."""
    for threshold in rows.thresholds:
        if _is_about(threshold, problem):
            known = threshold.provenance
            return threshold.min_tokens, known.source if known.kind == PORTED else "measured"
    return LEAST_GATHERED_TOKENS, "not measured"


def _is_about(threshold: Threshold, problem: Problem) -> bool:
    names = ("hidden", "intermediate", "num_experts", "top_k", "num_devices")
    same = all(getattr(threshold, name) == getattr(problem, name) for name in names)
    return same and threshold.weights == problem.weights.weight


def without_xla(problem: Problem) -> str | None:
    """Why none of the others but the kernel can run a problem, or None.

    They have every activation, biases, and every format: quantised experts are widened to the type of the tokens, which asks for no
    arithmetic in their own.
    """
    if problem.post_norm is not None or problem.scale_on_input:
        return "XLA's layer has no norm of experts' rows and no scaled input"
    return None
