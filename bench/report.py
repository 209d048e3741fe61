"""The report: result files as one page, with tables and plots, that needs nothing but a browser.

Their rows are comma-separated values or LaTeX tables, too.
"""

from __future__ import annotations

import argparse
import csv
import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.files.outputs import PICTURE, Output, check_outputs
from infinity.tools.bench.results import FORMAT, is_quick, row_of
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the report."""
    parser.add_argument(
        "--results", type=Path, default=Path("bench/results"), metavar="DIR", help="the files"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench-report.html"), metavar="FILE", help="the page"
    )
    parser.add_argument("--svg", type=Path, metavar="DIR", help="every plot as a file of its own")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="all rows, one a line")
    parser.add_argument("--tex", type=Path, metavar="FILE", help="all rows as LaTeX tables")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")


def run(args: argparse.Namespace) -> int:
    """Writes the report and prints its paths."""
    outputs = [Output("--out", args.out, made=HEAD.encode())]
    if args.svg is not None:
        outputs += [Output("--svg", args.svg / f"{name}.svg", made=PICTURE) for name in PLOTS]
    if args.csv is not None:
        outputs.append(Output("--csv", args.csv, made=",".join(COLUMNS).encode()))
    if args.tex is not None:
        outputs.append(Output("--tex", args.tex, made=TEX_HEAD.encode()))
    read = [("--results", path) for path in args.results.glob("*.json")]
    check_outputs(outputs, read, overwrite=args.overwrite)
    for each in write(args.results, args.out):
        print(f"left out: {each}", file=sys.stderr)
    print(args.out)
    if args.svg:
        print(*write_plots(args.results, args.svg), sep="\n")
    results = read_results(args.results)[0] if args.csv or args.tex else []
    if args.csv:
        _write_csv(results, args.csv)
        print(args.csv)
    if args.tex:
        args.tex.write_text(TEX_HEAD + "".join(_tex(found) for _, found in results))
        print(args.tex)
    return 0


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


def _title(found: dict) -> str:
    return " · ".join(str(found[name]) for name in ("theme", "hardware", "date", "commit"))


def _section(found: dict) -> str:
    title = html.escape(_title(found))
    notes = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in found.get("notes", []))
    _, plots = _plots(found)
    drawn = "".join(
        f"<figure>{plot}"
        f"<figcaption class='note'>{html.escape(name)} · {title}</figcaption></figure>"
        for name, plot in plots.items()
    )
    kept = found.get("settings")
    told = (
        [] if kept is not None else ["its settings, its rounds and its machine's facts: not kept"]
    )
    if kept is not None and is_quick(kept):
        told.append("a quick look: no figure to keep")
    if not found.get("complete", True):
        told.append("interrupted")
    if kept:
        told.append(", ".join(f"{name} {value}" for name, value in kept.items()))
        told.append("load " + " to ".join(str(each) for each in found["load"].values()))
    marks = "".join(f"<p class='note'>{html.escape(each)}</p>" for each in told)
    return f"<h2 class='result'>{title}</h2>{marks}{_table(found['rows'])}{notes}{drawn}"


COLUMNS = ("theme", "hardware", "date", "commit", "name", "unit", "better", "median", "low", "high")
COLUMNS += ("rounds", "interval_low", "interval_high", "ceiling", "ceiling_value", "share")


def _write_csv(results: Sequence[tuple[Path, dict]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for _, found in results:
            of_run = [found[name] for name in COLUMNS[:4]]
            for row in map(row_of, found["rows"]):
                ceiling = row.ceiling or {"name": "", "value": ""}
                writer.writerow(
                    [
                        *of_run,
                        *(row.name, row.unit, row.better, row.median, row.low, row.high),
                        *(len(row.rounds) or "", *(row.interval or ("", ""))),
                        *(ceiling["name"], ceiling["value"], row.share_of_ceiling or ""),
                    ]
                )


TEX_HEAD = "% Infinity: what was measured\n"


def _tex(found: dict) -> str:
    def plain(text: object) -> str:
        escaped = str(text)
        for char in "_%&#":
            escaped = escaped.replace(char, f"\\{char}")
        return escaped

    lines = [
        r"\begin{table}\centering\begin{tabular}{lrrrl}",
        r"row & median & from & to & unit \\ \hline",
    ]
    for row in map(row_of, found["rows"]):
        low, high = row.interval or (row.low, row.high)
        lines.append(
            f"{plain(row.name)} & {row.median:.3f} & {low:.3f} & {high:.3f} &"
            rf" {plain(row.unit)} \\"
        )
    what = "95\\,\\% of the median" if found.get("settings") else "lowest and highest round"
    caption = f"{plain(_title(found)).replace('·', ',')}; from and to: {what}."
    return "\n".join([*lines, rf"\end{{tabular}}\caption{{{caption}}}\end{{table}}", "", ""])


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
