"""Plans of a server: made once for every token bucket before anything is traced, kept, logged and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from tpu_serve.config import ConfigError
from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.legality import supports
from tpu_serve.moe_plan.key import BUCKETS, KERNEL
from tpu_serve.moe_plan.layer import MoELayer, Policy, problem_of
from tpu_serve.moe_plan.lookup import Rows
from tpu_serve.moe_plan.plan import MoEPlan, plan_layer, unavailable_paths

logger = logging.getLogger(__name__)


class Planner:
    """Answers for one layer on one group of devices, each worked out once.

    Attributes:
      layer, num_devices, chip, policy, rows: see `plan_layer`.
    """

    def __init__(
        self, layer: MoELayer, num_devices: int, chip: Chip, policy: Policy | None = None, rows: Rows | None = None
    ):
        self.layer, self.num_devices, self.chip = layer, num_devices, chip
        self.policy, self.rows = policy or Policy(), Rows() if rows is None else rows
        self._plans: dict[int, MoEPlan] = {}
        self._buckets: tuple[int, ...] = ()

    def plan(self, num_tokens: int) -> MoEPlan:
        """The plan for a step of so many tokens.

        Raises:
          ConfigError: see `plan_layer`.
        """
        made = self._plans.get(num_tokens)
        if made is None:
            made = plan_layer(self.layer, num_tokens, self.num_devices, self.chip, self.policy, self.rows)
            self._plans[num_tokens] = made
        return made

    @property
    def may_run_kernel(self) -> bool:
        """Whether some number of tokens may go to the fused kernel, so that weights must suit it."""
        if self.policy.backend != "auto":
            return self.policy.backend == "fused"
        problem = problem_of(self.layer, 1, self.num_devices, self.policy)
        unavailable = unavailable_paths(problem, self.policy)
        if not self.chip.is_tpu or "fused" in unavailable or supports(problem, self.chip) is not None:
            return False
        nothing_else_can = {"dense", "ragged"} <= unavailable.keys()
        is_worth_it_alone = problem.weights.scaled or self.policy.tiles is not None or nothing_else_can
        return self.num_devices > 1 or is_worth_it_alone

    def prepare(self, buckets: Iterable[int], *, is_strict: bool = False, is_quiet: bool = False) -> None:
        """Plans for all token counts that the server will run, and one line that says how many have a row of their own.

        Args:
          is_strict: one without is an error.
          is_quiet: nothing is logged.

        Raises:
          ConfigError: see `plan_layer`; or, if strict, token counts at which the kernel could run have no row of their own.
        """
        self._buckets = tuple(buckets)
        plans = self.plans
        if is_quiet:
            return
        _log(plans, self.num_devices)
        applicable = [plan for plan in plans if self.is_applicable(plan)]
        missing = [plan.num_tokens for plan in applicable if not plan.has_exact_row]
        if not applicable:
            if self.chip.is_tpu:
                logger.info(
                    "MoE tuning tables: not used, the fused kernel runs for none of %d token buckets", len(plans)
                )
            return
        listed = ", ".join(map(str, missing))
        logger.info(
            "MoE tuning tables: %d of %d token buckets have a row of their own in tuning_tables/%s/%s.json%s",
            len(applicable) - len(missing), len(applicable), self.chip.name, KERNEL, f"; missing: {listed}" if missing else "",
        )  # fmt: skip
        if missing and is_strict:
            never = [num_tokens for num_tokens in missing if num_tokens not in BUCKETS]
            why = f" Rows can be for {', '.join(map(str, BUCKETS))} tokens only." if never else ""
            raise ConfigError(
                f"--moe-strict-tables: no row of tuning_tables/{self.chip.name}/{KERNEL}.json is for {listed} tokens of this layer on "
                f"{self.num_devices} devices. `tpu-serve tune {KERNEL}` makes rows, --moe-tuning-dir names their folder, and --token-buckets "
                f"other token counts.{why}"
            )

    def is_applicable(self, plan: MoEPlan) -> bool:
        """Whether tables have a say: the kernel can run there, and may be taken."""
        return self.chip.is_tpu and plan.can_run_kernel and self.may_run_kernel and plan.source != "given"

    @property
    def plans(self) -> tuple[MoEPlan, ...]:
        """Of the prepared token counts."""
        return tuple(self.plan(bucket) for bucket in self._buckets)

    def counts(self) -> Counter[tuple[str, str]]:
        """Prepared plans by (way, source), for metrics."""
        return Counter((plan.way, plan.source or "none") for plan in self.plans)


def _log(plans: Sequence[MoEPlan], num_devices: int) -> None:
    """A line for every distinct answer, with the token counts that it is for."""
    alike: dict[tuple[str, str], list[MoEPlan]] = {}
    for plan in plans:
        if plan.config is not None:
            what = f"{plan.way} {plan.tiles}, {plan.origin}"
        else:
            what = plan.way + (f" on each of {num_devices} devices" if num_devices > 1 else "")
        alike.setdefault((what, plan.reason), []).append(plan)
    for (what, reason), same in alike.items():
        logger.info("MoE for %s tokens: %s (%s)", ", ".join(str(plan.num_tokens) for plan in same), what, reason)
    for plan in plans:
        for note in plan.notes:
            logger.warning("MoE for %d tokens: %s", plan.num_tokens, note)
