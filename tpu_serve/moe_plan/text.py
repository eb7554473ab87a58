"""Plans as a table to read."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_serve.device.chip import MIB
from tpu_serve.moe_plan.plan import MoEPlan

_HEADERS = ("tokens", "path", "tiles", "from", "VMEM MiB", "SMEM KiB", "HBM MB", "ICI MB", "bound us", "limit", "why")
_LEFT = {"path", "tiles", "from", "limit", "why"}

NOTE = "Bytes and bounds are calculated for uniform routing, on one device; nothing here was measured unless the row says so."


def table(plans: Sequence[MoEPlan]) -> str:
    """One line a plan, then what was refused and why."""
    rows = [_row(plan) for plan in plans]
    widths = [max(len(row[column]) for row in (_HEADERS, *rows)) for column in range(len(_HEADERS))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for cell, width, name in zip(cells, widths, _HEADERS, strict=True)
        )
        return "  ".join(padded).rstrip()

    notes = [f"{plan.num_tokens} tokens: {note}" for plan in plans for note in plan.notes]
    return "\n".join([line(_HEADERS), *map(line, rows), "", NOTE, *notes])


def _row(plan: MoEPlan) -> tuple[str, ...]:
    is_kernel = plan.config is not None
    return (
        str(plan.num_tokens), plan.way, plan.tiles, plan.origin,
        f"{plan.vmem_bytes / MIB:.1f}" if is_kernel else "", f"{plan.smem_bytes / 1024:.0f}" if is_kernel else "",
        _megabytes(plan.hbm_bytes), _megabytes(plan.ici_bytes),
        "" if plan.bound_us is None else f"{plan.bound_us:.0f}", plan.limit, plan.reason,
    )  # fmt: skip


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}" if size < 1e7 else f"{size / 1e6:.0f}"
