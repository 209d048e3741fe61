"""`infinity bench` and `python -m bench`: the rows they promise, one JSON object, and a report.

Sizes are tiny: no test looks at how fast anything is.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import prepared
import pytest
import setuptools
from hypothesis import given, settings
from hypothesis import strategies as st

import bench.__main__ as checkout
from bench import first_steps, meetings, report, shares, touches
from bench.rivals import limited
from bench.themes import APART, THEMES
from infinity.errors import ConfigError
from infinity.tools.bench import bench as installed
from infinity.tools.bench import results, rounds
from infinity.tools.bench.rounds import Times, alternate, paired
from infinity.tools.bench.settings import Settings
from infinity.tools.cli import main

ROOT = Path(checkout.__file__).parents[1]
ROWS = {
    "io": {"io.read", "io.write", "io.mixed", "io.read.cpu", "io.threads.read"},
    "adam": {"adam.split", "adam.fp32", "adam.int8"},
    "update": {"update.nvme"},
    "pool": {"pool.lease"},
    "copy": {"copy.host_to_device", "copy.device_to_host"},
}


def run_bench(
    theme: str, *arguments: str, folder, timeout: float = 200
) -> subprocess.CompletedProcess:
    """Runs a theme by the command that has it."""
    command = ("infinity", "bench") if theme in installed.THEMES else ("bench",)
    return prepared.run("-m", *command, theme, *arguments, folder=folder, seconds=timeout)


@pytest.mark.parametrize("theme", ROWS)
def test_a_theme_prints_one_object_with_its_rows(theme, tmp_path):
    """Method: a tiny run with `--json`; standard output is one object with the fields and rows of
    the contract, every figure is positive, and the folder is as empty as before."""
    done = run_bench(
        theme, "--json", "--scale", "0.02", "--rounds", "1", "--no-rivals", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"theme", "hardware", "date", "commit", "rows"} <= found.keys() and found[
        "theme"
    ] == theme
    names = [row["name"] for row in found["rows"]]
    assert ROWS[theme] <= set(names) and len(set(names)) == len(names)
    for row in found["rows"]:
        assert {
            "name",
            "unit",
            "median",
            "low",
            "high",
            "ceiling",
            "share_of_ceiling",
            "ratios",
        } <= row.keys()
        assert 0 < row["low"] <= row["median"] <= row["high"], row
        assert row["ceiling"] is None or row["ceiling"]["value"] > 0
    assert list(tmp_path.iterdir()) == []
    assert f"{theme}." in done.stderr, "the table is told apart from the object"


def test_what_was_measured_is_saved_before_a_theme_ends(tmp_path, monkeypatch):
    """Method: a theme keeps two rows, one after the other, and is cut off. Twin: of one that keeps
    nothing there is no file."""
    theme = ModuleType("cut_off_theme")

    def measure(settings) -> None:
        for count in range(len(kept)):
            settings.keep(results.Measured(kept[: count + 1]))
        raise KeyboardInterrupt

    theme.measure = measure
    monkeypatch.setitem(sys.modules, theme.__name__, theme)
    args = checkout.build_parser().parse_args(["gpu_train", "--save", str(tmp_path)])
    for kept in ([], [results.row(name, "tokens/s", [1.0]) for name in ("one", "two")]):
        with pytest.raises(KeyboardInterrupt):
            installed.measure(args, {"gpu_train": theme.__name__}, ("gpu_train",))
        found = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
        assert [row["name"] for each in found for row in each["rows"]] == [row.name for row in kept]
    assert len(found) == 1 and found[0]["theme"] == "gpu_train"


POINTS = {
    "io.sweep": [{"block_nbytes": 1 << 20, "depth": 8, "GB/s": 2.5}],
    "adam.threads": [{"threads": 1, "split": 1.0, "moving": 1.25}],
    "update.timeline": [{"slot": 0, "kind": "load", "start": 0.0, "end": 0.5}],
    "train.budget": [{"share": 0.25, "tokens/s": 100.0}, {"share": 0.75, "tokens/s": 150.0}],
    "gpu_train.budget": [{"share": 0.3, "tokens/s": 100.0}],
    "gpu_train.size": [
        {"parameters": 8e9, "tokens/s": 50.0},
        {"parameters": 1.3e9, "tokens/s": 100.0},
    ],
    "tiling.width": [
        {"factor": 1, "width": 1024, "budget_nbytes": 2**24},
        {"factor": 16, "width": 4096, "budget_nbytes": 2**24},
    ],
}
TOLD = {
    "io.sweep": "1024",
    "adam.threads": "AdamW",
    "update.timeline": "load",
    "train.budget": "75 %",
    "gpu_train.budget": "30 %",
    "gpu_train.size": "8.0 B",
    "tiling.width": "16 MiB",
}


@pytest.mark.parametrize("name", report.PLOTS)
def test_every_plot_is_drawn(name):
    """Method: from a point or two, every plot is an SVG that tells of them; a plot without points
    here fails."""
    drawn = report.PLOTS[name](POINTS[name])
    assert drawn.startswith("<svg") and drawn.endswith("</svg>") and TOLD[name] in drawn


@pytest.mark.slow
def test_jobs_of_a_gpu_run_without_one(tmp_path):
    """Method: the jobs of `gpu_train` on the processor, with a model of a few thousand parameters:
    every home of ours runs, and all of them have the losses of plain torch. Two ranks share it."""
    done = run_bench(
        "gpu_train", "--json", "--scale", "0.01", "--no-rivals", folder=tmp_path, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = {row["name"] for row in found["rows"]}
    assert {
        f"gpu_train.a.tiny.8k.{home}" for home in ("plain", "host", "device", "half", "nvme")
    } <= names
    assert {f"gpu_train.ranks.{kind}" for kind in ("sums", "raises", "killed")} <= names
    assert "does not run" not in done.stderr and "other losses" not in done.stderr
    for home in ("device", "host", "half", "nvme"):
        assert (
            f"gpu_train.e.tiny: {home} has the losses of plain, the same numbers" in found["notes"]
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "theme, expected",
    [
        (
            "train",
            {
                "train.compute",
                "train.plain",
                "train.infinity_nvme.peak",
                "train.infinity_host.held",
            },
        ),
        (
            "train_ways",
            {"train.clip.infinity_nvme", "train.micro8.plain", "train.units8.infinity_host"},
        ),
        ("train_1b", {"train_1b.plain", "train_1b.infinity_nvme"}),
        ("tiling", {"tiling.width.64", "tiling.head.tiles.grown"}),
        ("attention", {"attention.dense", "attention.stride1", "attention.stride256.grown"}),
        (
            "disks",
            {
                "disks.one",
                "disks.unit",
                "disks.units8",
                "disks.ranks8",
                "disks.slow_one",
                "disks.moved.ranks8",
            },
        ),
        ("cluster", {"cluster.disks1", "cluster.disks2", "cluster.disks8", "cluster.latency2"}),
        ("startup", {"startup.host.inference", "startup.nvme.training"}),
        (
            "integrations",
            {
                f"integrations.{name}{what}"
                for name in ("loop", "transformers", "accelerate", "lightning")
                for what in ("", ".plain", ".first_step", ".lines", ".options")
            },
        ),
    ],
)
def test_end_to_end_themes_run_with_small_models(tmp_path, theme, expected):
    """Method: the whole theme with a model of a few thousand parameters, without rivals."""
    done = run_bench(
        theme,
        "--json",
        "--scale",
        "0.05",
        "--rounds",
        "1",
        "--no-rivals",
        folder=tmp_path,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert expected <= {row["name"] for row in found["rows"]}
    assert "does not run" not in done.stderr
    assert bool(found["series"].get("train.budget")) == (theme == "train_ways")
    assert list(tmp_path.iterdir()) == []


def test_results_are_written_where_they_are_asked_for(tmp_path, capsys):
    """Method: `--save` with a file, then with a folder; both hold the same theme."""
    quick = ["--scale", "0.02", "--rounds", "1", "--no-rivals", "--folder", str(tmp_path)]
    assert checkout.main(["pool", "--save", str(tmp_path / "one.json"), *quick]) == 0
    (tmp_path / "results").mkdir()
    assert checkout.main(["pool", "--save", str(tmp_path / "results"), *quick]) == 0
    (kept,) = (tmp_path / "results").iterdir()
    assert kept.name.startswith("pool_") and json.loads(kept.read_text())["theme"] == "pool"
    assert json.loads((tmp_path / "one.json").read_text())["theme"] == "pool"
    assert "pool.lease" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, tells",
    [
        (["--rounds", "0"], "--rounds: 0"),
        (["--threads", "0"], "--threads: 0"),
        (["--scale", "0"], "--scale 0"),
        (["--scale", "nan"], "--scale nan"),
        (["--folder", "/nowhere"], "--folder /nowhere"),
    ],
)
def test_bad_options_are_refused(arguments, tells, capsys):
    assert main(["bench", "copy", *arguments]) == 2 and tells in capsys.readouterr().err
    assert checkout.main(["pool", *arguments]) == 2 and tells in capsys.readouterr().err


@pytest.mark.parametrize("theme", installed.IN_CHECKOUT)
def test_a_theme_of_a_checkout_is_refused_by_the_installed_command(theme, tmp_path, capsys):
    """Method: each with options of the report too; the message has the command to run."""
    assert main(["bench", theme, "--out", str(tmp_path / "page.html"), "--svg", str(tmp_path)]) == 2
    assert f"Run `python -m bench {theme}` from the root of a checkout" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_checkout_has_every_theme():
    """Compares the lists of both commands, and imports the module of every theme."""
    assert {*THEMES, *APART, "report"} == {*installed.THEMES, *installed.IN_CHECKOUT}
    assert len(installed.IN_CHECKOUT) == len(set(installed.IN_CHECKOUT))
    for where in (THEMES | APART | installed.THEMES).values():
        name, _, function = where.partition(":")
        assert callable(getattr(importlib.import_module(name), function or "measure"))


def test_the_report_is_a_theme_of_a_checkout(tmp_path, capsys):
    """Method: one result; the page and the pictures are written, and a foreign page is kept."""
    (tmp_path / "results").mkdir()
    results.save(a_result(), tmp_path / "results")
    page = tmp_path / "page.html"
    options = ["--results", str(tmp_path / "results"), "--out", str(page), "--svg", str(tmp_path)]
    assert checkout.main(["report", *options]) == 0
    assert str(page) in capsys.readouterr().out and len(list(tmp_path.glob("*.svg"))) == 3
    page.write_text("somebody's own")
    assert checkout.main(["report", *options]) == 2 and page.read_text() == "somebody's own"


def test_no_package_has_the_benchmarks_of_a_checkout():
    """Reads which packages a wheel has, and what a source distribution has beside them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]["find"]
    found = setuptools.find_packages(str(ROOT), **settings)
    assert "infinity.tools.bench" in found
    assert all(name.partition(".")[0] == "infinity" for name in found)
    assert "bench" not in (ROOT / "MANIFEST.in").read_text()


# --- rounds and ratios ---


def test_jobs_take_turns_and_the_first_round_does_not_count():
    """Method: jobs that write down when they ran; a job that knows its own time is believed."""
    ran = []
    jobs = {
        "a": lambda: ran.append("a"),
        "b": lambda: ran.append("b"),
        "c": lambda: Times([7.0], [3.0]),
    }
    times = alternate(jobs, 2)
    assert ran == ["a", "b"] * 3
    assert (
        len(times["a"].wall) == 2 and times["c"].wall == [7.0, 7.0] and times["c"].cpu == [3.0, 3.0]
    )


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(monkeypatch, capsys):
    """On a terminal one line is drawn anew, job by job; in a log each round is one line."""
    for is_terminal, count in ((True, 0), (False, 3)):
        monkeypatch.setattr(rounds.sys.stderr, "isatty", lambda answer=is_terminal: answer)
        rounds.PROGRESS.begin(2, 3, "io")
        alternate({("ours", "read"): lambda: None, "raw": lambda: None}, 1)
        rounds.PROGRESS.clear()
        told = capsys.readouterr().err
        assert told.count("\n") == count and "2 of 3: io, round 1 of 1" in told
        assert ("] 2 of 3: io, round 1 of 1, ours read" in told) == is_terminal


def test_rows_are_shown_as_they_are_measured_and_rivals_after_them(capsys):
    """Twin: without rivals nothing is printed twice. Less of a time is better, which is said."""
    shown = installed._Shown()
    first, second = (results.row(name, "s", [1.0]) for name in ("a", "b"))
    shown.show([first])
    assert capsys.readouterr().out.count("a ") == 1
    shown.end([first, second])
    told = capsys.readouterr().out
    assert "b " in told and "a " not in told and "s (less is better)" in told
    shown.show([first])
    first.ratios = {"torch": 2.0}
    shown.end([first])
    assert "beside rivals" in (told := capsys.readouterr().out) and "2.00 x torch" in told


def test_a_rival_that_takes_too_long_is_left_out():
    """Twin: one that is quick is there."""
    slow = SimpleNamespace(NAME="slow", find=lambda: time.sleep(10))
    assert limited(slow, seconds=1).find() == "not built within 1 s"
    assert limited(SimpleNamespace(NAME="quick", find=lambda: 7)).find() == 7


def test_a_ratio_is_of_pairs():
    """Method: a machine that gets three times slower half-way; pairs say twice as good, medians of
    each would not."""
    ours, theirs = [1.0, 1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 6.0, 6.0, 6.0]
    assert paired(ours, theirs) == 2.0
    assert results.row("x", "s", ours, ceiling=("limit", theirs)).share_of_ceiling == 0.5


# --- the report ---


def a_result() -> dict:
    measured = results.Measured(
        [
            results.row(
                "io.read",
                "GB/s",
                [1.0, 2.0, 3.0],
                ceiling=("raw <disk>", [4.0, 4.0, 4.0]),
                ratios={"fio": 1.5},
            )
        ],
        ["a rival was absent"],
        {
            "io.sweep": [
                {"block_nbytes": 4096 * n, "depth": d, "GB/s": n / d}
                for n in (1, 2)
                for d in (4, 16)
            ],
            "adam.threads": [
                {"threads": 1, "split": 1.0, "moving": 1.2},
                {"threads": 2, "split": 1.5, "moving": 1.6},
            ],
            "update.timeline": [
                {"kind": kind, "slot": 0, "start": 0.1, "end": 0.2}
                for kind in ("load", "step", "save")
            ],
        },
    )
    return results.result("io", measured)


def test_the_report_has_every_figure_and_plot(tmp_path):
    """Method: one made-up result; the page names its figures, draws its three plots, and escapes
    what it shows."""
    results.save(a_result(), tmp_path)
    assert report.write(tmp_path, tmp_path / "page.html") == []
    page = (tmp_path / "page.html").read_text()
    for text in (
        "io.read",
        "2.000",
        "50 % of raw &lt;disk&gt;",
        "x fio",
        "1.50",
        "a rival was absent",
    ):
        assert text in page, text
    assert page.count("<svg") == 3 and "<disk>" not in page


def test_plots_are_files_of_their_own_too(tmp_path):
    """Method: two results of other days; a picture for each series, of the newer one, that an image
    tag can show."""
    old, new = a_result() | {"date": "2026-01-01"}, a_result() | {"date": "2026-01-02"}
    new["series"] = {"adam.threads": POINTS["adam.threads"]}
    old["series"] = {"adam.threads": [{"threads": 77, "split": 1.0, "moving": 1.25}]}
    for found in (new, old):
        results.save(found, tmp_path)
    (path,) = report.write_plots(tmp_path, tmp_path)
    drawn = path.read_text()
    assert (
        path.name == "adam.threads.svg"
        and drawn.startswith("<svg xmlns=")
        and ">77<" not in drawn
        and ">1<" in drawn
    )
    (tmp_path / "odd.json").write_text("[]")
    assert report.write_plots(tmp_path, tmp_path / "made" / "here")[0].read_text() == drawn


def test_a_folder_without_results_is_an_error_that_says_how_to_make_some(tmp_path):
    with pytest.raises(ConfigError, match="python -m bench all --save"):
        report.write(tmp_path, tmp_path / "page.html")


def test_the_committed_results_are_drawn(tmp_path, capsys):
    """Method: the command as docs/measurements.md has it; each file is a section, or is named with
    the reason. Twin: a file that is no result, one that is cut off, a list."""
    page = tmp_path / "page.html"
    assert checkout.main(["report", "--out", str(page)]) == 0
    files = list((ROOT / "bench" / "results").glob("*.json"))
    told = capsys.readouterr().err
    assert len(files) > 30 and page.read_text().count("class='result'") + told.count(
        "left out"
    ) == len(files)
    assert told.count("left out") == sum("theme" not in json.loads(f.read_text()) for f in files)
    results.save(a_result(), tmp_path)
    others = {"other.json": "{}", "cut.json": '{"theme": "io", ', "list.json": "[]"}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    assert len(report.write(tmp_path, page)) == 3 and all(n in page.read_text() for n in others)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.just([]),
    st.just({}),
)


def replaced(content, path: list[int], odd):
    """``content`` with the part that ``path`` leads to replaced."""
    if not path or not isinstance(content, (dict, list)) or not content:
        return odd
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[path[0] % len(keys)]
    changed = dict(content) if isinstance(content, dict) else list(content)
    changed[key] = replaced(content[key], path[1:], odd)
    return changed


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(path=st.lists(st.integers(0, 20), max_size=6), odd=ODD)
def test_what_is_no_result_is_refused_by_name(tmp_path_factory, path, odd):
    """Method: a good result with any part of it replaced by something odd; a page, or a ConfigError
    naming the file, and nothing else."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "odd.json").write_text(json.dumps(replaced(a_result(), path, odd)))
    try:
        report.write(folder, folder / "page.html")
    except ConfigError as error:
        assert "odd.json" in str(error)


@pytest.mark.parametrize("name", first_steps.RECIPES)
def test_a_recipe_changes_three_lines_at_most(name):
    """Method: both scripts of a recipe are Python, and what only ours has is counted against the
    plain one, line by line."""
    ours, plain = (first_steps.script(name, ours=each).splitlines() for each in (True, False))
    for script in (ours, plain):
        compile("\n".join(script), name, "exec")
    assert first_steps.lines_changed(name) == sum(line not in plain for line in ours) <= 3
    assert "infinity" in "\n".join(ours) and "nfinity" not in "\n".join(plain)


@pytest.mark.slow
def test_meetings_are_measured_in_all_three_ways(monkeypatch, tmp_path):
    """Two processes: it changes the meetings' own methods, which may have other names by now."""
    monkeypatch.setattr(meetings, "RANKS", (2,))
    monkeypatch.setattr(meetings, "launch_delayed", lambda *given: "left out")
    found = meetings.measure(Settings(folder=str(tmp_path), rounds=1, scale=0.1))
    assert [each.name for each in found.rows] == [
        "meetings.2",
        "meetings.2.cpu",
        "meetings.2.count",
    ], found.notes
    assert found.rows[2].median > 0


@pytest.mark.slow
def test_shares_are_measured_beside_an_even_split(tmp_path):
    """Two processes, with a tenth of the work: little is left of the difference."""
    found = shares.measure(Settings(folder=str(tmp_path), rounds=1, scale=0.1))
    names = [f"shares.{name}{what}" for name in ("slowed", "modelled") for what in ("", ".first")]
    assert [each.name for each in found.rows] == names, found.notes
    assert found.rows[2].ratios["even"] > 0 and 48 <= found.rows[3].median <= 95


def test_touches_are_measured_beside_torch_and_full_params(monkeypatch, tmp_path):
    """Method: a few small blocks at one home."""
    monkeypatch.setattr(touches, "BLOCKS", 3)
    monkeypatch.setattr(touches, "HOMES", ("host",))
    found = touches.measure(Settings(folder=str(tmp_path), rounds=1))
    assert [each.name for each in found.rows] == [
        "touches.host.clamp",
        "touches.host.norms",
        "touches.host.average",
    ]
    assert all(each.ratios.keys() == {"torch", "full_params"} for each in found.rows)


def test_the_last_line_says_what_this_machine_can_do(monkeypatch):
    """By hand: 7 G parameters, of which 16 bytes are read and 12 written at 2 and 4 GB/s, and 0.5 G
    stepped in a second. Twins: without a disk's rows, and without any."""
    disk = [results.row("io.read", "GB/s", [2.0]), results.row("io.write", "GB/s", [4.0])]
    adam = [results.row("adam.split", "G parameters/s", [0.5])]
    assert "77 s of this disk" in results.bound_of([*disk, *adam])
    assert "14 s of these processors" in results.bound_of(adam)
    assert "disk" not in results.bound_of(adam) and results.bound_of([]) == ""
    assert results.spread([results.row("io.read", "GB/s", [1.0, 2.0, 3.0])])[0].endswith("io.read")
    assert results.spread(disk) == []
    for load, is_told in ((9.0, True), (0.1, False)):
        monkeypatch.setattr(results.os, "getloadavg", lambda load=load: (load, load, load))
        monkeypatch.setattr(results.os, "cpu_count", lambda: 2)
        assert bool(results.busy()) == is_told
