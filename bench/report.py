"""The report: result files as one page, with tables and plots, that needs nothing but a browser."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.tools.bench.results import FORMAT
from infinity.tools.watch.svg import COLOURS, Chart, bar, text
from infinity.untrusted import parse_json, read_text

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


ODD = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def write(folder: Path, out: Path) -> list[str]:
    """Reads the result files in ``folder`` and writes the page to ``out``. Returns the files that
    are no results, each with the reason; the page names them too. Raises ConfigError when no file
    is one, UsageError for a result of a later format."""
    sections, left_out = _of_each(folder, _section)
    notes = "".join(f"<p class='note'>{html.escape(each)}</p>" for each in left_out)
    if notes:
        notes = f"<h2>Left out</h2>{notes}"
    page = f"{HEAD}<style>{STYLE}</style>"
    out.write_text(page + "<h1>Infinity: what was measured</h1>" + "".join(sections) + notes)
    return left_out


def write_plots(folder: Path, out: Path) -> list[Path]:
    """Draws every plot that the result files in ``folder`` have points for, the newest of each, as
    a file in ``out``, which is made. Raises ConfigError as :func:`write` does."""
    newest: dict[str, tuple[str, str]] = {}
    for date, drawn in _of_each(folder, _plots)[0]:
        for name, picture in drawn.items():
            newest[name] = max(newest.get(name, ("", "")), (date, picture))
    out.mkdir(parents=True, exist_ok=True)
    for name, (_, picture) in newest.items():
        (out / f"{name}.svg").write_text(picture + "\n")
    return [out / f"{name}.svg" for name in newest]


def read_results(folder: Path) -> tuple[list[tuple[Path, dict]], list[str]]:
    """Reads the result files in ``folder``. Returns each with its path, and the files that are no
    results, each with the reason."""
    return _of_each(folder, lambda found: found, with_paths=True)


def _of_each(folder: Path, make: Callable[[dict], Any], *, with_paths: bool = False) -> Any:
    made, left_out = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            found = make(_read(path))
            made.append((path, found) if with_paths else found)
        except ODD as error:
            left_out.append(f"{path}: no result of a benchmark ({error!r:.200})")
    if not made:
        raise ConfigError(
            f"no result files in {folder}: make some with `python -m bench all --save {folder}`"
            + "".join(f"\n{each}" for each in left_out)
        )
    return made, left_out


def _read(path: Path) -> dict:
    found = parse_json(read_text(path))
    if not isinstance(found["theme"], str):
        raise TypeError("its theme is no text")
    FORMAT.check(path, found)
    return found


def _plots(found: dict) -> tuple[str, dict[str, str]]:
    series = found.get("series", {})
    drawn = {name: draw(series[name]) for name, draw in PLOTS.items() if series.get(name)}
    return str(found["date"]), drawn


def _section(found: dict) -> str:
    title = " · ".join(html.escape(found[name]) for name in ("theme", "hardware", "date"))
    notes = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in found.get("notes", []))
    _, plots = _plots(found)
    commit = html.escape(found["commit"])
    return (
        f"<h2 class='result'>{title}</h2><p class='note'>commit"
        f" {commit}</p>{_table(found['rows'])}{notes}{''.join(plots.values())}"
    )


def _table(rows: Sequence[dict]) -> str:
    rivals = list(dict.fromkeys(rival for row in rows for rival in row["ratios"]))
    head = [
        "",
        "median",
        "low",
        "high",
        "unit",
        "of the ceiling",
        *(f"x {rival}" for rival in rivals),
    ]
    lines = []
    for row in rows:
        share = row.get("share_of_ceiling")
        of_ceiling = (
            f"{100 * share:.0f} % of {html.escape(row['ceiling']['name'])}" if share else ""
        )
        ratios = [
            f"{row['ratios'][rival]:.2f}" if rival in row["ratios"] else "" for rival in rivals
        ]
        numbers = [f"<td class='number'>{row[name]:.3f}</td>" for name in ("median", "low", "high")]
        rest = "".join(
            f"<td>{cell}</td>" for cell in [html.escape(row["unit"]), of_ceiling, *ratios]
        )
        lines.append(f"<tr><td>{html.escape(row['name'])}</td>{''.join(numbers)}{rest}</tr>")
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    return f"<table><tr>{titles}</tr>{''.join(lines)}</table>"


# --- plots ---


def _draw_sweep(points: Sequence[dict]) -> str:
    blocks = sorted({point["block_nbytes"] for point in points})
    depths = sorted({point["depth"] for point in points})
    rate = {(point["block_nbytes"], point["depth"]): point["GB/s"] for point in points}
    chart = Chart(
        "reading",
        "block size, KiB",
        "GB/s",
        [f"{block // 1024}" for block in blocks],
        1.1 * max(rate.values()),
    )
    return chart.draw(
        chart.line([rate.get((block, depth), 0) for block in blocks], f"{depth} in flight", order)
        for order, depth in enumerate(depths)
    )


def _draw_threads(points: Sequence[dict]) -> str:
    top = 1.1 * max(max(point["split"], point["moving"]) for point in points)
    ticks = [str(point["threads"]) for point in points]
    chart = Chart("optimizer step, bf16 with split master", "threads", "G parameters/s", ticks, top)
    moving = chart.line(
        [point["moving"] for point in points], "moving the same bytes", 1, dashed=True
    )
    return chart.draw([chart.line([point["split"] for point in points], "AdamW", 0), moving])


def _draw_timeline(events: Sequence[dict]) -> str:
    """One lane per slot: loading, stepping, saving, from left to right."""
    end = max(event["end"] for event in events)
    slots = sorted({event["slot"] for event in events})
    ticks = [f"{1e3 * end * part / 5:.0f}" for part in range(6)]
    chart = Chart("update pipeline, one lane per slot", "milliseconds", "", ticks, len(slots))
    span = (chart.x(5) - chart.x(0)) / end
    height = (chart.height - 2 * chart.margin) / len(slots)
    colours = dict(zip(("load", "step", "save"), COLOURS))
    inset = {"load": 0.05, "step": 0.4, "save": 0.65}
    marks = []
    for event in events:
        kind, y = event["kind"], chart.y(slots.index(event["slot"]) + 1)
        x, width = (
            chart.x(0) + span * event["start"],
            max(0.5, span * (event["end"] - event["start"])),
        )
        marks.append(bar(x, y + inset[kind] * height, width, 0.25 * height, colours[kind]))
    for order, (kind, colour) in enumerate(colours.items()):
        marks.append(
            text(chart.width - chart.margin - 60 * order, 22, kind, anchor="end", colour=colour)
        )
    return chart.draw(marks)


def _draw_budget(title: str, budget: str, model: str) -> Callable[[Sequence[dict]], str]:
    def draw(points: Sequence[dict]) -> str:
        speeds = [point["tokens/s"] for point in points]
        ticks = [f"{100 * point['share']:.0f} %" for point in points]
        chart = Chart(
            title, f"{budget}, of the training state", "tokens/s", ticks, 1.1 * max(speeds)
        )
        return chart.draw([chart.line(speeds, model, 0)])

    return draw


def _draw_sizes(points: Sequence[dict]) -> str:
    points = sorted(points, key=lambda point: point["parameters"])
    speeds = [point["tokens/s"] for point in points]
    ticks = [f"{point['parameters'] / 1e9:.1f} B" for point in points]
    chart = Chart("one machine", "parameters", "tokens/s", ticks, 1.1 * max(speeds))
    return chart.draw([chart.line(speeds, "homes chosen by the engine", 0)])


def _draw_widths(points: Sequence[dict]) -> str:
    widths = [point["width"] for point in points]
    budget = f"{points[0]['budget_nbytes'] / 2**20:.0f} MiB of device memory"
    chart = Chart(
        "the widest layer that trains",
        "tiles of a weight",
        "width",
        [str(p["factor"]) for p in points],
        1.1 * max(widths),
    )
    return chart.draw([chart.line(widths, budget, 0)])


PLOTS: dict[str, Callable[[Sequence[dict]], str]] = {
    "io.sweep": _draw_sweep,
    "adam.threads": _draw_threads,
    "update.timeline": _draw_timeline,
    "train.budget": _draw_budget("everything at home on NVMe", "host budget", "50 M parameters"),
    "gpu_train.budget": _draw_budget(
        "homes chosen by the engine", "the GPU's budget", "1.3 B parameters"
    ),
    "gpu_train.size": _draw_sizes,
    "tiling.width": _draw_widths,
}
