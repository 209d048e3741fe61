"""`infinity report`: a run as one HTML file: its memory map, its loss, what moved over every edge, and its timeline where one was kept.

The page needs nothing but a browser: its pictures are in it, and it loads nothing.
"""

from __future__ import annotations

import argparse
import html
import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError

WIDTH, HEIGHT, MARGIN = 860, 240, 56
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .7rem 0 1.5rem; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } th { border-bottom: 1px solid #999; }
svg { display: block; max-width: 100%; margin: .5rem 0 1.5rem; }
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers the command."""
    parser = subparsers.add_parser("report", help="a run as one HTML page: memory map, loss, edges, timeline")
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="folder of the job (default: the newest)")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default report.html)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="its timeline (default: what Config(trace=...) named)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="draw the last N steps of the timeline (default 3)")
    parser.add_argument("--json", action="store_true", help="what is on the page as one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints where."""
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: give 1 or more")
    found = collect(args.run)
    trace = args.trace or found["plans"][0].get("trace")
    timeline = _timeline(Path(str(trace)), args.steps, given=args.trace is not None) if trace else None
    try:
        args.out.write_text(page(found, timeline))
    except OSError as error:
        raise ConfigError(f"--out {args.out} cannot be written: {error.strerror}") from error
    print(json.dumps({"out": str(args.out), "timeline": timeline is not None} | found) if args.json else args.out)
    return 0


def collect(folder: Path | None) -> dict[str, Any]:
    """Reads what a run has told. Raises ConfigError where there is none."""
    from ..machine import disk_profile, run_files

    root = disk_profile.cache_folder() / "runs"
    folder = folder or next(iter(run_files.runs(root)), None)
    found = {
        kind: list(run_files.read(folder, kind)) if folder else [] for kind in (run_files.STATUS, run_files.PLAN, run_files.HISTORY)
    }
    if not found[run_files.STATUS] or not found[run_files.PLAN]:
        raise ConfigError(f"{folder or root} has no run: `infinity train` leaves one there, and a loop with infinity.Watch(model)")
    return {"folder": str(folder), "ranks": found[run_files.STATUS], "plans": found[run_files.PLAN],
            "points": next((each.get("points") for each in found[run_files.HISTORY]), [])}  # fmt: skip


def _timeline(path: Path, steps: int, *, given: bool) -> str | None:
    from .trace import draw, last_steps, read

    try:
        return draw(last_steps(read(path), steps))
    except ConfigError:
        if given:
            raise
        return None  # of another folder by now, or not of this run any more


def page(found: dict[str, Any], timeline: str | None) -> str:
    """Makes the page. Raises ConfigError where the files are not of a run."""
    from .plan import draw

    try:
        title = f"Infinity: {Path(found['folder']).name}"
        parts = [f"<h1>{html.escape(title)}</h1>", _summary(found["ranks"][0], found["plans"][0])]
        if points := [(step, loss) for step, loss, _ in found["points"] if loss is not None]:
            parts.append(f"<h2>Loss</h2>{curve(points)}")
        parts.append(f"<h2>Memory map</h2><p>What the plan gave every tier.</p>{draw(_escaped(found['plans'][0]['tiers']))}")
        parts.append(
            "<h2>Ranks</h2>" + _table(("rank", "step", "tokens/s", "tier", "now", "peak", "planned"), _tiers(found["ranks"]))
        )
        parts.append(_table(("rank", "edge", "moved", "measured limit"), _edges(found["ranks"])))
        if timeline is not None:
            parts.append(f"<h2>Timeline</h2>{timeline}")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{found['folder']} is not a run: {error!r}") from error
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style></head>"
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _escaped(tiers: dict[str, Any]) -> dict[str, dict]:
    return {
        html.escape(tier): {
            "nbytes": int(of_tier["nbytes"]),
            "parts": {html.escape(what): int(n) for what, n in of_tier["parts"].items()},
        }
        for tier, of_tier in tiers.items()
    }


def _summary(status: dict[str, Any], plan: dict[str, Any]) -> str:
    steps = f"{int(status['step']):,}" + (f" of {int(status['steps']):,}" if status.get("steps") else "")
    loss = "" if status.get("loss") is None else f", loss {float(status['loss']):.4f}"
    return (
        f"<p>{int(plan['parameters']):,} parameters, step {steps}{loss}, {float(status['tokens_per_second']):,.0f} tokens/s, "
        f"{float(status['step_seconds']):.3f} s a step; {html.escape(str(status['phase']))}.</p>"
    )


def _tiers(ranks: list[dict]) -> list[tuple]:
    from ..machine.sizes import format_nbytes

    rows = []
    for status in ranks:
        for tier, of_tier in status["tiers"].items():
            sizes = [format_nbytes(of_tier[f"{name}_nbytes"]) for name in ("charged", "peak", "planned")]
            rows.append((status["rank"], status["step"], f"{float(status['tokens_per_second']):,.0f}", tier, *sizes))
    return rows


def _edges(ranks: list[dict]) -> list[tuple]:
    from ..machine.sizes import format_nbytes

    return [
        (status["rank"], edge, format_nbytes(moved["nbytes"]), f"{moved['limit'] / 1e9:.2f} GB/s" if moved["limit"] else "not measured")
        for status in ranks for edge, moved in status["edges"].items() if moved["nbytes"]
    ]  # fmt: skip


def _table(header: tuple, rows: list[tuple]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td class='number'>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def curve(points: list[tuple[float, float]]) -> str:
    """Draws a loss over its steps as an SVG picture."""
    steps, values = [float(step) for step, _ in points], [float(value) for _, value in points]
    low, high = min(values), max(values)
    across, up = max(steps[-1] - steps[0], 1.0), max(high - low, 1e-12)
    places = " ".join(
        f"{MARGIN + (WIDTH - 2 * MARGIN) * (step - steps[0]) / across:.1f},{10 + (HEIGHT - 40) * (high - value) / up:.1f}"
        for step, value in zip(steps, values)
    )
    labels = (
        f"<text x='{MARGIN - 6}' y='18' text-anchor='end'>{high:.4g}</text><text x='{MARGIN - 6}' y='{HEIGHT - 30}' text-anchor='end'>{low:.4g}</text>"
        f"<text x='{MARGIN}' y='{HEIGHT - 8}'>step {steps[0]:,.0f}</text><text x='{WIDTH - MARGIN}' y='{HEIGHT - 8}' text-anchor='end'>{steps[-1]:,.0f}</text>"
    )
    style = "font-family='system-ui, sans-serif' font-size='12' fill='#444'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' {style}><polyline points='{places}' fill='none' "
        f"stroke='#1f6fb2' stroke-width='1.5'/>{labels}</svg>"
    )
