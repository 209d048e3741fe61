"""The report: result files as one page, with tables and plots.

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
from infinity.tools.bench import plots
from infinity.tools.bench.page import HEAD, STYLE, section, title
from infinity.tools.bench.results import FORMAT, ends, row_of
from infinity.tools.cli.options import DIR, FILE, FLAG
from infinity.untrusted import parse_json, read_text


def run(args: argparse.Namespace) -> int:
    """Writes the report and prints its paths."""
    plots.require()
    outputs = [Output("--out", args.out, made=HEAD.encode())]
    for form, made in FORMS.items():
        if (folder := getattr(args, form)) is not None:
            names = (plots.ROOFLINE, *plots.PLOTS)
            outputs += [Output(f"--{form}", folder / f"{name}.{form}", made=made) for name in names]
    if args.csv is not None:
        outputs.append(Output("--csv", args.csv, made=",".join(COLUMNS).encode()))
    if args.tex is not None:
        outputs.append(Output("--tex", args.tex, made=TEX_HEAD.encode()))
    read = [("--results", path) for path in args.results.glob("*.json")]
    check_outputs(outputs, read, overwrite=args.overwrite)
    for each in write(args.results, args.out):
        print(f"left out: {each}", file=sys.stderr)
    print(args.out)
    for form in FORMS:
        if (folder := getattr(args, form)) is not None:
            print(*write_plots(args.results, folder, form), sep="\n")
    results = read_results(args.results)[0] if args.csv or args.tex else []
    if args.csv:
        _write_csv(results, args.csv)
        print(args.csv)
    if args.tex:
        args.tex.write_text(TEX_HEAD + "".join(_tex(found) for _, found in results))
        print(args.tex)
    return 0


FORMS = {"svg": PICTURE, "pdf": b"%PDF-"}

OPTIONS = (
    ("--results", DIR | {"default": Path("bench/results")}, "the files"),
    ("--out", FILE | {"default": Path("bench-report.html")}, "the page"),
    *((f"--{form}", DIR, f"every plot as a file of its own, {form}") for form in FORMS),
    ("--csv", FILE, "all rows, one a line"),
    ("--tex", FILE, "all rows as LaTeX tables"),
    ("--overwrite", FLAG, "replace files that exist"),
)
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
    sections, left_out = _of_each(folder, section)
    notes = "".join(f"<p class='note'>{html.escape(each)}</p>" for each in left_out)
    if notes:
        notes = f"<h2>Left out</h2>{notes}"
    page = f"{HEAD}<style>{STYLE}</style>"
    out.write_text(page + "<h1>Infinity: what was measured</h1>" + "".join(sections) + notes)
    return left_out


def write_plots(folder: Path, out: Path, form: str = "svg") -> list[Path]:
    """Draws every plot that the result files in ``folder`` have points for, the newest of each, as
    a file of ``form`` in ``out``, which is made; its caption has machine, date and commit. Raises
    ConfigError as :func:`write` does."""
    newest: dict[str, dict] = {}
    for found in _of_each(folder, lambda found: found)[0]:
        for name in plots.names(found):
            newest[name] = max(newest.get(name, found), found, key=lambda each: str(each["date"]))
    out.mkdir(parents=True, exist_ok=True)
    for name, found in newest.items():
        made = plots.save(plots.drawn(found, [name])[name], form, title(found))
        (out / f"{name}.{form}").write_bytes(made)
    return [out / f"{name}.{form}" for name in newest]


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
        low, high = ends(row)
        lines.append(
            f"{plain(row.name)} & {row.median:.3f} & {low:.3f} & {high:.3f} &"
            rf" {plain(row.unit)} \\"
        )
    what = "95\\,\\% of the median" if found.get("settings") else "lowest and highest round"
    caption = f"{plain(title(found)).replace('·', ',')}; from and to: {what}."
    return "\n".join([*lines, rf"\end{{tabular}}\caption{{{caption}}}\end{{table}}", "", ""])
