"""Every plan of the layers that tables are made for, in a form in which a review sees a choice move.

`python tests/moe_plan_golden.py` rewrites the file that the test compares with.
"""

import itertools
from pathlib import Path

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.cases import DEVICE_COUNTS, WORKLOADS
from tpu_serve.moe_plan.key import BUCKETS
from tpu_serve.moe_plan.layer import MoELayer, Policy
from tpu_serve.moe_plan.plan import plan_layer
from tpu_serve.moe_plan.rows import rows_of

FILE = Path(__file__).parent / "fixtures" / "moe_plans.txt"


def golden_text():
    """A paragraph for every chip, model, format and number of devices; token counts that follow one another and share an answer share a line."""
    lines = []
    for name, chip in TPU_CHIPS.items():
        known = rows_of(name)
        for workload in WORKLOADS.values():
            for format in workload.formats(name):
                layer = MoELayer.of_workload(workload, format)
                for num_devices in DEVICE_COUNTS:
                    lines.append(f"{workload.name} {format} on {num_devices} x {name}")
                    plans = [plan_layer(layer, tokens, num_devices, chip, Policy(), known) for tokens in BUCKETS]
                    for answer, same in itertools.groupby(plans, _answer):
                        tokens = [plan.num_tokens for plan in same]
                        shown = str(tokens[0]) if len(tokens) == 1 else f"{tokens[0]}-{tokens[-1]}"
                        lines.append(f"  {shown}: {answer}")
    return "\n".join(lines) + "\n"


def _answer(plan):
    """Path, tiles and where they come from, without what was measured or calculated."""
    if plan.config is None:
        return plan.path
    kind = "" if plan.provenance is None else f" {plan.provenance.kind}"
    return f"{plan.way} {plan.tiles} ({plan.source}{kind})"


if __name__ == "__main__":
    FILE.write_text(golden_text())
