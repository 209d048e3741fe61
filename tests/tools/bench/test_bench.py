"""`infinity bench` and `python -m bench`: the rows they promise, one JSON object, and a report.

Sizes are tiny: no test looks at how fast anything is.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import prepared
import pytest
import setuptools
from hypothesis import given, settings
from hypothesis import strategies as st

import bench.__main__ as checkout
from bench import (
    bench_disk,
    bench_kernels,
    bench_loops,
    bench_units,
    first_steps,
    meetings,
    recorded,
    report,
    touches,
    two_ranks,
)
from bench.rivals import fio, limited
from bench.rivals.tuning import Tuned
from bench.themes import IN_ALL, PARTS, THEMES, full_name, module_of, part_named
from infinity import native
from infinity.core.machine import disk_profile
from infinity.core.run.engine import Engine
from infinity.errors import ConfigError, UsageError
from infinity.tools.bench import bench as installed
from infinity.tools.bench import compare, facts, intervals, plots, results, rounds
from infinity.tools.bench import io as bench_io
from infinity.tools.bench.rounds import Times, alternate, paired
from infinity.tools.bench.settings import Settings
from infinity.tools.cli import main

ROOT = Path(checkout.__file__).parents[1]
ROWS = {
    "io": {"io.read", "io.write", "io.mixed", "io.read.cpu", "io.threads.read"},
    "adam": {"adam.split", "adam.fp32", "adam.int8"},
    "update": {"update.nvme"},
    "pool": {"pool.lease"},
    "copy": {"copy.memory.from_home", "copy.memory.to_home"},
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


def a_theme(monkeypatch, name: str, *actions) -> str:
    """A module whose ``measure`` takes the next of ``actions`` in each call."""
    module, left = ModuleType(f"theme_{name}"), list(actions)
    module.measure = lambda settings: left.pop(0)(settings)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def a_row(name: str, *values: float, unit: str = "tokens/s") -> results.Row:
    return results.row(name, unit, values or [1.0])


def cut_off(*rows: results.Row, keep: bool = True):
    """A theme that keeps or shows ``rows``, one after the other, and is interrupted."""

    def measure(settings) -> None:
        for count, each in enumerate(rows, start=1):
            settings.keep(results.Measured([*rows[:count]])) if keep else settings.show([each])
        raise KeyboardInterrupt

    return measure


@pytest.mark.parametrize("keep", [True, False])
def test_what_was_measured_is_saved_before_a_theme_ends(tmp_path, monkeypatch, capsys, keep):
    """Method: a theme keeps or shows two rows, one after the other, and is interrupted; the file
    says that it is not complete, and its path is told. Twin: of one that keeps nothing there is no
    file."""
    args = checkout.build_parser().parse_args(["gpu_train", "--save", str(tmp_path)])
    for kept in ([], [a_row(name) for name in ("one", "two")]):
        name = a_theme(monkeypatch, "cut_off", cut_off(*kept, keep=keep))
        with pytest.raises(KeyboardInterrupt):
            installed.measure(args, {"gpu_train": name}, ("gpu_train",))
        found = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
        assert [row["name"] for each in found for row in each["rows"]] == [row.name for row in kept]
        assert bool(kept) == ("--resume" in capsys.readouterr().err)
    assert len(found) == 1 and found[0]["theme"] == "gpu_train" and not found[0]["complete"]


def test_a_run_is_resumed_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    """Method: the second of three themes is interrupted after a row, then fails, then ends; what is
    done is not measured again. Twins: another scale, another file."""
    whole = lambda name: lambda settings: results.Measured([a_row(name)], [f"note {name}"])
    again = [cut_off(a_row("b.1"), keep=False), lambda settings: 1 / 0, whole("b.2")]
    themes = {
        "a": a_theme(monkeypatch, "a", whole("a.1")),
        "b": a_theme(monkeypatch, "b", *again),
        "c": a_theme(monkeypatch, "c", whole("c.1")),
    }
    file = tmp_path / "run.json"
    parse = checkout.build_parser().parse_args
    with pytest.raises(KeyboardInterrupt):
        installed.measure(parse(["a", "--save", str(file)]), themes, tuple("abc"))
    assert json.loads(file.read_text())["done"] == ["a"]
    for wrong, told in ((["--scale", "0.5"], "settings"), (["--threads", "7"], "settings")):
        with pytest.raises(ConfigError, match=told):
            installed.measure(parse(["a", "--resume", str(file), *wrong]), themes, tuple("abc"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a result"):
        args = parse(["a", "--resume", str(tmp_path / "other.json")])
        installed.measure(args, themes, tuple("abc"))
    with pytest.raises(ZeroDivisionError):
        installed.measure(parse(["a", "--resume", str(file)]), themes, tuple("abc"))
    assert installed.measure(parse(["a", "--resume", str(file)]), themes, tuple("abc")) == 0
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["a.1", "b.1", "b.2", "c.1"]
    assert found["complete"] and found["done"] == list("abc") and "note a.1" in found["notes"]


def test_what_a_theme_keeps_replaces_what_it_kept_before(tmp_path, monkeypatch):
    """Method: a theme keeps a row with a note, then another of both, as jobs that end one by one;
    the file has the last of each. A theme without rows leaves its notes."""

    def measure(settings) -> results.Measured:
        settings.keep(results.Measured([a_row("one")], ["two: not reached"]))
        assert "not reached" in file.read_text()
        settings.keep(results.Measured([a_row("one"), a_row("two")], ["all reached"]))
        return results.Measured([a_row("one"), a_row("two")], ["all reached"])

    empty = lambda settings: results.Measured([], ["not installed"])
    file = tmp_path / "run.json"
    themes = {"x": a_theme(monkeypatch, "x", measure), "y": a_theme(monkeypatch, "y", empty)}
    args = checkout.build_parser().parse_args(["x", "--save", str(file)])
    assert installed.measure(args, themes, ("x", "y")) == 0
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]] == ["one", "two"]
    assert found["notes"] == ["all reached", "not installed"] and found["complete"]


def test_a_quick_look_never_replaces_a_careful_run(tmp_path, monkeypatch, capsys):
    """Method: three runs into one folder within a second are three files; a named file with a
    result is refused, as a foreign one is. Twin: --overwrite replaces it."""
    theme = a_theme(monkeypatch, "quick", *[lambda settings: results.Measured([a_row("x")])] * 9)

    def run(*options: str) -> int:
        args = checkout.build_parser().parse_args(["x", *options])
        return installed.measure(args, {"x": theme}, ("x",))

    folder = tmp_path / "made"
    for options in (["--scale", "1"], ["--scale", "0.001", "--rounds", "1"], ["--scale", "1"]):
        assert run("--save", str(folder), *options) == 0
    found = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert sorted(each["settings"]["scale"] for each in found) == [0.001, 1, 1]
    assert "a quick look (scale 0.001, rounds 1)" in capsys.readouterr().out
    file = tmp_path / "run.json"
    assert run("--save", str(file)) == 0
    before = file.read_text()
    with pytest.raises(ConfigError, match="holds a result"):
        run("--save", str(file), "--scale", "0.001")
    assert file.read_text() == before
    assert run("--save", str(file), "--overwrite", "--scale", "0.001") == 0
    assert json.loads(file.read_text())["settings"]["scale"] == 0.001
    (tmp_path / "own.json").write_text("mine")
    with pytest.raises(ConfigError, match="not made by Infinity"):
        run("--save", str(tmp_path / "own.json"))
    with pytest.raises(ConfigError, match="ends in .json"):
        run("--save", str(tmp_path / "table.csv"))


def test_a_result_file_keeps_its_run():
    """Method: rounds, settings, versions, machine, load, rivals and pairs of a made-up run are in
    its file; what an older file lacks is made up for as it is read."""
    wall = [1.0, 2.0, 4.0]
    made = results.row("a", "s", wall, ratios={"torch": paired(wall, [2.0, 4.0, 8.0]), "x": 1.0})
    measured = results.Measured([made], rivals={"torch": {"version": "9"}})
    found = json.loads(json.dumps(results.result("io", measured, Settings(rounds=3, scale=0.5))))
    (kept,) = found["rows"]
    assert kept["rounds"] == wall and kept["ratio_rounds"] == {"torch": [2.0, 2.0, 2.0]}
    assert kept["better"] == "less" and found["rivals"] == {"torch": {"version": "9"}}
    assert found["settings"]["rounds"] == 3 and found["settings"]["scale"] == 0.5
    assert {"torch", "python"} <= found["versions"].keys() and found["format"] == 2
    assert {"simd", "memory", "disk", "kernel"} <= found["machine"].keys()
    assert found["machine"]["simd"] in found["hardware"] and found["load"].keys() == {
        "before",
        "after",
    }
    old = {name: kept[name] for name in ("name", "unit", "median", "low", "high", "ratios")}
    assert results.row_of(old).better == "less" and results.row_of(old).rounds == []


@pytest.mark.parametrize(
    "script, gpu",
    [
        ("echo 'NVIDIA H100'; echo 'NVIDIA H100'", "2 x NVIDIA H100"),
        ("exit 9", None),
        ("true", None),
    ],
)
def test_a_machine_is_named_with_its_gpu(script, gpu, tmp_path, monkeypatch):
    """Method: doubles of the driver's tool; its GPUs are in the facts and the name. Twins: a driver
    that does not answer, and none. Two machines that differ in one fact differ."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = facts.machine(str(tmp_path))
    assert found["gpu"] == gpu and ("h100" in facts.name_of(found)) == bool(gpu)
    other = found | {"simd": "abacus"}
    assert facts.name_of(other) != facts.name_of(found)
    told = facts.differences({"machine": found, "versions": {}}, {"machine": other, "versions": {}})
    assert told == [f"simd: {found['simd']} | abacus"]


def test_a_commit_is_the_packages_own(tmp_path, monkeypatch):
    """Method: a copy of the package's file inside another repository does not record that one's
    commit; a checkout records its own."""
    assert (
        facts.commit()
        == subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=7"],
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    place = tmp_path / "lib" / "infinity" / "tools" / "bench"
    place.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(facts, "__file__", str(place / "facts.py"))
    told = facts.commit()
    assert told.startswith("version") or len(told) == 7
    if told.startswith("version"):  # the environment's own package was installed without one
        (place / "commit").write_text("1234567\n")
        assert facts.commit() == "1234567"


@pytest.mark.parametrize(
    "share, unit, passed",
    [(1.5, "GB/s", True), (1.02, "GB/s", False), (0.9, "GB/s", False), (1.5, "s", False)],
)
def test_a_ceiling_that_is_passed_is_said(share, unit, passed):
    """Method: a row above its ceiling, in the table and in the notes; twins within noise, below,
    and of seconds, where more is worse."""
    rows = [results.row("x", unit, [share] * 5, ceiling=("raw disk", [1.0, 1.0, 0.9, 1.1, 1.0]))]
    assert ("it is not a ceiling" in results.table(rows)) == passed
    assert (
        any("above their ceilings" in note for note in results.remarks(rows, Settings())) == passed
    )
    assert "(1.000, 0.900 to 1.100)" in results.table(rows)


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
    "machine.disk": [
        {"kind": kind, "way": way, "block_nbytes": 1 << 16, "depth": 4, "GB/s": 1.0, "rounds": [1]}
        for kind in ("auto", "threads")
        for way in ("read", "write")
    ],
    "machine.adam": [
        {"threads": 1, "G parameters/s": 1.0, "moving": 2.0, "rounds": [0.9, 1.0, 1.0, 1.0, 1.1]}
    ],
    "machine.memory": [{"threads": 1, "GB/s": 9.0, "rounds": [9.0]}],
}
TOLD = {
    "io.sweep": "1024",
    "adam.threads": "AdamW",
    "update.timeline": "load",
    "train.budget": "75 %",
    "gpu_train.budget": "30 %",
    "gpu_train.size": "8.0 B",
    "tiling.width": "16 MiB",
    "machine.disk": "64 KiB",
    "machine.adam": "G parameters/s",
    "machine.memory": "a copy",
}


@pytest.mark.parametrize("name", plots.PLOTS)
def test_every_plot_is_drawn(name):
    """Method: from a point or two, every plot is an SVG that tells of them; a plot without points
    here fails."""
    drawn = plots.as_svg(plots.PLOTS[name](POINTS[name]))
    assert drawn.startswith("<svg") and drawn.endswith("</svg>") and TOLD[name] in drawn
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_roofline_needs_its_rows():
    """Method: products, memory, disk and update; each limit is named with its rate. Twin: without
    the disk there is none."""
    rows = [
        asdict(results.row(name, "GB/s", [rate] * 5))
        for name, rate in {
            "machine.products.float32": 100.0,
            "machine.memory.copy": 20.0,
            "machine.disk.both": 4.0,
            "machine.adam.split": 1.5,
        }.items()
    ]
    (drawn,) = plots.drawn({"rows": rows}).values()
    told = plots.as_svg(drawn)
    for text in ("memory: 20 GB/s", "disk, both ways: 4 GB/s", "products, float32", "1,024 tokens"):
        assert text in told, text
    assert plots.names({"rows": rows[:2]}) == []


def test_plots_without_their_library_are_refused_by_name(monkeypatch, tmp_path, capsys):
    """Method: a machine without matplotlib; nothing is measured or written."""
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    for command, run in ((["bench", "--html", "a.html"], main), (["report"], checkout.main)):
        assert run(command) == 2 and "pip install matplotlib" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    "theme", sorted(({*PARTS} - {*installed.THEMES}) | ({*checkout.COMMANDS} - {"compare"}))
)
def test_a_theme_of_a_checkout_is_refused_by_the_installed_command(theme, tmp_path, capsys):
    """Method: each with options of the report too; the message has the command to run."""
    assert main(["bench", theme, "--out", str(tmp_path / "page.html"), "--svg", str(tmp_path)]) == 2
    assert f"Run `python -m bench {theme}` from the root of a checkout" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_checkout_has_every_theme():
    """Method: imports the module of every part; the installed themes are among the twelve, and all
    of them in `all`."""
    assert installed.THEMES.keys() <= THEMES.keys() and len(THEMES) == 12
    assert {*installed.IN_ALL} <= {*IN_ALL} <= {*PARTS}
    for where in [part.where for part in PARTS.values()] + [*installed.THEMES.values()]:
        name, _, function = module_of(where).partition(":")
        assert callable(getattr(importlib.import_module(name), function or "measure"))


def test_a_part_has_two_names():
    """Method: each part by both of its names; no own name is another part's, and none that is no
    part's is changed."""
    assert len(PARTS) == sum(map(len, THEMES.values()))
    for name in PARTS:
        assert part_named(name) == part_named(full_name(name)) == name
    assert full_name("train_1b") == "train.1b" and full_name("meetings") == "ranks.meetings"
    for other in ("ranks.step", "io.", "mine.py", "ranks_meetings"):
        assert part_named(other) == other


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


OF_DEEPSPEED = {"backward", "step"}  # its engine's, in files that have both


def of_the_engine(text: str) -> set[str]:
    """The names of the engine of a wrapped model that a file uses."""
    found = re.findall(r"\bengine\.(\w+)", text) if "core.run.registry" in text else []
    return set(found) - OF_DEEPSPEED


def test_benchmarks_use_what_the_engine_has():
    """Reads every benchmark for names of the engine, which no type check sees: most run for a
    quarter of an hour, and fail at their end. Twin: a name that is not there."""
    texts = {path.name: path.read_text() for path in (ROOT / "bench").glob("*.py")}
    used = {name: of_the_engine(text) for name, text in texts.items()}
    assert sum(map(bool, used.values())) > 5
    there = {*dir(Engine), *Engine.__annotations__, *Engine.__init__.__code__.co_names, "job"}
    assert {name: names - there for name, names in used.items() if names - there} == {}
    other = "from infinity.core.run.registry import wrapped\nwrapped(model).engine.finish_all()"
    assert of_the_engine(other) - there == {"finish_all"}


# --- rounds and ratios ---


def test_jobs_take_turns_and_the_first_round_does_not_count():
    """Method: jobs that write down when they ran; a job that knows its own time is believed. In
    each round all run once, in an order of its own. Twin: in order, where one prepares the next."""
    ran = []
    jobs = {
        "a": lambda: ran.append("a"),
        "b": lambda: ran.append("b"),
        "c": lambda: Times([7.0], [3.0]),
    }
    times = alternate(jobs, 2)
    assert [sorted(ran[at : at + 2]) for at in (0, 2, 4)] == [["a", "b"]] * 3
    assert (
        len(times["a"].wall) == 2 and times["c"].wall == [7.0, 7.0] and times["c"].cpu == [3.0, 3.0]
    )


def test_the_order_in_a_round_changes_and_is_the_same_on_all_ranks():
    """Method: two calls have one order, in which each of three jobs leads in some round."""
    orders = []
    for in_order in (False, False, True):
        ran: list[str] = []
        jobs = {name: lambda name=name, ran=ran: ran.append(name) for name in "abc"}
        alternate(jobs, 20, in_order=in_order)
        orders.append(ran)
    assert orders[0] == orders[1] and set(orders[0][3::3]) == set("abc")
    assert orders[2] == list("abc") * 21


def test_rounds_go_on_until_the_interval_is_narrow():
    """Method: times that a job tells itself: of one value five rounds are enough, of wild ones the
    seconds are used. Twin: without seconds the rounds are those that were asked for."""
    wild = itertools.cycle([1.0, 2.0, 3.0, 4.0])
    for job, seconds, most in (
        (lambda: Times([1.0], [1.0]), 60.0, 5),
        (lambda: Times([next(wild)], [1.0]), 0.2, 1000),
        (lambda: Times([next(wild)], [1.0]), 0.0, 5),
    ):
        count = len(alternate({"x": job}, 5, seconds=seconds)["x"].wall)
        assert count == 5 if most == 5 else 5 < count <= most


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(monkeypatch, capsys):
    """On a terminal one line is drawn anew, job by job; in a log each loop is one line."""
    for is_terminal, count in ((True, 0), (False, 1)):
        monkeypatch.setattr(rounds.sys.stderr, "isatty", lambda answer=is_terminal: answer)
        rounds.PROGRESS.begin(2, 3, "io")
        alternate({("ours", "read"): lambda: None, "raw": lambda: None}, 1)
        rounds.PROGRESS.clear()
        told = capsys.readouterr().err
        assert told.count("\n") == count and "2 of 3: io" in told
        assert ("round 1 of 1" in told) == is_terminal
        assert ("] 2 of 3: io, round 1 of 1, ours read" in told) == is_terminal
        assert ("of this loop left" in told) == is_terminal
        rounds.tell("io.sweep")
        alternate({"a": lambda: None}, 1)
        assert "2 of 3: io, io.sweep" in capsys.readouterr().err


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


FIO = """#!/bin/sh
echo "$@" >> $FIO_ASKED
echo "$GLIBC_TUNABLES" >> $FIO_ASKED
case "$*" in *version*) echo fio-0.0; exit;; esac
case "$*" in *bs=1m*iodepth=64*) ms=10;; *) ms=20;; esac
half='"runtime": '$ms', "io_bytes": 500'
none='"runtime": 0, "io_bytes": 0'
echo '{"jobs": [{"read": {'$half'}, "write": {'$none'}, "usr_cpu": 10, "sys_cpu": 20},'
echo '{"read": {'$none'}, "write": {'$half'}, "usr_cpu": 0, "sys_cpu": 0}]}'
"""


def test_fio_runs_at_its_best_and_says_how(tmp_path, monkeypatch):
    """Method: a double of fio, twice as fast with one setting; it is chosen by three trials of
    each, with huge pages, and told with its command line. "mixed" reads one half and writes the
    other, as ours does. Twin: without fio the reason is told."""
    assert fio.find("file", 1000) == "not installed (apt install fio)" or shutil.which("fio")
    asked = tmp_path / "asked"
    (tmp_path / "fio").write_text(FIO)
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FIO_ASKED", str(asked))
    rival = fio.find("file", 1000)
    asked.write_text("")
    assert rival.run("mixed").wall == [0.01]
    lines = asked.read_text().splitlines()
    told = rival.told()
    assert "--bs=1m --iodepth=64" in told["commands"]["mixed"] and told["version"] == "fio-0.0"
    assert {len(times) for times in told["trials"]["mixed"].values()} == {3}
    assert "--rw=read --offset=0 --size=500" in lines[0]
    assert "--rw=write --offset=500 --size=500" in lines[0]
    assert set(lines[1::2]) == {"glibc.malloc.hugetlb=1"} and "=file" not in str(told["commands"])


@pytest.mark.parametrize("factor, is_told", [(2.0, True), (0.5, True), (1.2, False)])
def test_a_stored_profile_that_is_off_is_told_and_replaced(
    factor, is_told, tmp_path, monkeypatch, capsys
):
    """Method: a stored profile, and rates that are so many times of it. Twins: rates near it, and a
    quick look, which replaces none."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    disk_profile.disk_profile.cache_clear()
    stored = disk_profile.DiskProfile(2e9, 2e9, 2e9, depth=32)
    monkeypatch.setattr(disk_profile, "_measure", lambda folder, kind: stored)
    assert disk_profile.disk_profile(str(tmp_path)) == stored
    rows = [a_row(f"io.{way}", 2 * factor, unit="GB/s") for way in ("read", "write", "mixed")]
    told = bench_io._compare_profile(rows, Settings(folder=str(tmp_path)))
    assert bool(told) == is_told and ("read 2.00, write 2.00" in str(told)) == is_told
    assert disk_profile.disk_profile(str(tmp_path)) == stored
    bench_io._compare_profile(rows, Settings(folder=str(tmp_path), keep_profile=True))
    now = disk_profile.disk_profile(str(tmp_path))
    assert (now.read_rate, now.depth) == (2e9 * factor, 32)
    disk_profile.disk_profile.cache_clear()
    quick = ["bench", "io", "--keep-profile", "--folder", str(tmp_path)]
    for options in (["--scale", "0.1"], ["--rounds", "2"]):
        assert main([*quick, *options]) == 2 and "a quick look" in capsys.readouterr().err


def test_the_best_of_several_trials_is_chosen():
    """Method: a setting that was fast once, by chance, and one that is fast in two of three."""
    trials = {"lucky": iter([0.1, 9.0, 9.0]), "fast": iter([1.0, 9.0, 1.0])}
    assert Tuned("x", list(trials)).of("read", lambda each: next(trials[each])) == "fast"


def test_a_file_of_ones_own_is_a_theme(tmp_path, capsys):
    """Method: a file beside nothing of ours, measured together with a theme by its name; and a sum
    of themes is saved. Twins: a file without `measure`, one that is not there, a wrong name."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from infinity.tools.bench.results import Measured, row\n"
        "def measure(settings):\n"
        "    return Measured([row('mine.x', 's', [1.0] * settings.rounds)])\n"
    )
    quick = ["--scale", "0.02", "--rounds", "1", "--folder", str(tmp_path), "--json"]
    assert checkout.main([str(mine), "pool", *quick]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["theme"] == "mine+pool" and found["done"] == ["mine", "pool"]
    assert {"mine.x", "pool.lease"} <= {row["name"] for row in found["rows"]}
    mine.write_text("")
    for wrong, told in (
        ([str(mine)], "has no `measure(settings)`"),
        ([str(tmp_path / "other.py")], "is not there"),
        (["pol"], "did you mean pool?"),
        (["zzz"], "choose from machine, io"),
    ):
        assert checkout.main([*wrong, *quick]) == 2 and told in capsys.readouterr().err


def test_the_help_says_what_each_theme_measures(capsys):
    """Method: the help has a line for each theme and command, and each path of a theme is there."""
    assert checkout.main(["--help"]) == 0
    told = capsys.readouterr().out
    for name, theme in PARTS.items():
        assert full_name(name) in told and theme.help in told and theme.needs in told
        assert theme.paths and all((ROOT / path).exists() for path in theme.paths), name


@pytest.mark.parametrize("command", ["pool", "rivals", "against HEAD"])
def test_a_folder_that_is_not_there_is_refused(command, tmp_path, capsys):
    """Method: a missing folder, and a file, for each command that measures a disk."""
    (tmp_path / "file").touch()
    for name, told in (("missing", "is not there"), ("file", "is a file")):
        assert checkout.main([*command.split(), "--folder", str(tmp_path / name)]) == 2
        assert told in capsys.readouterr().err


def test_a_ratio_has_an_interval_where_its_pairs_are_kept():
    """Method: five pairs of times; and the same row read from its file. Twins: four pairs, and a
    number without pairs."""
    for count, told in ((5, "2.00 x torch (1.90 - 2.10)"), (4, "2.00 x torch")):
        theirs = [2.0, 1.9, 2.1, 2.0, 2.0][:count]
        made = results.row("a", "s", [1.0] * count, ratios={"torch": paired([1.0] * count, theirs)})
        assert results.table([made]).endswith(told)
        kept = json.loads(json.dumps(results.result("io", results.Measured([made]))))
        assert results.table([results.row_of(kept["rows"][0])]).endswith(told)
    assert results.table([results.row("a", "s", [1.0], ratios={"x": 2.0})]).endswith("2.00 x x")


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
    return results.result("io", measured, Settings(rounds=3))


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
        "a quick look",
        "x fio",
        "1.50",
        "a rival was absent",
    ):
        assert text in page, text
    assert page.count("<svg") == 3 and "<disk>" not in page
    assert page.count("<figcaption") == 3 and page.count(a_result()["hardware"]) == 4


def test_rows_are_a_csv_and_a_latex_table_too(tmp_path):
    """Method: the committed results and a new one; each row of a file is a line of the CSV with its
    direction and rounds, and a table has a caption. Twin: somebody's own file stays."""
    folder = tmp_path / "results"
    folder.mkdir()
    results.save(a_result(), folder)
    kept, tex = tmp_path / "rows.csv", tmp_path / "rows.tex"
    options = ["--results", str(folder), "--out", str(tmp_path / "page.html")]
    options += ["--csv", str(kept), "--tex", str(tex)]
    assert checkout.main(["report", *options]) == 0
    (line,) = csv.DictReader(kept.read_text().splitlines())
    assert line["name"] == "io.read" and line["better"] == "more" and line["rounds"] == "3"
    assert r"io.read & 2.000 & 1.000 & 3.000 & GB/s" in tex.read_text()
    assert r"\caption{io" in tex.read_text()
    kept.write_text("mine")
    assert checkout.main(["report", *options]) == 2 and kept.read_text() == "mine"


# --- under pytest-benchmark ---


def run_loops(chosen: str, folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Runs some of `pytest bench`, whose files go to ``folder``."""
    storage = [f"--benchmark-storage={folder}", f"--basetemp={folder / 'pytest'}"]
    command = ["-m", "pytest", "bench", "--quick", "-q", "-k", chosen, *storage, *options]
    return prepared.run(*command, folder=ROOT, seconds=200)


def test_a_benchmark_keeps_its_rate_and_the_share_of_its_ceiling():
    """Method: a double of the fixture whose median is half a second; and jobs that are called.
    Twin: without a ceiling there is no share."""
    called: list[str] = []

    class Benchmark:
        stats = SimpleNamespace(stats=SimpleNamespace(median=0.5))

        def __init__(self):
            self.extra_info = {}

        def __call__(self, job):
            job()

    ceiling = ("moving", lambda: called.append("moving"))
    for limit in (None, ceiling):
        fixture = Benchmark()
        job = lambda: called.append("job")
        recorded.record(fixture, "disk", job, amount=1e9, unit="GB/s", ceiling=limit)
        assert fixture.group == "disk" and fixture.extra_info["rate"] == 2.0
        assert ("share" in fixture.extra_info) == (limit is not None)
    assert called.count("moving") == 6 and fixture.extra_info["ceiling"] == "moving"


@pytest.mark.slow
def test_a_loop_is_a_benchmark_with_its_ceiling(tmp_path):
    """Method: one kernel under pytest-benchmark; its file has calibrated rounds, a group, the
    share of the ceiling, and the facts that our own files have."""
    pytest.importorskip("pytest_benchmark")
    file = tmp_path / "b.json"
    done = run_loops("test_adam[fp32-1]", tmp_path, f"--benchmark-json={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    (one,) = found["benchmarks"]
    assert one["group"] == "adam, 1 threads" and one["stats"]["rounds"] >= 5
    assert one["extra_info"].keys() == {"unit", "rate", "ceiling", "ceiling_rate", "share"}
    assert one["extra_info"]["share"] > 0 and one["extra_info"]["unit"] == "G parameters/s"
    assert found["machine_info"]["infinity"]["simd"] and found["commit_info"]["infinity"]


@pytest.mark.slow
def test_runs_of_loops_are_compared_and_drawn(tmp_path):
    """Method: two runs as pytest-benchmark's manual has them: one saved, one compared with it and
    drawn. Twin: a bound that any run breaks fails."""
    pytest.importorskip("pygal")
    assert run_loops("lease", tmp_path, "--benchmark-autosave").returncode == 0
    options = ["--benchmark-compare", f"--benchmark-histogram={tmp_path / 'drawn'}"]
    done = run_loops("lease", tmp_path, *options)
    assert done.returncode == 0 and "test_lease" in done.stdout, done.stdout + done.stderr
    assert list(tmp_path.glob("drawn*.svg"))
    bound = "--benchmark-compare-fail=min:0.000000001"
    assert run_loops("lease", tmp_path, "--benchmark-compare", bound).returncode in (0, 1)


# One benchmark of each quantity
QUANTITIES = (
    "test_adam[int8-1]",
    "test_blocks[mixed-64KiB-64]",
    "test_checksum[64KiB]",
    "test_disk[threads-read]",
    "test_headline[tiny400]",
    "test_hooks[both-host-16]",
    "test_landing[add-nvme-1Mi]",
    "test_lease",
    "test_rule[rmsprop-split-int8-256Ki]",
    "test_staging[1MiB-checked]",
    "test_step[device-50M]",
    "test_ticket[auto-write]",
    "test_ticket_alone",
    "test_unit_step[nvme-1Mi]",
    "test_update[64MiB]",
)
OF_RANKS = ("test_collective[gather-0.5Mi]", "test_collective[reduce-0.5Mi]")


def quantities_of(*modules: ModuleType) -> set[str]:
    """The names of the benchmarks of ``modules``, without their parameters."""
    return {name for module in modules for name in vars(module) if name.startswith("test_")}


def passed(done: subprocess.CompletedProcess) -> str:
    """What a run of pytest counted, as its last line has it."""
    return done.stdout.strip().splitlines()[-1].partition(",")[0]


def test_each_quantity_is_measured_beside_its_ceiling(tmp_path):
    """Method: one benchmark of each quantity runs once, without rounds, and its ceiling too. Twin:
    a quantity that no run has is found."""
    pytest.importorskip("pytest_benchmark")
    chosen = {name.partition("[")[0] for name in (*QUANTITIES, *OF_RANKS)}
    assert quantities_of(bench_disk, bench_kernels, bench_loops, bench_units) == chosen
    later = ModuleType("later")
    later.test_other = print
    assert quantities_of(bench_disk, later) - chosen == {"test_other"}
    done = run_loops(" or ".join(QUANTITIES), tmp_path, "--benchmark-disable")
    assert passed(done).startswith(f"{len(QUANTITIES)} passed"), done.stdout + done.stderr


@pytest.mark.slow
def test_collectives_are_measured_over_two_ranks(tmp_path):
    """Method: both collectives run once beside torch's, and leave no process. Twin: a rank that
    fails ends the benchmark, with what it printed."""
    pytest.importorskip("pytest_benchmark")
    done = run_loops(" or ".join(OF_RANKS), tmp_path, "--benchmark-disable")
    assert passed(done).startswith("2 passed"), done.stdout + done.stderr
    with two_ranks.TwoRanks(str(tmp_path)) as ranks:
        with pytest.raises(RuntimeError, match="KeyError: 'no_job'"):
            ranks.turn("no_job", 64)
    assert all(rank.poll() is not None for rank in ranks.processes)


def rules_without(variants: list) -> set[str]:
    """The rules of the kernels that lack a form of master with fp32 moments."""
    found = {each.name for each in variants}
    return {
        name
        for name in native.Rule.__members__
        if not {f"{name.lower()}-{master}-fp32" for master in bench_kernels.MASTERS} <= found
    }


def test_every_rule_has_a_benchmark():
    """Method: the parameters of the benchmark of rules against the kernels' list; forms that a rule
    has no moments for are left out. Twin: a list without one rule tells which."""
    (variants,) = [
        mark.args[1]
        for mark in bench_kernels.test_rule.pytestmark
        if mark.name == "parametrize" and mark.args[0] == "variant"
    ]
    assert rules_without(variants) == set()
    names = {each.name for each in variants}
    assert {"adamw-split-int8", "rmsprop-own-bf16", "asgd-own-fp32"} <= names
    assert names.isdisjoint({"asgd-own-bf16", "ademamix-own-bf16", "amsgrad-own-int8"})
    others = [each for each in variants if each.rule != native.Rule.RPROP]
    assert rules_without(others) == {"RPROP"}


# --- comparing ---


def a_run(values, *, name: str = "x", unit: str = "s", **other) -> dict:
    row = results.row(name, unit, list(values))
    made = results.result("io", results.Measured([row]), Settings())
    return json.loads(json.dumps(made)) | {"load": {"before": 0.0, "after": 0.0}} | other


def noisy(rng, median: float, *, noise: float = 0.03, count: int = 9):
    return median * np.exp(noise * rng.standard_normal(count))


def test_two_runs_of_one_commit_get_no_verdict():
    """Method: 200 pairs of runs with 3 % of noise; at most 5 % of them get a verdict. Twins: a run
    that takes 20 % longer is slower in all, one of fewer rounds than an interval needs in none."""
    rng = np.random.default_rng(7)
    for factor, count, least, most, which in (
        (1.0, 9, 0, 10, ("slower", "faster")),
        (1.2, 9, 198, 200, ("slower",)),
        (0.8, 9, 198, 200, ("faster",)),
        (1.5, 4, 200, 200, ("too few rounds",)),
    ):
        pairs = [
            (noisy(rng, factor, count=count), noisy(rng, 1.0, count=count)) for _ in range(200)
        ]
        verdicts = [intervals.verdict(intervals.of_ratio(*pair)) for pair in pairs]
        assert least <= sum(each in which for each in verdicts) <= most, (factor, count)


@pytest.mark.parametrize("unit, factor", [("s", 1.5), ("GB/s", 1 / 1.5), ("nats", 1.5)])
def test_slower_is_slower_whichever_way_a_row_counts(unit, factor):
    """Method: seconds go up, rates go down; both are 1.5 times as slow. Twin: the other way round
    it is faster."""
    steady = [1.0, 1.01, 0.99, 1.0, 1.02]
    runs = [a_run(steady, unit=unit), a_run([factor * each for each in steady], unit=unit)]
    (there,), (back,) = compare.compare(*runs), compare.compare(*runs[::-1])
    assert there.verdict == "slower" and there.ratio == pytest.approx(1.5)
    assert back.verdict == "faster" and back.ratio == pytest.approx(1 / 1.5)
    assert compare.compare(*runs, bound=0.6)[0].verdict == "no difference can be seen"


@pytest.mark.parametrize(
    "ours, limit, verdict",
    [
        (0.6, 0.6, compare.WITH_CEILING),
        (0.6, 1.0, "slower"),
        (1.6, 1.0, "faster"),
        (1.0, 0.6, "no difference can be seen"),
    ],
)
def test_a_slower_machine_is_no_slower_code(ours, limit, verdict):
    """Method: two runs, of which the second has 0.6 of the rate and of the ceiling: the machine
    changed, which is said first. Twins: the rate or the ceiling alone."""
    rng = np.random.default_rng(3)

    def run(rate: float, of_limit: float) -> dict:
        limits = list(noisy(rng, 2.0 * of_limit, noise=0.01))
        made = results.row(
            "x", "GB/s", list(noisy(rng, rate, noise=0.01)), ceiling=("disk", limits)
        )
        return json.loads(json.dumps(results.result("io", results.Measured([made]), Settings())))

    runs = run(1.0, 1.0), run(ours, limit)
    (found,) = compare.compare(*runs)
    assert found.verdict == verdict
    told = [each for each in compare.check(*runs) if "the ceiling of x" in each]
    assert bool(told) == (limit != 1.0)


def test_files_are_compared_and_what_differs_comes_first(tmp_path, capsys):
    """Method: two files of machines that differ; the status is 1, and the machines are named above
    the figures, in four forms. Twins: one machine and one speed, figures of different work."""
    steady = [1.0, 1.01, 0.99, 1.0, 1.02]
    first, second = a_run(steady), a_run([2 * each for each in steady])
    second["machine"] = second["machine"] | {"simd": "abacus"}
    second["versions"] = second["versions"] | {"torch": "1.0"}
    paths = [str(tmp_path / f"{name}.json") for name in "ab"]
    for path, found in zip(paths, (first, second)):
        Path(path).write_text(json.dumps(found))
    for command in (main, lambda given: checkout.main(given[1:])):
        assert command(["bench", "compare", *paths]) == 1
        told = capsys.readouterr().out.splitlines()
        assert "simd" in told[0] and "torch" in told[1] and "slower" in told[-1]
        assert command(["bench", "compare", paths[0], paths[0]]) == 0
        assert "no difference can be seen" in capsys.readouterr().out
        assert command(["bench", "compare", *paths, "--csv"]) == 1
        assert next(csv.DictReader(capsys.readouterr().out.splitlines()))["verdict"] == "slower"
        assert command(["bench", "compare", *paths, "--tex"]) == 1
        assert r"x & 1.000 & 2.000 & 2.000" in capsys.readouterr().out
    assert main(["bench", "io", "--csv"]) == 2
    assert "--csv is of `infinity bench compare`" in capsys.readouterr().err
    assert main(["bench", "compare", *paths, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["slower"] == ["x"]
    third = str(tmp_path / "c.json")
    Path(third).write_text(json.dumps(first))
    assert main(["bench", "compare", *paths, third]) == 1
    told = capsys.readouterr().out
    assert f"B is {paths[1]}" in told.splitlines()[0] and told.count("slower") == 1
    assert f"B is {third}" in told and told.count("no difference can be seen") == 1
    assert main(["bench", "compare", *paths, third, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(each["file"], each["slower"]) for each in found["compared"]] == [
        *((paths[1], ["x"]), (third, []))
    ]
    assert main(["bench", "compare", *paths, third, "--csv"]) == 1
    rows = [*csv.DictReader(capsys.readouterr().out.splitlines())]
    assert [each["file"] for each in rows] == [paths[1], third]
    second["settings"]["scale"] = 0.1
    Path(paths[1]).write_text(json.dumps(second))
    assert main(["bench", "compare", *paths]) == 2 and "--scale" in capsys.readouterr().err


def test_a_file_is_compared_with_this_machine(tmp_path, monkeypatch, capsys):
    """Method: a double of the theme, measured now with the settings of the file. Twins: a theme of
    a checkout, and an old file, which does not keep its settings."""
    asked: list[Settings] = []

    def measure(settings: Settings) -> results.Measured:
        asked.append(settings)
        return results.Measured([results.row("x", "s", [1.0] * settings.rounds)])

    monkeypatch.setitem(installed.THEMES, "io", a_theme(monkeypatch, "now", measure))
    kept = a_run([1.0] * 5)
    kept["settings"] = kept["settings"] | {"rounds": 6, "threads": 1}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(kept))
    assert main(["bench", "compare", str(path)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert [(each.rounds, each.threads, each.rivals) for each in asked] == [(6, 1, False)]
    path.write_text(json.dumps(kept | {"theme": "train"}))
    assert main(["bench", "compare", str(path)]) == 2
    assert "python -m bench train --save" in capsys.readouterr().err
    del kept["settings"]
    path.write_text(json.dumps(kept))
    assert main(["bench", "compare", str(path)]) == 2 and "settings" in capsys.readouterr().err


def test_the_committed_results_can_be_compared(capsys):
    """Method: a file of the format before, with itself: there are too few rounds, which is said."""
    old = str(ROOT / "bench/results/io_amd-epyc-2-cores_2026-11-21.json")
    assert main(["bench", "compare", old, old]) == 0
    told = capsys.readouterr().out
    assert "not recorded by both" in told and told.count("too few rounds") == 5


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
    naming the file, and nothing else. It is compared with itself, too."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "odd.json").write_text(json.dumps(replaced(a_result(), path, odd)))
    try:
        report.write(folder, folder / "page.html")
    except (ConfigError, UsageError) as error:  # a format of no version is refused as that
        assert "odd.json" in str(error)
    assert main(["bench", "compare", *[str(folder / "odd.json")] * 2]) in (0, 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": [{"name": "x"}]},
        {"rows": 7},
        {"settings": []},
        {"settings": {"rounds": None}},
        {"machine": {"cores": "many"}},
        {"load": {"before": None}},
        {"theme": None},
    ],
)
def test_a_damaged_file_is_not_compared(changed, tmp_path, capsys):
    """Method: a good file with one part of it changed. Twin: the good one."""
    good, odd = tmp_path / "good.json", tmp_path / "odd.json"
    good.write_text(json.dumps(a_result()))
    odd.write_text(json.dumps(a_result() | changed))
    assert main(["bench", "compare", str(good), str(odd)]) == 2
    assert f"{odd} is not a result of a benchmark" in capsys.readouterr().err
    assert main(["bench", "compare", str(good), str(good)]) == 0


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
    found = importlib.import_module(module_of(PARTS["shares"].where)).measure(
        Settings(folder=str(tmp_path), rounds=1, scale=0.1)
    )
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
    """By hand: 7 G parameters, of which 16 bytes are read and 12 written at 2 and 4 GB/s, at 8 or 2
    GB/s in both directions at once, and 0.5 G stepped in a second. Twins: without a disk's rows,
    without any, and with rows whose rounds differ much."""
    rates = {"io.read": 2.0, "io.write": 4.0, "io.mixed": 8.0}
    disk = [results.row(name, "GB/s", [rate] * 5) for name, rate in rates.items()]
    adam = [results.row("adam.split", "G parameters/s", [0.5] * 4 + [0.6])]
    assert "about 56 s of this disk" in results.bound_of([*disk, *adam])
    slow = [*disk[:2], results.row("io.mixed", "GB/s", [2.0] * 5)]
    assert "about 98 s of this disk" in results.bound_of(slow)
    few = [*disk[:2], results.row("io.mixed", "GB/s", [8.0])]
    assert results.bound_of(few) == ""
    assert "11.7 s to 14 s of these processors" in results.bound_of(adam)
    assert "28 s" in results.bound_of(adam, 14e9) and "14 B model" in results.bound_of(adam, 14e9)
    assert "of this disk" not in results.bound_of(adam) and results.bound_of([]) == ""
    wide = results.row("io.read", "GB/s", [1.0, 2.0, 3.0, 1.0, 2.0])
    assert results.remarks([wide], Settings())[0].endswith("io.read")
    assert "disk" not in results.bound_of([wide, *disk[1:]])
    assert results.remarks(disk, Settings()) == []
    for load, is_told in ((9.0, True), (0.1, False)):
        monkeypatch.setattr(results.os, "getloadavg", lambda load=load: (load, load, load))
        monkeypatch.setattr(results.os, "cpu_count", lambda: 2)
        assert bool(results.busy()) == is_told
