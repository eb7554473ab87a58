"""What is drawn of benchmarks' results: documents to charts, kind by kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_serve.bench.charts import Chart, Curve, Mark, Point
from tpu_serve.bench.page import Section
from tpu_serve.config import ConfigError

Document = Mapping[str, Any]
Found = Sequence[tuple[Path, Document]]
COMPILED_NOTE = (
    "Compiled and modelled or calculated for devices that are not here: the fused kernel's time is modelled from its compiled schedule, that of XLA "
    "is the least that its bytes allow. Nothing here was measured on a TPU."
)


def sections(found: Found) -> list[Section]:
    """A section for each kind of result that is there.

    Args:
      found: documents, and the files that they are from.

    Raises:
      ConfigError: a document is none that can be drawn.
    """
    kinds: dict[str, list[tuple[Path, Document]]] = {name: [] for name in _SECTIONS}
    for path, document in found:
        kind = kind_of(document)
        if kind not in kinds:
            raise ConfigError(
                f"{path} holds {f'a result of bench {kind}' if kind else 'no result of a benchmark'}: bench report draws "
                f"{', '.join(name for name in _SECTIONS)}."
            )
        kinds[kind].append((path, document))
    try:
        return [_SECTIONS[kind](some) for kind, some in kinds.items() if some]
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"A result lacks what its benchmark writes: {error!r}.") from None


def kind_of(document: Document) -> str | None:
    """Name of the benchmark; None where it is no result. Those of `bench serve` have the keys of other programs' and do not say."""
    if "benchmark" in document:
        return str(document["benchmark"])
    return "serve" if "output_throughput" in document else None


def _serve(found: Found) -> Section:
    documents = [document for _, document in found]
    groups = _grouped(documents, lambda one: str(one.get("label") or one.get("model_id")))
    charts = []
    for metric, name in (
        ("ttft", "Time to first token"),
        ("tpot", "Time per output token"),
        ("e2el", "End-to-end latency"),
    ):
        for figure in ("median", "p99"):
            curves = [
                Curve(label, [_load_point(one, one[f"{figure}_{metric}_ms"]) for one in sorted(some, key=_load_order)])
                for label, some in groups.items()
                if all(isinstance(one.get(f"{figure}_{metric}_ms"), int | float) for one in some)
            ]
            if curves:
                charts.append(
                    Chart(
                        title=f"{name}, {'median' if figure == 'median' else '99th percentile'}",
                        x_title="output tokens per second",
                        y_title="milliseconds",
                        curves=curves,
                    )
                )
    ordered = [one for some in groups.values() for one in sorted(some, key=_load_order)]
    headings = (
        "label", "load", "requests", "failed", "requests/s", "output tokens/s", "median TTFT ms", "p99 TTFT ms", "server mean TTFT ms",
        "median TPOT ms", "p99 TPOT ms", "KV hits", "compiled",
    )  # fmt: skip
    return Section(
        title="Serving: latency over throughput",
        charts=charts,
        headings=headings,
        rows=[_serve_row(one) for one in ordered],
        notes=[
            "Each point is a run at one load: requests under way at most, or requests per second.",
            *_origins(documents),
        ],
        warnings=_serve_warnings(ordered),
    )


def _serve_row(one: Document) -> list[str]:
    server = one.get("server") or {}
    hits = server.get("kv_hit_rate")
    return [
        str(one.get("label") or one.get("model_id")), _load(one), str(one.get("num_prompts", "")), str(one.get("failed", "")),
        *map(_number, (
            one.get("request_throughput"), one.get("output_throughput"), one.get("median_ttft_ms"), one.get("p99_ttft_ms"),
            server.get("mean_ttft_ms"), one.get("median_tpot_ms"), one.get("p99_tpot_ms"),
        )),
        "" if hits is None else f"{hits:.1%}", str(server.get("num_compiled", "")),
    ]  # fmt: skip


def _serve_warnings(documents: Sequence[Document]) -> list[str]:
    found = []
    for one in documents:
        where = f"{one.get('label') or one.get('model_id')} at {_load(one)}"
        if one.get("failed"):
            found.append(f"{where}: {one['failed']} requests failed ({_causes(one)}).")
        if (one.get("server") or {}).get("num_compiled"):
            found.append(f"{where}: {one['server']['num_compiled']} programs were compiled during the run.")
    return found


def _causes(one: Document) -> str:
    return ", ".join(f"{cause}: {count}" for cause, count in (one.get("failures") or {}).items()) or "no cause given"


def _load_point(one: Document, value: float) -> Point:
    throughput = float(one["output_throughput"])
    return Point(throughput, float(value), _load(one), f"{_load(one)}, {throughput:.1f} tokens/s, {value:.2f} ms")


def _load(one: Document) -> str:
    rate, most = one.get("request_rate"), one.get("max_concurrency")
    parts = [f"{rate:g}/s"] if isinstance(rate, int | float) and math.isfinite(rate) else []
    parts += [f"{most} at once"] if most is not None else []
    return ", ".join(parts) or "all at once"


def _load_order(one: Document) -> tuple[float, float]:
    rate, most = one.get("request_rate"), one.get("max_concurrency")
    return (float(rate) if isinstance(rate, int | float) else math.inf, math.inf if most is None else float(most))


def _prefill(found: Found) -> Section:
    cases = [(_label(path, document, found), one) for path, document in found for one in document["results"]]

    def name(case: tuple[str, Document]) -> str:
        chunk = f", chunks of {case[1]['chunk']}" if "chunk" in case[1] else ""
        return f"{case[0]}batch of {case[1]['batch_size']}{chunk}"

    return Section(
        title="Prefill",
        charts=[
            _sweep_chart("Throughput", "prompt tokens", "tokens per second", cases, name, "input_len", "tokens_per_second"),
            _sweep_chart(
                "Time to the first token, median", "prompt tokens", "milliseconds", cases, name, "input_len", "latency_ms.median",
                has_log_y=True,
            ),
        ],
        headings=("case", "prompt tokens", "median ms", "p99 ms", "tokens/s", "of bound"),
        rows=[
            [name((label, one)), str(one["input_len"]), *map(_number, (one["latency_ms"]["median"], one["latency_ms"]["p99"], one["tokens_per_second"])),
             _share(one.get("bound_share"))]
            for label, one in cases
        ],
        notes=_origins([document for _, document in found]),
        warnings=_warnings(found),
    )  # fmt: skip


def _decode(found: Found) -> Section:
    cases = [(_label(path, document, found), one) for path, document in found for one in document["results"]]

    def name(case: tuple[str, Document]) -> str:
        return f"{case[0]}{case[1]['input_len']} + {case[1]['output_len']} tokens"

    return Section(
        title="Decode",
        charts=[
            _sweep_chart("Throughput", "sequences", "tokens per second", cases, name, "batch_size", "tokens_per_second"),
            _sweep_chart("Time of a step, median", "sequences", "milliseconds", cases, name, "batch_size", "step_ms.median"),
        ],
        headings=("case", "sequences", "step median ms", "step p99 ms", "tokens/s", "of bound"),
        rows=[
            [name((label, one)), str(one["batch_size"]), *map(_number, (one["step_ms"]["median"], one["step_ms"]["p99"], one["tokens_per_second"])),
             _share(one.get("bound_share"))]
            for label, one in cases
        ],
        notes=_origins([document for _, document in found]),
        warnings=_warnings(found),
    )  # fmt: skip


def _sweep_chart(
    title: str, x_title: str, y_title: str, cases: Sequence[tuple[str, Document]], name: Callable[[tuple[str, Document]], str], across: str, up: str,
    *, has_log_y: bool = False,
) -> Chart:  # fmt: skip
    curves = []
    for label, some in _grouped(cases, name).items():
        pairs = sorted((float(one[across]), _at(one, up)) for _, one in some)
        curves.append(Curve(label, [Point(x, y, note=f"{x:g} {x_title}, {y:.4g} {y_title}") for x, y in pairs]))
    return Chart(title=title, x_title=x_title, y_title=y_title, curves=curves, has_log_x=True, has_log_y=has_log_y)


def _moe(found: Found) -> Section:
    rows: list[list[str]] = []
    charts = []
    results = [one for _, document in found for one in document["results"]]
    for layer, some in _grouped(results, _layer).items():
        ordered = sorted(some, key=lambda one: one["num_tokens"])
        times = [(one["num_tokens"], _times(one)) for one in ordered]
        names = list(dict.fromkeys(name for _, by_name in times for name in by_name))
        curves = [
            Curve(
                name,
                [
                    Point(tokens, by_name[name], note=f"{tokens} tokens, {by_name[name]:.4g} ms")
                    for tokens, by_name in times
                    if name in by_name
                ],
            )
            for name in names
        ]
        marks = crossovers([(tokens, by_name) for tokens, by_name in times if len(by_name) > 1])
        if curves:
            charts.append(
                Chart(
                    title=layer, x_title="tokens of the step", y_title="milliseconds", curves=curves, marks=marks, has_log_x=True,
                    has_log_y=True,
                )
            )  # fmt: skip
        for tokens, by_name in times:
            fastest = min(by_name, key=by_name.__getitem__) if len(by_name) > 1 else ""
            rows.append(
                [layer, str(tokens), ", ".join(f"{name} {value:.4g}" for name, value in by_name.items()), fastest]
            )
    documents = [document for _, document in found]
    notes = [COMPILED_NOTE] if any(document.get("is_compiled") for document in documents) else []
    return Section(
        title="Mixture of experts: which way is the fastest",
        charts=charts,
        headings=("layer", "tokens", "milliseconds", "fastest"),
        rows=rows,
        notes=[*notes, *_origins(documents)],
        warnings=_warnings(found),
    )


def crossovers(times: Iterable[tuple[int, Mapping[str, float]]]) -> list[Mark]:
    """Where another way becomes the fastest, as the token count rises."""
    fastest = [(tokens, min(by_name, key=by_name.__getitem__)) for tokens, by_name in times]
    return [
        Mark(tokens, f"from {tokens}: {name}")
        for (_, before), (tokens, name) in itertools.pairwise(fastest)
        if name != before
    ]


def _layer(one: Document) -> str:
    if "chip" in one:
        return f"{one['workload']}, {one['format']}, {one['num_devices']} x {one['chip']}"
    return f"{one['layer']['name']}, {one['dtype']}"


def _times(one: Document) -> dict[str, float]:
    """Milliseconds by way; none where a program was refused."""
    if "chip" in one:
        named = {"fused, modelled": one["fused_us"], "XLA, at least": one["xla_least_us"]}
        return {name: us / 1e3 for name, us in named.items() if us is not None}
    return {name: ms for name, ms in one["median_ms"].items() if name != "empty"}


_SECTIONS: Mapping[str, Callable[[Found], Section]] = {
    "serve": _serve,
    "prefill": _prefill,
    "decode": _decode,
    "moe": _moe,
}


def _grouped(items: Iterable[Any], key: Callable[[Any], str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _label(path: Path, document: Document, found: Found) -> str:
    """The file's name where there are several."""
    return f"{path.stem}: " if len(found) > 1 else ""


def _origins(documents: Sequence[Document]) -> list[str]:
    """Where results were obtained, each place once."""
    return list(dict.fromkeys(filter(None, map(_origin, documents))))


def _origin(document: Document) -> str:
    model = (document.get("model") or {}).get("name") or document.get("model_id")
    device, versions = document.get("device") or {}, document.get("versions") or {}
    parts = [str(model)] if model else []
    if device:
        parts.append(f"on {device['count']} x {device['kind']} (platform {device['platform']})")
    parts += [f"{name} {versions[name]}" for name in ("tpu_serve", "jax") if name in versions]
    if (document.get("bound") or {}).get("rates"):
        bound = document["bound"]
        parts.append(
            f"shares of the bound at {bound['rates']} rates of {bound['bytes_per_second'] / 1e9:.1f} GB/s and "
            f"{bound['operations_per_second'] / 1e9:.0f} GFLOP/s"
        )
    return ", ".join(parts)


def _warnings(found: Found) -> list[str]:
    return [f"{path.name}: {warning}" for path, document in found for warning in document.get("warnings", ())]


def _at(one: Document, path: str) -> float:
    value: Any = one
    for key in path.split("."):
        value = value[key]
    return float(value)


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else ""


def _share(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, int | float) else ""
