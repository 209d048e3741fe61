"""`infinity report`: a run as one HTML page: memory map, loss, traffic per edge, and the timeline
if one was recorded.

The page is self-contained: its pictures are inline, and it loads nothing.
"""

from __future__ import annotations

import argparse
import html
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, UsageError
from ...files.outputs import Output, check_outputs
from ...untrusted import parse_json, read_text
from ..cli.amounts import format_seconds
from ..cli.answers import print_object
from ..cli.options import FILE, FLAG, NUMBER, rating, takes
from ..cli.values import a_path, rating_of
from ..eval.scores import line_of
from . import svg
from .time_shares import shares_text
from .top import audit_line, endurance_line

WIDTH, HEIGHT, LEFT, RIGHT = 860, 240, 140, 30
CURVE_COLOURS = {"curve": "#0b4f8a", "pace": "#8a2f5c"}
LEAST_STALL = 0.1  # seconds over the whole run
WORDS = {"tier", "part", "edge", ""}  # columns that are not numbers
HEAD = "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
VIEWPORT = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
# The rules for `svg` override the pictures' own light colours, so that they follow a dark page.
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --soft: #555; --line: #bbb;
  --curve: #0b4f8a; --pace: #8a2f5c; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e4e4e4; --soft: #b0b4ba;
  --line: #4a4e55; --curve: #6cb2eb;
  --pace: #e59abf; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--paper); color: var(--ink); }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; margin: .5rem 0 1.5rem; }
table { border-collapse: collapse; white-space: nowrap; }
td, th { padding: .2rem 1.5rem .2rem 0; text-align: left; }
th { border-bottom: 1px solid var(--line); font-weight: 600; color: var(--soft); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: .8em; height: .8em; vertical-align: -.05em; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); } svg .paper { fill: var(--paper); }
svg .part { stroke: var(--paper); }
svg .axis { stroke: var(--line); } svg .curve { stroke: var(--curve); }
svg .pace { stroke: var(--pace); }
@media (prefers-color-scheme: dark) { svg rect { fill-opacity: 1; } }
/* On a narrow screen a picture is whole and small, so its text is large beside it. */
@media (max-width: 40rem) { td, th { padding-right: .8rem; } svg text { font-size: 24px; }
  svg text.inside { font-size: 12px; visibility: hidden; } }
"""


OPTIONS = (
    ("run", takes("RUN", a_path, nargs="?"), "folder of the job (default: the newest)"),
    ("--out", FILE, "the page", Path("report.html")),
    ("--trace", FILE, "its timeline (default: what Config(trace=...) named)"),
    (
        "--eval",
        FILE,
        "what `infinity eval --json` printed of its model: a line of the page",
    ),
    ("--steps", NUMBER, "draw the last N steps of the timeline", 3),
    ("--overwrite", FLAG, "replace a file of --out that is no page of ours"),
    rating("for how long it lasts"),
    ("--json", FLAG, "what is on the page as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    collected = collect(args.run)
    trace = args.trace or collected["plans"][0].get("trace")
    read = [("RUN", path) for path in Path(collected["folder"]).glob("*.json")] + [
        ("--trace", Path(str(trace)) if trace else None),
        ("--eval", args.eval),
    ]
    check_outputs([Output("--out", args.out, made=HEAD.encode())], read, overwrite=args.overwrite)
    timeline = (
        _timeline(Path(str(trace)), args.steps, given=args.trace is not None) if trace else None
    )
    evaluated = {} if args.eval is None else {"evaluated": _evaluated(args.eval)}
    try:
        args.out.write_text(page(collected | evaluated, timeline, rating_of(args)))
    except OSError as error:
        raise ConfigError(f"--out {args.out} cannot be written: {error.strerror}") from error
    if args.json:
        print_object(
            {"out": str(args.out), "timeline": timeline is not None} | collected | evaluated
        )
    else:
        print(f"the run {collected['folder']}", file=sys.stderr)
        print(args.out)
    return 0


def collect(folder: Path | None) -> dict[str, Any]:
    """Reads the files of a run (None: the newest run). Raises ConfigError if there is none,
    UsageError if a newer version wrote them."""
    from ...core.machine import disk_profile
    from . import run_files

    root = disk_profile.cache_folder() / "runs"
    folder = folder or next(iter(run_files.runs(root)), None)
    files = {
        kind: list(run_files.read_known(folder, kind)) if folder else []
        for kind in (run_files.STATUS, run_files.PLAN, run_files.HISTORY)
    }
    if not files[run_files.STATUS] or not files[run_files.PLAN]:
        raise ConfigError(
            f"{folder or root} has no run: `infinity train` and a loop with infinity.Watch(model)"
            f" leave one in {root}, of which the newest is shown without RUN"
        )
    return {
        "folder": str(folder),
        "ranks": files[run_files.STATUS],
        "plans": files[run_files.PLAN],
        "points": next((each.get("points") for each in files[run_files.HISTORY]), []),
    }


def _evaluated(path: Path) -> str:
    """Reads what `infinity eval --json` printed. Raises ConfigError."""
    try:
        return line_of(parse_json(read_text(path)))
    except OSError as error:
        why = f"cannot be read: {error.strerror}. Give what `infinity eval --json` printed"
    except (ValueError, RecursionError) as error:
        why = f"is not what `infinity eval --json` prints: {error}"
    raise ConfigError(f"--eval {path} {why}")


def _timeline(path: Path, steps: int, *, given: bool) -> str | None:
    from .trace import draw, last_steps, read

    try:
        return draw(last_steps(read(path), steps))
    except (ConfigError, UsageError):
        if given:
            raise
        return None  # the file is gone, or is another run's by now


def page(found: dict[str, Any], timeline: str | None, rating: float | None = None) -> str:
    """Makes the page. ``rating``: bytes that a drive may be written in all. Raises ConfigError if
    the files are not of a run."""
    from ..plan.plan import draw

    try:
        model = str(found["plans"][0].get("model") or "")
        title = " ".join(["Infinity:", *([model] if model else []), Path(found["folder"]).name])
        parts = [f"<h1>{html.escape(title)}</h1>", _summary(found["ranks"][0], found["plans"][0])]
        parts += _shares(found["ranks"][0], rating)
        if evaluated := found.get("evaluated"):
            parts.append(f"<p>{html.escape(str(evaluated))}</p>")
        if points := [(step, loss) for step, loss, _ in found["points"] if loss is not None]:
            parts.append(f"<h2>Loss</h2>{_wide(curve(points))}")
        parts += _pace(found["ranks"][0], found["points"][1:])
        tiers = _checked(found["plans"][0]["tiers"])
        parts.append(
            f"<h2>Memory map</h2><p>What the plan gave every tier.</p>{_wide(draw(tiers))}"
        )
        parts.append(_table(("tier", "", "part", "planned"), _parts(tiers)))
        parts.append(
            f"<h2>Ranks</h2>{_table(('rank', 'step', 'tokens/s'), _speeds(found['ranks']))}"
        )
        parts.append(_table(("rank", "tier", "now", "peak", "planned"), _tiers(found["ranks"])))
        parts.append(_table(("rank", "edge", "moved", "measured limit"), _edges(found["ranks"])))
        if timeline is not None:
            parts.append(f"<h2>Timeline</h2>{_wide(timeline)}")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{found['folder']} is not a run, or damaged ({error!r}): leave RUN out to see the"
            " newest"
        ) from error
    head = f"{HEAD}{VIEWPORT}<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _checked(tiers: dict[str, Any]) -> dict[str, dict]:
    """Returns the tiers that have something, with whole numbers. Raises TypeError, ValueError or
    LookupError for others."""
    return {
        tier: {
            "nbytes": int(of_tier["nbytes"]),
            "parts": {what: int(n) for what, n in of_tier["parts"].items()},
        }
        for tier, of_tier in tiers.items()
        if of_tier["nbytes"]
    }


def _summary(status: dict[str, Any], plan: dict[str, Any]) -> str:
    steps = f"{int(status['step']):,}" + (
        f" of {int(status['steps']):,}" if status.get("steps") else ""
    )
    loss = "" if status.get("loss") is None else f", loss {float(status['loss']):.4f}"
    bound = html.escape(str(status.get("bound") or ""))
    stalls = {
        edge: float(moved.get("stall_seconds") or 0.0) for edge, moved in status["edges"].items()
    }
    waited = "; ".join(
        f"{html.escape(edge)} {format_seconds(seconds)}"
        for edge, seconds in sorted(stalls.items(), key=lambda stall: -stall[1])
        if seconds >= LEAST_STALL
    )
    return (
        (f"<p><b>{bound}</b></p>" if bound else "")
        + (f"<p>The loop stood still for {waited}.</p>" if waited else "")
        + f"<p>{int(plan['parameters']):,} parameters, step {steps}{loss},"
        f" {float(status['tokens_per_second']):,.0f} tokens/s,"
        f" {format_seconds(float(status['step_seconds']))} a step;"
        f" {html.escape(str(status['phase']))}.</p>"
    )


def _shares(status: dict[str, Any], rating: float | None) -> list[str]:
    """Says what the last steps waited for, what was audited, and how long the drives last."""
    shares = status.get("shares")
    sentences: list[str] = []
    if shares:
        sentences.append(f"time: {shares_text({str(k): float(v) for k, v in shares.items()})}")
    lines = audit_line(status), endurance_line(status, rating)
    sentences += [line for line in lines if line is not None]
    return [f"<p>{html.escape(each)}</p>" for each in sentences]


def _pace(status: dict[str, Any], points: list[tuple]) -> list[str]:
    """Returns the plot of the job's speed: in tokens if they are known, else in seconds."""
    if not points:
        return []
    tokens = float(status["tokens_per_second"]) * float(status["step_seconds"])  # of a step
    if tokens > 0:
        rates = [(step, tokens / seconds) for step, _, seconds in points if seconds]
        return [f"<h2>Tokens a second</h2>{_wide(curve(rates, 'pace'))}"] if rates else []
    paces = [(step, seconds) for step, _, seconds in points]
    return [f"<h2>Seconds a step</h2>{_wide(curve(paces, 'pace'))}"]


@dataclass(frozen=True)
class _Swatch:
    """A cell that shows a colour of the memory map."""

    colour: str

    def __str__(self) -> str:
        return f"<span class='swatch' style='background:{self.colour}'></span>"


def _parts(tiers: dict[str, dict]) -> list[tuple]:
    from ...core.machine.sizes import format_nbytes
    from ..plan.plan_view import colours_of, parts_of

    colours = colours_of(tiers)
    return [
        (tier, _Swatch(colours[what]), what, format_nbytes(nbytes))
        for tier, of_tier in tiers.items()
        for what, nbytes in parts_of(of_tier)
        if nbytes
    ]


def _speeds(ranks: list[dict]) -> list[tuple]:
    return [
        (status["rank"], f"{int(status['step']):,}", f"{float(status['tokens_per_second']):,.0f}")
        for status in ranks
    ]


def _tiers(ranks: list[dict]) -> list[tuple]:
    from ...core.machine.sizes import format_nbytes

    return [
        (
            status["rank"],
            tier,
            *(format_nbytes(of_tier[f"{name}_nbytes"]) for name in ("charged", "peak", "planned")),
        )
        for status in ranks
        for tier, of_tier in status["tiers"].items()
        if of_tier["peak_nbytes"] or of_tier["planned_nbytes"]
    ]


def _edges(ranks: list[dict]) -> list[tuple]:
    from ...core.machine.sizes import format_nbytes

    return [
        (
            status["rank"],
            edge,
            format_nbytes(moved["nbytes"]),
            f"{moved['limit'] / 1e9:.2f} GB/s" if moved["limit"] else "not measured",
        )
        for status in ranks
        for edge, moved in status["edges"].items()
        if moved["nbytes"]
    ]


def _table(header: tuple, rows: list[tuple]) -> str:
    marks = ["" if name in WORDS else " class='number'" for name in header]
    head = "".join(f"<th{mark}>{html.escape(name)}</th>" for name, mark in zip(header, marks))
    body = "".join(
        "<tr>"
        + "".join(f"<td{mark}>{_cell(cell)}</td>" for cell, mark in zip(row, marks))
        + "</tr>"
        for row in rows
    )
    return _wide(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _cell(cell: Any) -> str:
    return str(cell) if isinstance(cell, _Swatch) else html.escape(str(cell))


def _wide(content: str) -> str:
    """Makes ``content`` scroll sideways by itself, if it is a table that is wider than the
    screen."""
    return f"<div class='wide'>{content}</div>"


def curve(points: list[tuple[float, float]], kind: str = "curve") -> str:
    """Draws a value over its steps as an SVG picture. ``kind``: of :data:`CURVE_COLOURS`."""
    steps, values = [float(step) for step, _ in points], [float(value) for _, value in points]
    low, high = min(values), max(values)
    across, up = max(steps[-1] - steps[0], 1.0), max(high - low, 1e-12)
    left, right, bottom = LEFT, WIDTH - RIGHT, HEIGHT - 28
    places = [
        (
            left + (right - left) * (step - steps[0]) / across,
            10 + (HEIGHT - 40) * (high - value) / up,
        )
        for step, value in zip(steps, values)
    ]
    return svg.picture(
        WIDTH,
        HEIGHT,
        [
            svg.axes(left, 10, right, bottom),
            svg.line(places, CURVE_COLOURS[kind], width=1.5, kind=kind),
            svg.text(left - 6, 24, f"{high:.4g}", anchor="end"),
            svg.text(left - 6, HEIGHT - 30, f"{low:.4g}", anchor="end"),
            svg.text(left, HEIGHT - 8, f"step {steps[0]:,.0f}"),
            svg.text(right, HEIGHT - 8, f"{steps[-1]:,.0f}", anchor="end"),
        ],
    )
