"""The report: result files as one page, with tables and plots, that needs nothing but a browser.

Plots are drawn as SVG here: three small ones are not worth a plotting library to whoever installs this.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError
from infinity.untrusted import parse_json, read_text

WIDTH, HEIGHT, MARGIN = 560, 300, 56
COLOURS = ("#1f6fb2", "#c4511d", "#2a8c4a", "#7a4fb0", "#8a6d1b")
ALONE = "xmlns='http://www.w3.org/2000/svg' font-family='system-ui, sans-serif' font-size='12'"  # a plot without the page
HEAD = "<!doctype html><meta charset='utf-8'><title>Infinity: measured</title>"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .7rem 0 1.5rem; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } th { border-bottom: 1px solid #999; }
svg { display: block; margin: .5rem 0 1.5rem; } svg text { font-size: 12px; fill: #333; } .note { color: #666; }
"""


def write(folder: Path, out: Path) -> Path:
    """Reads the result files in ``folder`` and writes the page to ``out``. Raises ConfigError when there are none, or one
    is not a result."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ConfigError(f"no result files in {folder}: make some with `python -m bench all --json {folder}`")
    sections = [_section_of(path) for path in paths]
    page = f"{HEAD}<style>{STYLE}</style>"
    out.write_text(page + "<h1>Infinity: what was measured</h1>" + "".join(sections))
    return out


def write_plots(folder: Path, out: Path) -> list[Path]:
    """Draws every plot that the result files in ``folder`` have points for, the newest of each, as a file in ``out``. Raises
    ConfigError as :func:`write` does."""
    if not (paths := sorted(folder.glob("*.json"))):
        raise ConfigError(f"no result files in {folder}: make some with `python -m bench all --json {folder}`")
    if not out.is_dir():
        raise ConfigError(f"there is no folder {out} for the plots")
    newest: dict[str, tuple[str, str]] = {}
    for path in paths:
        with _naming(path):
            found = parse_json(read_text(path))
            for name, draw in PLOTS.items():
                if points := found.get("series", {}).get(name):
                    newest[name] = max(newest.get(name, ("", "")), (found["date"], draw(points)))
    for name, (_, drawn) in newest.items():
        (out / f"{name}.svg").write_text(drawn.replace("<svg ", f"<svg {ALONE} ", 1) + "\n")
    return [out / f"{name}.svg" for name in newest]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path} is not a result of `python -m bench <theme> --json`: {error!r}") from error


def _section_of(path: Path) -> str:
    with _naming(path):
        return _section(parse_json(read_text(path)))


def _section(found: dict) -> str:
    title = " · ".join(html.escape(found[name]) for name in ("theme", "hardware", "date"))
    notes = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in found.get("notes", []))
    series = found.get("series", {})
    plots = [draw(series[name]) for name, draw in PLOTS.items() if series.get(name)]
    commit = html.escape(found["commit"])
    return f"<h2>{title}</h2><p class='note'>commit {commit}</p>{_table(found['rows'])}{notes}{''.join(plots)}"


def _table(rows: Sequence[dict]) -> str:
    rivals = list(dict.fromkeys(rival for row in rows for rival in row["ratios"]))
    head = ["", "median", "low", "high", "unit", "of the ceiling", *(f"x {rival}" for rival in rivals)]
    lines = []
    for row in rows:
        share = row.get("share_of_ceiling")
        of_ceiling = f"{100 * share:.0f} % of {html.escape(row['ceiling']['name'])}" if share else ""
        ratios = [f"{row['ratios'][rival]:.2f}" if rival in row["ratios"] else "" for rival in rivals]
        numbers = [f"<td class='number'>{row[name]:.3f}</td>" for name in ("median", "low", "high")]
        rest = "".join(f"<td>{cell}</td>" for cell in [html.escape(row["unit"]), of_ceiling, *ratios])
        lines.append(f"<tr><td>{html.escape(row['name'])}</td>{''.join(numbers)}{rest}</tr>")
    return f"<table><tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>{''.join(lines)}</table>"


# --- plots ---


@dataclass(frozen=True)
class Axes:
    """Places values on the drawing: x evenly by position in ``ticks``, y from 0 to ``top``."""

    title: str
    x_name: str
    y_name: str
    ticks: Sequence[str]
    top: float

    def x(self, position: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (position + 0.5) / len(self.ticks)

    def y(self, value: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value / self.top

    def draw(self, content: Iterable[str]) -> str:
        """Draws the whole SVG picture around ``content``."""
        bottom, left = HEIGHT - MARGIN, MARGIN
        parts = [
            f"<text x='{left}' y='22' font-weight='bold'>{html.escape(self.title)}</text>",
            f"<path d='M{left} {MARGIN - 10}V{bottom}H{WIDTH - MARGIN + 10}' fill='none' stroke='#999'/>",
            f"<text x='{WIDTH / 2}' y='{HEIGHT - 12}' text-anchor='middle'>{html.escape(self.x_name)}</text>",
            f"<text x='{left - 6}' y='{MARGIN - 16}'>{html.escape(self.y_name)}</text>",
        ]
        for share in (0, 0.5, 1):
            value = self.top * share
            parts.append(f"<text x='{left - 6}' y='{self.y(value) + 4}' text-anchor='end'>{value:.3g}</text>")
        for position, tick in enumerate(self.ticks):
            parts.append(f"<text x='{self.x(position)}' y='{bottom + 16}' text-anchor='middle'>{html.escape(tick)}</text>")
        return f"<svg width='{WIDTH}' height='{HEIGHT}' role='img'>{''.join([*parts, *content])}</svg>"

    def line(self, values: Sequence[float], name: str, order: int, *, dashed: bool = False) -> str:
        """Draws one line through ``values``, with its name at its end."""
        colour = COLOURS[order % len(COLOURS)]
        points = " ".join(f"{self.x(i):.1f},{self.y(value):.1f}" for i, value in enumerate(values))
        style = " stroke-dasharray='5 4'" if dashed else ""
        dots = "".join(f"<circle cx='{self.x(i):.1f}' cy='{self.y(v):.1f}' r='3' fill='{colour}'/>" for i, v in enumerate(values))
        label = f"<text x='{WIDTH - MARGIN}' y='{MARGIN + 16 * order}' text-anchor='end' style='fill:{colour}'>{html.escape(name)}</text>"
        return f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'{style}/>{dots}{label}"


def _draw_sweep(points: Sequence[dict]) -> str:
    blocks = sorted({point["block_nbytes"] for point in points})
    depths = sorted({point["depth"] for point in points})
    rate = {(point["block_nbytes"], point["depth"]): point["GB/s"] for point in points}
    axes = Axes("reading", "block size, KiB", "GB/s", [f"{block // 1024}" for block in blocks], 1.1 * max(rate.values()))
    return axes.draw(
        axes.line([rate.get((block, depth), 0) for block in blocks], f"{depth} in flight", order)
        for order, depth in enumerate(depths)
    )


def _draw_threads(points: Sequence[dict]) -> str:
    top = 1.1 * max(max(point["split"], point["moving"]) for point in points)
    ticks = [str(point["threads"]) for point in points]
    axes = Axes("optimizer step, bf16 with split master", "threads", "G parameters/s", ticks, top)
    moving = axes.line([point["moving"] for point in points], "moving the same bytes", 1, dashed=True)
    return axes.draw([axes.line([point["split"] for point in points], "AdamW", 0), moving])


def _draw_timeline(events: Sequence[dict]) -> str:
    """One lane per slot: loading, stepping, saving, from left to right."""
    end = max(event["end"] for event in events)
    slots = sorted({event["slot"] for event in events})
    ticks = [f"{1e3 * end * part / 5:.0f}" for part in range(6)]
    axes = Axes("update pipeline, one lane per slot", "milliseconds", "", ticks, len(slots))
    span = (axes.x(5) - axes.x(0)) / end
    colours = dict(zip(("load", "step", "save"), COLOURS))
    content = []
    for event in events:
        lane = slots.index(event["slot"])
        x, width = axes.x(0) + span * event["start"], max(0.5, span * (event["end"] - event["start"]))
        height = (HEIGHT - 2 * MARGIN) / len(slots)
        inset = {"load": 0.05, "step": 0.4, "save": 0.65}[event["kind"]] * height
        y = axes.y(lane + 1) + inset
        content.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{0.25 * height:.1f}' fill='{colours[event['kind']]}'/>"
        )
    for order, (kind, colour) in enumerate(colours.items()):
        content.append(f"<text x='{WIDTH - MARGIN - 60 * order}' y='22' text-anchor='end' style='fill:{colour}'>{kind}</text>")
    return axes.draw(content)


def _draw_budget(title: str, budget: str, model: str) -> Callable[[Sequence[dict]], str]:
    def draw(points: Sequence[dict]) -> str:
        speeds = [point["tokens/s"] for point in points]
        ticks = [f"{100 * point['share']:.0f} %" for point in points]
        axes = Axes(title, f"{budget}, of the training state", "tokens/s", ticks, 1.1 * max(speeds))
        return axes.draw([axes.line(speeds, model, 0)])

    return draw


def _draw_sizes(points: Sequence[dict]) -> str:
    points = sorted(points, key=lambda point: point["parameters"])
    speeds = [point["tokens/s"] for point in points]
    ticks = [f"{point['parameters'] / 1e9:.1f} B" for point in points]
    axes = Axes("one machine", "parameters", "tokens/s", ticks, 1.1 * max(speeds))
    return axes.draw([axes.line(speeds, "homes chosen by the engine", 0)])


def _draw_widths(points: Sequence[dict]) -> str:
    widths = [point["width"] for point in points]
    budget = f"{points[0]['budget_nbytes'] / 2**20:.0f} MiB of device memory"
    axes = Axes("the widest layer that trains", "tiles of a weight", "width", [str(p["factor"]) for p in points], 1.1 * max(widths))
    return axes.draw([axes.line(widths, budget, 0)])


PLOTS: dict[str, Callable[[Sequence[dict]], str]] = {
    "io.sweep": _draw_sweep,
    "adam.threads": _draw_threads,
    "update.timeline": _draw_timeline,
    "train.budget": _draw_budget("everything at home on NVMe", "host budget", "50 M parameters"),
    "gpu_train.budget": _draw_budget("homes chosen by the engine", "the GPU's budget", "1.3 B parameters"),
    "gpu_train.size": _draw_sizes,
    "tiling.width": _draw_widths,
}
