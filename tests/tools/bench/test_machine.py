"""`infinity bench machine`: what limits training here, and its machine file.

Sizes are tiny: no test looks at how fast anything is.
"""

from __future__ import annotations

import json

import pytest

from infinity.tools.bench import machine
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.settings import Settings
from infinity.tools.cli import main
from infinity.tools.plan.machine_file import Machine

RATES = {
    "machine.products.float32": 100.0,
    "machine.products.bfloat16": 200.0,
    "machine.memory.copy": 20.0,
    "machine.disk.read": 4.0,
    "machine.disk.write": 3.0,
    "machine.disk.both": 7.0,
}


def rows(**changed: float) -> list:
    rates = RATES | {f"machine.{name.replace('_', '.')}": rate for name, rate in changed.items()}
    return [row(name, "GB/s", [rate] * 5) for name, rate in rates.items()]


@pytest.mark.parametrize(
    "changed, tokens, limit, seconds",
    [
        ({}, 4096, "products", "1,150 s"),  # 8 * 7e9 * 4096 / 200e9
        ({}, 16, "disk", "28 s"),  # 16 / 4, 12 / 3 and 28 / 7 of 7e9 bytes
        ({"memory_copy": 1.0}, 16, "memory", "182 s"),  # 26 * 7e9 / 1e9
        ({"disk_both": 1.0}, 16, "disk", "196 s"),  # 28 * 7e9 / 1e9
    ],
)
def test_the_limit_is_named(changed, tokens, limit, seconds):
    """By hand: 7 G parameters; the largest of products, memory and disk is the limit."""
    told = machine.limit_of(rows(**changed), 7e9, tokens)
    assert f"the limit is {limit}." in told and seconds in told and "(bfloat16)" in told


def test_a_dtype_without_fast_products_is_named():
    """Method: float32 20 times as fast as bfloat16. Twins: the other way round, and rows of another
    theme, of which nothing is said."""
    told = machine.limit_of(rows(products_bfloat16=5.0), 7e9, 4096)
    assert "(float32)" in told and "float32 are 20 times as fast as of bfloat16" in told
    assert "times as fast" not in machine.limit_of(rows(), 7e9, 4096)
    assert machine.limit_of([row("io.read", "GB/s", [1.0])], 7e9, 4096) == ""


def test_rounds_that_differ_say_nothing():
    """Twin: rounds that differ by a tenth give a range, from the best to the median."""
    steady, wide = ([rate] * 4 + [rate * times] for rate, times in ((4.0, 1.1), (4.0, 2.0)))
    others = [each for each in rows() if each.name != "machine.disk.both"]
    told = machine.limit_of([*others, row("machine.disk.both", "GB/s", steady)], 7e9, 16)
    assert "44.5 s to 49 s of disk" in told
    assert machine.limit_of([*others, row("machine.disk.both", "GB/s", wide)], 7e9, 16) == ""


def test_without_a_theme_the_machine_is_measured(monkeypatch, capsys):
    """Claim: a line for each of three models. Twin: one of the size that was asked for."""
    monkeypatch.setattr(machine, "measure", lambda settings: Measured(rows()))
    assert main(["bench"]) == 0
    told = capsys.readouterr().out
    assert [size for size in ("1 B", "8 B", "70 B") if f"of a {size} model" in told] == [
        *("1 B", "8 B", "70 B")
    ]
    assert main(["bench", "--parameters", "14e9"]) == 0
    told = capsys.readouterr().out
    assert "of a 14 B model" in told and "of a 8 B model" not in told


@pytest.mark.slow
def test_two_processes_send_messages():
    """Method: real processes that meet over gloo."""
    (found,) = machine._messages(Settings(scale=0.01, rounds=2), "cpu")
    assert found.name == "machine.messages" and found.median > 0 and len(found.rounds) == 2


def test_processes_that_do_not_meet_are_noted(monkeypatch):
    """Method: a program in place of Python that ends at once."""
    monkeypatch.setattr(machine.sys, "executable", "/bin/false")
    assert machine._messages(Settings(scale=0.01), "cpu") == [
        "machine: 2 processes did not meet over gloo"
    ]


def test_a_machine_is_measured_and_planned(tmp_path, capsys, monkeypatch):
    """Method: a tiny run without the second process; every row is positive, the folder is as it
    was, and the machine file is read as those of the package are. Twin: somebody's own file
    stays."""
    monkeypatch.setattr(machine, "_messages", lambda settings, where: ["no messages"])
    file, folder = tmp_path / "m.toml", tmp_path / "disk"
    folder.mkdir()
    quick = ["bench", "machine", "--json", "--scale", "0.01", "--rounds", "1"]
    quick += ["--folder", str(folder), "--machine-file", str(file)]
    file.write_text("mine")
    assert main(quick) == 2 and file.read_text() == "mine"
    file.unlink()
    capsys.readouterr()
    assert main(quick) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = {each["name"]: each["median"] for each in found["rows"]}
    assert names.keys() >= RATES.keys() | {"machine.disk.latency", "machine.disk.sync"}
    assert min(names.values()) > 0
    assert list(folder.iterdir()) == []
    known = Machine.read(str(file))
    assert known.disk_read == pytest.approx(names["machine.disk.read"] * 1e9, rel=1e-3)
    assert known.host_bandwidth == pytest.approx(names["machine.memory.copy"] * 1e9, rel=1e-3)
    assert "of 1 rounds" in file.read_text() and found["date"] in file.read_text()
