"""What was tried and chosen as one HTML file to look at: it needs no other file, no script and no network."""

from __future__ import annotations

import html
from collections.abc import Sequence

from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.tuner.run import TUNED, Result
from tpu_serve.tuner.trial import BYTES, MEASURED, SCHEDULE, Trial

MEANINGS = {
    MEASURED: "Scores are measured: microseconds of one layer on the device, the mean over the routings.",
    SCHEDULE: "Scores are modelled from the compiled schedule, in microseconds. Nothing was measured.",
    BYTES: "Scores are calculated from bytes, operations and links, in microseconds, for configs that compile. Nothing was measured.",
}
HEADINGS = {
    MEASURED: "measured",
    SCHEDULE: "modelled from compiled schedules",
    BYTES: "compiled, ranked by calculation",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; background: #fff }
h2 { font-size: 1.05rem; margin: 2rem 0 .2rem } p { margin: .2rem 0 } svg { display: block; margin: .4rem 0; max-width: 100% }
text { font: 12px system-ui, sans-serif; fill: #222 } .bar { fill: #b8c4d6 } .chosen { fill: #2563a8 } .no { fill: #a33 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181a1d } text { fill: #ddd } .bar { fill: #4b586b } .chosen { fill: #6aa5e8 } .no { fill: #e88 } }
"""  # fmt: skip

_ROW, _WORDS, _BARS, _NUMBER = 20, 760, 300, 80
"""Pixels: height of a config's line, widths of its words, of the longest bar and of the score behind it."""


def tiles(config: Config) -> str:
    """A config in words."""
    ring = f"tiles of {config.tile_columns} columns, {config.ring_slots} in the ring"
    if config.mode == "D":
        rows = f"products with {config.compact_rows} picked rows" if config.compact_rows else "products with all tokens"
        return f"mode D, {ring}, {rows}"
    rounds = f" in {config.rounds} rounds" if config.rounds > 1 else ""
    resident = ", tokens in VMEM" if config.resident else ""
    return (
        f"mode G, {config.dispatch}{rounds} and {config.combine}, {ring}, blocks of {config.block_rows} rows by {config.tile_rows}"
        f"{resident}"
    )


def page(results: Sequence[Result]) -> str:
    """The file's text. Its heading says what kinds of scores are in it."""
    kinds = [kind for kind in MEANINGS if any(trial.score_kind == kind for one in results for _, trial in one.trials)]
    title = "Configs of fused_moe_v2: " + (", ".join(HEADINGS[kind] for kind in kinds) or "no scores")
    counts = ", ".join(
        f"{sum(one.outcome == outcome for one in results)} {outcome}" for outcome in ("tuned", "refused", "failed")
    )
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">', f"<title>{title}</title>",
        f"<style>{_STYLE}</style></head><body>", f"<h1>{title}</h1>",
        *(f"<p>{MEANINGS[kind]}</p>" for kind in kinds), f"<p>{len(results)} keys: {counts}. Lower is better; the chosen config is dark.</p>",
    ]  # fmt: skip
    for one in results:
        parts += [f"<h2>{html.escape(one.job.label)}</h2>", f"<p>{html.escape(_summary(one))}</p>"]
        if one.trials:
            parts.append(_drawing(one))
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _summary(one: Result) -> str:
    if one.outcome != TUNED or one.chosen is None:
        return f"{one.outcome}: {one.reason}"
    trial = dict(one.trials)[one.chosen]
    first = one.trials[0][1]
    said = [
        f"{trial.score:.1f} ({trial.score_kind})",
        f"{len(one.trials)} tried, {one.num_pruned} calculated to be too slow",
    ]
    if one.chosen == one.trials[0][0]:
        said.append("the heuristic's config stays")
    elif first.score and trial.score and first.score_kind == trial.score_kind:
        said.append(f"{100 * (1 - trial.score / first.score):.0f} % below the heuristic's config")
    else:
        said.append("the heuristic's config does not work")
    if one.xla is not None:
        said.append(f"XLA: {one.xla.score:.1f}" if one.xla.score is not None else f"without XLA: {one.xla.reason}")
    if one.drift:
        said.append(f"the control moved by {100 * one.drift:.1f} %")
    return "; ".join(said)


def _drawing(one: Result) -> str:
    longest = max((trial.score for _, trial in one.trials if trial.score is not None), default=1.0)
    lines = [
        _line(place, config, trial, config == one.chosen, longest) for place, (config, trial) in enumerate(one.trials)
    ]
    size = f"{_WORDS + _BARS + _NUMBER} {_ROW * len(lines)}"
    return f'<svg viewBox="0 0 {size}" role="img" aria-label="scores of the configs">{"".join(lines)}</svg>'


def _line(place: int, config: Config, trial: Trial, is_chosen: bool, longest: float) -> str:
    top, base = place * _ROW, place * _ROW + 14
    name = html.escape(f"{'heuristic: ' if place == 0 else ''}{tiles(config)}{' (chosen)' if is_chosen else ''}")
    said = f'<text x="0" y="{base}">{name}</text>'
    if trial.score is None:
        words = html.escape(f"{trial.outcome}: {trial.reason}")
        return f'{said}<text class="no" x="{_WORDS}" y="{base}">{words[:70]}<title>{words}</title></text>'
    width = max(1.0, _BARS * trial.score / longest)
    return (
        f'{said}<rect class="{"chosen" if is_chosen else "bar"}" x="{_WORDS}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}"/>'
        f'<text x="{_WORDS + width + 6:.1f}" y="{base}">{trial.score:.1f}</text>'
    )
