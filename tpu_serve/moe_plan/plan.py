"""The answer for one token count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_serve.config import ConfigError
from tpu_serve.device.chip import Chip, slice_grid
from tpu_serve.kernels.fused_moe_v2.bound import Bound, bound
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.legality import check, smem_bytes, vmem_bytes
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.moe_plan.key import config_to_json
from tpu_serve.moe_plan.layer import MoELayer, Policy, problem_of
from tpu_serve.moe_plan.lookup import Found, Rows, find
from tpu_serve.moe_plan.path import PATHS, is_fused_worth_it, without_xla
from tpu_serve.moe_plan.portable import choose_portable
from tpu_serve.moe_plan.traffic import Traffic, fused_traffic, xla_traffic
from tpu_serve.tuning_tables.table import Provenance
from tpu_serve.tuning_tables.typed import to_json


@dataclass(frozen=True, slots=True)
class MoEPlan:
    """How a layer runs a step of so many tokens.

    Attributes:
      problem: what the fused kernel is asked, or would be.
      path: one of `path.PATHS`.
      reason: why this one.
      config: of the kernel; None on other paths.
      source: where the config comes from, see `lookup.Source`; "" on other paths.
      provenance: of the row that it comes from, if any.
      can_run_kernel: the fused kernel has a legal config here, whatever path is taken.
      has_exact_row: the tables answer for this very problem, whatever path is taken.
      vmem_bytes, smem_bytes: of the kernel; 0 on other paths.
      hbm_bytes, ici_bytes: expected on one device, see `traffic.py`.
      bound_us: no implementation can be faster, calculated; None where the slice or its rates are not known.
      limit: what sets the bound; "" without one.
      refusals: (path, reason) of each one that was considered and not taken.
      notes: what else the user should know, rows that could not be used for example.
    """

    problem: Problem
    path: str
    reason: str
    config: Config | None
    source: str
    provenance: Provenance | None
    can_run_kernel: bool
    has_exact_row: bool
    vmem_bytes: int
    smem_bytes: int
    hbm_bytes: int
    ici_bytes: int
    bound_us: float | None
    limit: str
    refusals: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.problem.num_tokens

    @property
    def way(self) -> str:
        """The path with the kernel's mode: "fused D", "fused G"."""
        return self.path if self.config is None else f"{self.path} {self.config.mode}"

    @property
    def tiles(self) -> str:
        """The kernel's config in short, "" on other paths."""
        c = self.config
        if c is None:
            return ""
        common = f"F{c.tile_columns} x{c.ring_slots}"
        if c.mode == "D":
            return f"{common} rows {c.compact_rows or 'all'}"
        return f"{common} M{c.block_rows}/{c.tile_rows} {c.dispatch} {c.combine}{' resident' if c.resident else ''}"

    @property
    def origin(self) -> str:
        """Where the config comes from, with its row's kind and date."""
        known = self.provenance
        return self.source if known is None else f"{self.source} ({known.kind} {known.date})"

    def as_json(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens, "path": self.path, "reason": self.reason,
            "config": None if self.config is None else config_to_json(self.config), "source": self.source,
            "provenance": None if self.provenance is None else to_json(self.provenance), "has_exact_row": self.has_exact_row,
            "vmem_bytes": self.vmem_bytes, "smem_bytes": self.smem_bytes, "hbm_bytes": self.hbm_bytes,
            "ici_bytes": self.ici_bytes, "bound_us": self.bound_us, "limit": self.limit,
            "refusals": [{"path": path, "reason": reason} for path, reason in self.refusals], "notes": list(self.notes),
        }  # fmt: skip


def plan_layer(
    layer: MoELayer,
    num_tokens: int,
    num_devices: int,
    chip: Chip,
    policy: Policy | None = None,
    rows: Rows | None = None,
) -> MoEPlan:
    """Decides.

    Args:
      num_devices: that the experts are split over.
      chip: each of them.
      rows: of the chip's tables.

    Raises:
      ConfigError: the backend that the policy names cannot run this; the message is the reason.
    """
    policy, rows = policy or Policy(), Rows() if rows is None else rows
    problem = problem_of(layer, num_tokens, num_devices, policy)
    refusals: list[tuple[str, str]] = []
    unavailable = unavailable_paths(problem, policy)
    found, reason = _kernel(problem, chip, policy, rows)
    if policy.backend == "fused":
        if found is None:
            raise ConfigError(f"--moe-backend fused cannot run this model: for {num_tokens} tokens {reason}")
        return _fused_plan(problem, chip, found, "--moe-backend fused asks for it")
    if policy.backend != "auto":
        if (why := unavailable.get(policy.backend)) is not None:
            raise ConfigError(f"--moe-backend {policy.backend} cannot run this model: {why}")
        return _xla_plan(problem, chip, policy.backend, f"--moe-backend {policy.backend} asks for it", found, refusals)
    if found is None:
        refusals.append(("fused", reason))
    elif not chip.is_tpu:
        refusals.append(("fused", "on a CPU the kernel is only simulated"))
    elif found.source == "given":
        return _fused_plan(problem, chip, found, "--moe-tiles asks for it")
    else:
        verdict = is_fused_worth_it(problem, chip, found, rows)
        if verdict.is_worth_it:
            return _fused_plan(problem, chip, found, verdict.reason)
        refusals.append(("fused", verdict.reason))
    wanted, why_wanted = choose_portable(problem, rows.portable, is_tpu=chip.is_tpu)
    for path in dict.fromkeys((wanted, "ragged", "dense")):
        if (why := unavailable.get(path)) is None:
            said = [f"{path} {why_wanted}"] if path == wanted and why_wanted else []
            said += [f"not {name}: {why}" for name, why in refusals]
            return _xla_plan(problem, chip, path, "; ".join(said), found, refusals)
        refusals.append((path, why))
    if found is not None and chip.is_tpu:  # slow is better than not at all
        others = "; ".join(f"not {path}: {why}" for path, why in refusals if path != "fused")
        return _fused_plan(problem, chip, found, f"nothing else can ({others})")
    reasons = "; ".join(f"{path}: {why}" for path, why in refusals)
    raise ConfigError(f"--moe-backend auto cannot run this model: {reasons}")


def unavailable_paths(problem: Problem, policy: Policy) -> dict[str, str]:
    """Paths that cannot run a layer at any number of tokens, with the reasons: as the policy says, and what XLA's own operations lack."""
    unavailable = dict(policy.unavailable)
    if problem.format in FORMATS and (why := without_xla(problem)) is not None:
        unavailable = {path: why for path in PATHS if path != "fused"} | unavailable
    return unavailable


def _kernel(problem: Problem, chip: Chip, policy: Policy, rows: Rows) -> tuple[Found | None, str]:
    """The fused kernel's config, or why there is none."""
    if (reason := policy.unavailable.get("fused")) is not None:
        return None, reason
    try:
        found = find(problem, chip, rows)
    except ValueError as error:
        return None, str(error)
    if policy.tiles is None:
        return found, ""
    if (reason := check(problem, policy.tiles, chip)) is not None:
        note = f"the tiles given by --moe-tiles are not legal here: {reason}"
        return Found(found.config, found.source, found.row, (*found.passed_over, note)), ""
    return Found(policy.tiles, "given"), ""


def _bound(problem: Problem, chip: Chip) -> Bound | None:
    if not chip.is_tpu or slice_grid(chip, problem.num_devices) is None:
        return None
    if problem.weights.activation not in chip.peak_ops:
        return None
    return bound(problem, chip)


def _fused_plan(problem: Problem, chip: Chip, found: Found, reason: str) -> MoEPlan:
    config, row = found.config, found.row
    return _made(
        problem, chip, "fused", reason, fused_traffic(problem, config), config=config, source=found.source,
        provenance=None if row is None else row.provenance, can_run_kernel=True, has_exact_row=found.source == "exact",
        vmem_bytes=vmem_bytes(problem, config), smem_bytes=smem_bytes(problem, config), notes=found.passed_over,
    )  # fmt: skip


def _xla_plan(
    problem: Problem, chip: Chip, path: str, reason: str, found: Found | None, refusals: list[tuple[str, str]]
) -> MoEPlan:
    return _made(
        problem, chip, path, reason, xla_traffic(problem, path), refusals=tuple(refusals), can_run_kernel=found is not None,
        has_exact_row=found is not None and found.source == "exact", notes=() if found is None else found.passed_over,
    )  # fmt: skip


def _made(problem: Problem, chip: Chip, path: str, reason: str, traffic: Traffic, **rest: Any) -> MoEPlan:
    least = _bound(problem, chip)
    given: dict[str, Any] = {
        "config": None, "source": "", "provenance": None, "vmem_bytes": 0, "smem_bytes": 0,
        "bound_us": None if least is None else least.seconds * 1e6, "limit": "" if least is None else least.limit,
    } | rest  # fmt: skip
    return MoEPlan(problem, path, reason, hbm_bytes=traffic.hbm_bytes, ici_bytes=traffic.ici_bytes, **given)
