"""Charts of results as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tpu_serve.bench.charts import NUM_COLOURS, Chart

STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfb; --ink: #0b0b0b; --ink-2: #52514e; --grid: #e1e0d9; --axis: #c3c2b7;
  --series-1: #2a78d6; --series-2: #eb6834; --series-3: #1baf7a; --series-4: #eda100; --series-5: #e87ba4; --series-6: #008300;
  --series-7: #4a3aa7; --series-8: #e34948; }
@media (prefers-color-scheme: dark) { :root { --ground: #1a1a19; --ink: #ffffff; --ink-2: #c3c2b7; --grid: #2c2c2a; --axis: #383835;
  --series-1: #3987e5; --series-2: #d95926; --series-3: #199e70; --series-4: #c98500; --series-5: #d55181; --series-6: #008300;
  --series-7: #9085e9; --series-8: #e66767; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1360px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; } svg { width: 100%; height: auto; display: block; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; color: var(--ink-2); font-size: 13px; min-height: 1.5em; }
.legend i { display: inline-block; width: 14px; border-top: 3px solid; margin-right: .4em; vertical-align: middle; }
.legend i.dashed { border-top-style: dashed; }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--axis); stroke-width: 1; }
.mark { stroke: var(--ink-2); stroke-width: 1; stroke-dasharray: 3 3; } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.point { stroke: var(--ground); stroke-width: 2; } text { font: 12px system-ui, sans-serif; fill: var(--ink-2); } .label { font-size: 11px; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--grid); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .note, summary { color: var(--ink-2); font-size: 14px; } .warning { font-weight: 600; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Results of one kind.

    Attributes:
      notes: where they were obtained and what they are; warnings: reasons to distrust them.
      headings, rows: the figures as a table.
    """

    title: str
    charts: Sequence[Chart]
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole file."""
    body = "".join(_section(section) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<section><h2>{escape(section.title)}</h2>"]
    parts += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    parts += [f'<p class="warning">Warning: {escape(warning)}</p>' for warning in section.warnings]
    parts.append(f'<div class="charts">{"".join(_figure(chart) for chart in section.charts)}</div>')
    heads = "".join(f"<th>{escape(heading)}</th>" for heading in section.headings)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows)
    parts.append(
        f'<details open><summary>Figures</summary><div class="table"><table><tr>{heads}</tr>{rows}</table></div></details>'
    )
    return "\n".join([*parts, "</section>\n"])


def _figure(chart: Chart) -> str:
    legend = "".join(
        f'<span><i style="border-color:var(--series-{number % NUM_COLOURS + 1})"{_dashed(number)}></i>{escape(curve.name)}</span>'
        for number, curve in enumerate(chart.curves)
    )
    return f'<figure><h3>{escape(chart.title)}</h3><div class="legend">{legend}</div>{chart.svg()}</figure>'


def _dashed(number: int) -> str:
    return ' class="dashed"' if number >= NUM_COLOURS else ""
