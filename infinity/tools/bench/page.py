"""The page of a run or of a report: tables and plots, which need nothing but a browser."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import plots
from .results import is_quick, row_of

HEAD = "<!doctype html><meta charset='utf-8'><title>Infinity: measured</title>"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; }
table { border-collapse: collapse; margin: .7rem 0 1.5rem; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
th { border-bottom: 1px solid #999; }
svg { display: block; margin: .5rem 0 1.5rem; } .note { color: #666; }
"""


def write(found: Mapping[str, Any], told: Sequence[str], path: Path) -> None:
    """Writes the page of one run. ``found``: what its result file has; ``told``: sentences."""
    facts = "".join(
        f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in found.get("machine", {}).items()
        if value is not None
    )
    sentences = "".join(f"<p>{html.escape(each)}</p>" for each in told)
    path.write_text(
        f"{HEAD}<style>{STYLE}</style><h1>Infinity: what this machine does</h1>{sentences}"
        f"{section(found)}<h2>The machine</h2><table>{facts}</table>"
    )


def title(found: Mapping[str, Any]) -> str:
    """Returns what a result file is of: its theme, machine, date and commit."""
    return " · ".join(str(found[name]) for name in ("theme", "hardware", "date", "commit"))


def section(found: Mapping[str, Any]) -> str:
    """Returns the part of a page for one result file: settings, table, notes and plots."""
    heading = html.escape(title(found))
    notes = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in found.get("notes", []))
    drawn = "".join(
        f"<figure>{plots.as_svg(plot)}"
        f"<figcaption class='note'>{html.escape(name)} · {heading}</figcaption></figure>"
        for name, plot in plots.drawn(found).items()
    )
    kept = found.get("settings")
    marked = (
        [] if kept is not None else ["its settings, its rounds and its machine's facts: not kept"]
    )
    if kept is not None and is_quick(kept):
        marked.append("a quick look: no figure to keep")
    if not found.get("complete", True):
        marked.append("interrupted")
    if kept:
        marked.append(", ".join(f"{name} {value}" for name, value in kept.items()))
        marked.append("load " + " to ".join(str(each) for each in found["load"].values()))
    marks = "".join(f"<p class='note'>{html.escape(each)}</p>" for each in marked)
    return f"<h2 class='result'>{heading}</h2>{marks}{_table(found['rows'])}{notes}{drawn}"


def _table(rows: Sequence[dict]) -> str:
    rivals = list(dict.fromkeys(rival for row in rows for rival in row["ratios"]))
    head = ["", "median", "low", "high", "95 %", "rounds", "unit", "better", "of the ceiling"]
    head += [f"x {rival}" for rival in rivals]
    lines = []
    for kept in rows:
        row = row_of(kept)
        of_ceiling = ""
        if row.share_of_ceiling:
            of_ceiling = f"{100 * row.share_of_ceiling:.0f} % of {html.escape(row.ceiling['name'])}"
            of_ceiling += f" ({row.ceiling['value']:.3f})"
        if row.passes_its_ceiling():
            of_ceiling += ": passed, so it is none"
        numbers = [
            f"<td class='number'>{each:.3f}</td>" for each in (row.median, row.low, row.high)
        ]
        spread = "{:.3f} - {:.3f}".format(*row.interval) if row.interval else ""
        count = str(len(row.rounds)) if row.rounds else "not kept"
        ratios = [f"{row.ratios[each]:.2f}" if each in row.ratios else "" for each in rivals]
        cells = [spread, count, html.escape(row.unit), row.better, of_ceiling, *ratios]
        rest = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr><td>{html.escape(row.name)}</td>{''.join(numbers)}{rest}</tr>")
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    return f"<table><tr>{titles}</tr>{''.join(lines)}</table>"
