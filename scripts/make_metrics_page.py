"""Writes docs/metrics.md from what /metrics declares: `python scripts/make_metrics_page.py`. A test compares the two."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.metrics_core import Metric

from tpu_serve.server.metric_families import LABELS, OWN_PREFIX
from tpu_serve.server.metrics import Metrics

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
TEXT = """\
# Metrics

`GET /metrics` answers in the Prometheus text format, from the first moment on. Metrics of the model have the labels `model_name` (the
first served name) and `engine` ("0"). Those of the first table are told twice, as `vllm:…`, so that dashboards, gateways and scrapers
made for vLLM work unchanged, and as `tpu_serve:…`; `--metrics-prefix` takes another name for `vllm`, and `--metrics-prefix tpu_serve`
leaves the repetition out. Add up one of the two, not both.

- Every choice of an answer is one request of the engine (`n` choices count `n` times), except in `request_params_n` and
  `request_max_num_generation_tokens`, which count prompts.
- Whatever ends a request counts in `request_success_total`, aborts too. Sums of per-request histograms agree with the totals: a request
  that ended before its first token counts as 0 prompt tokens. Its phases (queue, prefill, decode, inference) and the two histograms of
  preemptions and computed tokens are left out.
- Gauges are those of the last step, which the engine's process tells with its outputs, so they are 0 as soon as nothing runs.
- `process_…` and `python_…` are of the server's own process, which holds neither weights nor the engine; `hbm_bytes` tells what devices hold.
- `compile_total{{phase="serving"}}` should stay 0: everything is compiled for the start, see [start.md](start.md). `--on-recompile` says what else happens.

## As other servers tell them, too

{shared}

## Of this server alone

{own}

## Of HTTP and of the process

`handler` is the path as it is declared, `none` for paths that do not exist; `status` is `2xx` and so on.

{other}

Histograms have `_bucket`, `_sum` and `_count`; summaries have `_sum` and `_count`.
"""


def page() -> str:
    """The page as it should be."""
    metrics = Metrics("model")
    metrics.http_request("/", "GET", 200, 0.0, 0, 0)  # labels of these are known from samples only
    families = list(metrics.registry.collect())
    shared = [family for family in families if family.name.startswith("vllm:")]
    names = {family.name.removeprefix("vllm:") for family in shared}
    own = [
        family
        for family in families
        if family.name.startswith(f"{OWN_PREFIX}:") and family.name.removeprefix(f"{OWN_PREFIX}:") not in names
    ]
    other = [family for family in families if ":" not in family.name]
    return TEXT.format(shared=_table(shared), own=_table(own), other=_table(other))


def _table(families: list[Metric]) -> str:
    rows = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda family: family.name):
        suffix = "_total" if family.type == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in _labels(family))
        rows.append(f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(rows)


def _labels(family: Metric) -> list[str]:
    """Labels beside those of every metric, in alphabetic order."""
    names = {name for sample in family.samples for name in sample.labels} | set(getattr(family, "_labelnames", ()))
    return sorted(names - {*LABELS, "le", "quantile"})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
