"""`infinity bench machine`: what limits training here, and its machine file.

Sizes are tiny: no test looks at how fast anything is.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from infinity.tools.bench import bench, machine
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.settings import Settings
from infinity.tools.cli import main
from infinity.tools.plan.machine_file import Machine

RATES = {
    "machine.products.float32": 100.0,
    "machine.products.bfloat16": 200.0,
    "machine.memory.copy": 20.0,
    "machine.adam.split": 2.0,
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
        ({}, 16, "the disk", "28 s"),  # 16 / 4, 12 / 3 and 28 / 7 of 7e9 bytes
        ({"adam_split": 0.05}, 16, "the update", "140 s"),  # 7e9 / 0.05e9
        ({"disk_both": 1.0}, 16, "the disk", "196 s"),  # 28 * 7e9 / 1e9
    ],
)
def test_the_limit_is_named(changed, tokens, limit, seconds):
    """By hand: 7 G parameters; the largest of products, update and disk is the limit."""
    told = machine.limit_of(rows(**changed), 7e9, tokens)
    assert f"at least about {seconds} a step, the limit is {limit};" in told
    assert told.startswith("7 B,") and "(bfloat16)" in told


def test_another_disk_is_told_where_the_disk_is_the_limit():
    """By hand: half of 28 s; with a slow update its own seconds. Twin: another limit."""
    assert "With another such disk: 14 s." in machine.limit_of(rows(), 7e9, 16)
    told = machine.limit_of(rows(adam_split=0.35), 7e9, 16)
    assert "the limit is the disk" in told and "With another such disk: 20 s." in told
    assert "another" not in machine.limit_of(rows(), 7e9, 4096)


def test_a_dtype_without_fast_products_is_named():
    """Method: float32 20 times as fast as bfloat16. Twins: the other way round, and rows of another
    theme, of which nothing is said."""
    told = machine.limit_of(rows(products_bfloat16=5.0), 7e9, 4096)
    assert "(float32)" in told and "float32 are 20 times as fast as of bfloat16" in told
    assert "times as fast" not in machine.limit_of(rows(), 7e9, 4096)
    assert machine.limit_of([row("io.read", "GB/s", [1.0])], 7e9, 4096) == ""


def test_rounds_that_differ_say_nothing():
    """Twin: rounds that differ by a tenth give a range, by the ends of their interval; one odd
    round of twenty changes nothing."""
    steady, wide = ([rate] * 3 + [rate * times] * 2 for rate, times in ((4.0, 1.1), (4.0, 2.0)))
    others = [each for each in rows() if each.name != "machine.disk.both"]
    told = machine.limit_of([*others, row("machine.disk.both", "GB/s", steady)], 7e9, 16)
    assert "44.5 s to 49 s a step, the limit is the disk" in told
    told = machine.limit_of([*others, row("machine.disk.both", "GB/s", wide)], 7e9, 16)
    assert "not said: the interval of machine.disk.both is 67% wide" in told
    told = machine.limit_of([*others, row("machine.disk.both", "GB/s", [4.0])], 7e9, 16)
    assert "not said: machine.disk.both has 1 rounds of 5" in told
    odd = row("machine.disk.both", "GB/s", [4.0] * 19 + [0.1])
    assert "about 49 s a step" in machine.limit_of([*others, odd], 7e9, 16)


def test_without_a_theme_the_machine_is_measured(monkeypatch, capsys):
    """Claim: a line for each of three models. Twin: one of the size that was asked for."""
    monkeypatch.setattr(machine, "measure", lambda settings: Measured(rows()))
    assert main(["bench"]) == 0
    told = capsys.readouterr().out
    assert [line.partition(",")[0] for line in told.splitlines() if "a step" in line] == [
        *("1 B", "8 B", "70 B")
    ]
    wide = [*rows()[:-1], row("machine.disk.both", "GB/s", [1.0, 2.0, 3.0, 4.0, 5.0])]
    monkeypatch.setattr(machine, "measure", lambda settings: Measured(wide))
    assert main(["bench"]) == 0 and capsys.readouterr().out.count("is not said") == 1
    monkeypatch.setattr(machine, "measure", lambda settings: Measured(rows()))
    assert main(["bench", "--parameters", "14e9"]) == 0
    told = capsys.readouterr().out
    assert "\n14 B," in told and "\n8 B," not in told


QUICK = Settings(scale=0.01, rounds=2, seconds=0.01)


def steady_loop() -> machine.Loop:
    """Returns a loop that says it took a second in each turn."""
    return machine.Loop("steady", "GB/s", lambda: 1.0, lambda seconds: 1 / seconds)


def loops_of(part, settings=QUICK) -> tuple[list, list[str]]:
    """Returns the loops of a part after two turns, and its notes."""
    notes: list[str] = []
    with ExitStack() as stack:
        loops = list(part(settings, "cpu", stack, notes))
        for turn in range(2):
            for loop in loops:
                loop.take_turn(turn)
    return loops, notes


@pytest.mark.slow
def test_a_process_that_is_killed_ends_its_own_loop():
    """Method: one of two ranks is killed between two turns; the others go on, and that is noted."""
    with ExitStack() as stack:
        (loop,) = machine._messages(QUICK, "cpu", stack, [])
        loop.take_turn(0)
        loop.work.__self__._processes[1].kill()
        left = machine._take_turns([loop, steady_loop()], QUICK, notes := [])
    assert [each.name for each in left] == ["steady"] and "does not answer" in notes[0]


@pytest.mark.slow
def test_two_processes_send_messages():
    """Method: real processes that meet over gloo."""
    (found,), notes = loops_of(machine._messages)
    assert found.name == "machine.messages" and len(found.found) == 2 and min(found.found) > 0
    assert not notes


def test_processes_that_do_not_meet_are_noted(monkeypatch):
    """Method: a program in place of Python that ends at once."""
    monkeypatch.setattr(machine.sys, "executable", "/bin/false")
    with ExitStack() as stack:
        loops = [*machine._messages(QUICK, "cpu", stack, []), steady_loop()]
        left = machine._take_turns(loops, QUICK, notes := [])
    assert [each.name for each in left] == ["steady"] and len(left[0].found) >= 2
    assert "machine.messages: a process of its own has ended" in notes[0]


@pytest.mark.slow
def test_each_node_copies_by_its_own_processors(monkeypatch):
    """Method: this machine's processors as two nodes; a row of each. Twins: one node has no rows
    of its own, and a node whose processors are not ours."""
    allowed = sorted(os.sched_getaffinity(0))
    parts = [{allowed[0]}, {*allowed[1:]} or {allowed[0]}]
    for nodes, names in (
        (parts, ["machine.memory.copy.node0", "machine.memory.copy.node1"]),
        ([{*allowed}], []),
        ([parts[0], {100_000}], []),
    ):
        monkeypatch.setattr(machine.numa, "nodes", lambda nodes=nodes: nodes)
        found, _ = loops_of(machine._memory)
        assert [each.name for each in found if "node" in each.name] == names
        assert all(min(each.found) > 0 for each in found)


def test_a_ceiling_has_turns_before_and_after():
    """Method: notes of who runs; the order changes with each turn, and a loop that returns seconds
    is taken at its word."""
    ran = []
    loop = machine.Loop(
        *("x", "GB/s", lambda: ran.append("ours") or 0.5, lambda seconds: 1 / seconds),
        limit=lambda: ran.append("limit") or 0.25,
        limit_name="y",
    )
    for turn in range(2):
        loop.take_turn(turn)
    assert ran == ["ours", "limit", "limit", "ours"]
    made = loop.row()
    assert made.rounds == [2.0, 2.0] and made.share_of_ceiling == 0.5


def test_several_disks_are_measured_each_and_all_at_once(tmp_path):
    """Method: two folders; rows of both and of each, and a note that names them. Twin: one."""
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    one = replace(QUICK, folder=str(tmp_path / "a"))
    both = replace(one, other_folders=(str(tmp_path / "b"),))
    found, (note,) = loops_of(machine._disk, both)
    names = {each.name for each in found}
    large = {"read", "write", "both"}
    assert {f"machine.disk.{disk}{way}" for disk in ("", "1.", "2.") for way in large} <= names
    assert f"disk.2 is {tmp_path / 'b'}" in note
    found, notes = loops_of(machine._disk, one)
    assert not notes and not any(".1." in each.name for each in found)


def test_several_disks_are_of_the_machine_alone(tmp_path, capsys, monkeypatch):
    """Method: two folders that are said to be on two disks, for a theme that measures one."""
    places = {str(tmp_path): 1, ".": 2}
    as_told = SimpleNamespace(stat=lambda path: SimpleNamespace(st_dev=places[path]))
    monkeypatch.setattr(bench, "os", as_told)
    assert main(["bench", "io", "--folder", str(tmp_path), "--folder", "."]) == 2
    assert "several --folder are of `bench machine`" in capsys.readouterr().err


def test_a_block_size_is_better_only_with_confidence(monkeypatch):
    """Method: points around the engine's own block; the fastest is told. Twins: rounds that
    overlap, and the own block as the fastest."""
    profile = SimpleNamespace(block_nbytes=1 << 20, depth=64)
    monkeypatch.setattr(machine.disk_profile, "disk_profile", lambda folder: profile)

    def told(*rounds: list[float]) -> list[str]:
        sizes = ((1 << 20, 64), (4 << 20, 16))
        return machine._better(
            [
                {"kind": "auto", "way": "read", "block_nbytes": b, "depth": d, "rounds": each}
                for (b, d), each in zip(sizes, rounds)
            ],
            ".",
        )

    (note,) = told([1.0] * 10, [2.0] * 10)
    assert "4096 KiB, 16 in flight, are read 2.00 times as fast as of 1024 KiB, 64" in note
    assert told([1.0] * 10, [2.0, 1.0] * 5) == [], "the best of some rounds, and of no others"
    assert told([1.0, 1.0, 2.0, 2.0] * 3, [2.0, 2.0, 1.0, 1.0] * 3) == []
    assert told([2.0] * 10, [1.0] * 10) == [] and machine._better([], ".") == []
    assert told([1.0] * 5, [2.0] * 5) == [], "too few rounds"


def test_rows_can_be_chosen(tmp_path, capsys, monkeypatch):
    """Method: a part and a row; nothing else is measured or kept. Twins: a name that no row has,
    and a machine file, which needs all of them."""
    measured = []
    real = machine.Loop.take_turn

    def take_turn(loop: machine.Loop, turn: int) -> None:
        measured.append(loop.name)
        real(loop, turn)

    monkeypatch.setattr(machine.Loop, "take_turn", take_turn)
    quick = ["bench", "--scale", "0.01", "--rounds", "1", "--seconds", "0.01", "--json"]
    quick += ["--folder", str(tmp_path)]
    chosen = ["--only", "machine.products", "--only", "machine.adam.int8.1thread"]
    assert main([*quick, *chosen]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = [f"machine.products.{dtype}" for dtype in machine.DTYPES]
    assert [each["name"] for each in found["rows"]] == [*names, "machine.adam.int8.1thread"]
    assert {*measured} == {*names, "machine.adam.int8.1thread"} and found["settings"]["only"]
    assert main([*quick, "--only", "machine.product.s"]) == 2
    assert "no row's name begins so" in capsys.readouterr().err
    assert main([*quick, *chosen, "--machine-file", str(tmp_path / "m.toml")]) == 2


def test_an_interrupted_run_prints_what_it_has(tmp_path, capsys, monkeypatch):
    """Method: Ctrl-C in the third turn; the rows of two are printed and kept in the file."""
    turns = []

    def keep(self: machine.Loop, turn: int) -> None:
        turns.append(turn)
        if len(turns) > 4 * 3:  # four loops: to warm up, and two rounds
            raise KeyboardInterrupt
        self.found.append(1.0 + turn)
        self.limits.append(2.0)

    monkeypatch.setattr(machine.Loop, "take_turn", keep)
    file = tmp_path / "kept.json"
    given = ["--only", "machine.memory.copy", "--only", "machine.memory.triad", "--scale", "0.01"]
    status = main(["bench", *given, "--threads", "2", "--seconds", "9", "--save", str(file)])
    assert status == 130 and "machine.memory.triad.1thread" in capsys.readouterr().out
    kept = json.loads(file.read_text())
    assert [len(each["rounds"]) for each in kept["rows"]] == [2] * 4 and not kept["complete"]


def test_a_run_is_a_page(tmp_path, capsys):
    """Method: a tiny run; its page has each row, its curves, a roofline and the machine. Twins:
    somebody's own page stays, and a run without the roofline's rows has none."""
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    quick = ["bench", "--scale", "0.01", "--rounds", "1", "--seconds", "0.01", "--html", str(page)]
    quick += ["--folder", str(tmp_path)]
    page.write_text("mine")
    assert main([*quick, "--only", "machine.disk"]) == 2 and page.read_text() == "mine"
    page.unlink()
    assert main([*quick, "--only", "machine.disk"]) == 0
    assert "machine.roofline" not in page.read_text()
    chosen = [f"--only=machine.{part}" for part in ("products", "memory", "adam", "disk")]
    assert main([*quick, *chosen]) == 0
    told = page.read_text()
    for text in ("machine.roofline", "machine.disk.latency", "in flight", "moving the same bytes"):
        assert text in told, text
    assert told.count("<svg") == 4 and "huge pages" in told and "a quick look" in told


def test_a_machine_is_measured_and_planned(tmp_path, capsys, monkeypatch):
    """Method: a tiny run without the second process; every row is positive, the folder is as it
    was, and the machine file is read as those of the package are. Twin: somebody's own file
    stays."""
    monkeypatch.delitem(machine.PARTS, "messages")
    file, folder = tmp_path / "m.toml", tmp_path / "disk"
    folder.mkdir()
    quick = ["bench", "machine", "--json", "--scale", "0.01", "--rounds", "2", "--seconds", "0.01"]
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
    assert known.is_measured and not Machine.read("a100").is_measured
    assert known.disk_read == pytest.approx(names["machine.disk.read"] * 1e9, rel=1e-3)
    assert known.host_bandwidth == pytest.approx(names["machine.memory.copy"] * 1e9, rel=1e-3)
    assert "of 2 rounds" in file.read_text() and found["date"] in file.read_text()
