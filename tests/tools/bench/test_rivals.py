"""bench's rivals: the table, an environment for each, turns with ours, and their tuning.

No test needs a network: environments and programs of rivals are doubles.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench.__main__ as checkout
from bench import loops, rivals
from bench.rivals import command, deepspeed_aio, environments, table, tuning
from bench.rivals.environments import python_of
from bench.rivals.table import Rival
from bench.rivals.tuning import Tuned
from infinity.errors import ConfigError, UsageError
from infinity.tools.bench.settings import Settings

SWEEP = '[sweep]\nsizes = ["tiny"]\ntokens = [256]\nhomes = ["host", "device"]\nranks = [1]\n'

# A double of Python: it makes environments that are doubles too, whose pip says PIP
PYTHON = """#!/bin/sh
echo "$@" >> {asked}
case "$*" in
*venv*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
*pip*) {pip};;
*bench.job*) echo '{{"tokens_per_second": 50.0, "peak_nbytes": 1073741824}}';;
*) echo 'it is no program' >&2; exit 3;;
esac
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Puts a double in place of this Python for new environments. Returns a function that sets
    what its pip does, and the file of what was asked."""
    double, asked = tmp_path / "double", tmp_path / "asked"

    def pip(does: str) -> Path:
        double.write_text(PYTHON.format(asked=asked, pip=does))
        double.chmod(0o755)
        asked.write_text("")
        return asked

    monkeypatch.setattr(environments, "MAKER", str(double))
    monkeypatch.setattr(environments, "FOLDER", tmp_path / "rivals")
    return pip


def a_table(folder: Path, text: str) -> Path:
    """Writes a table of rivals below a sweep of the tiny model."""
    path = folder / "rivals.toml"
    path.write_text(SWEEP + text)
    return path


def test_the_table_names_every_rival_with_its_pins():
    """Method: the committed table; each rival has pinned packages, a command or the reason why
    there is neither."""
    found = table.read().rivals
    asked = "fio torch deepspeed bitsandbytes ramtorch torchao trainstream unsloth flextrain"
    assert {*asked.split(), "megatrain"} == {*found}
    assert "deepspeed==0.19.8" in found["deepspeed"].packages
    for name, rival in found.items():
        assert rival.packages or rival.command or rival.absent
        assert not rival.packages or any(name in pin for pin in rival.packages)
    of = {"deepspeed_nvme": "deepspeed", "fsdp2": "torch", "infinity_host": "", "compute": ""}
    assert {system: table.rival_of(system) for system in of} == of


@pytest.mark.parametrize(
    "text, tells",
    [
        ('[rivals.x]\npackages = ["x"]', "rivals.x.packages: 'x' is not pinned"),
        ('[rivals.x]\npackages = ["x>=1"]', "'x>=1' is not pinned"),
        ("[rivals.x]\npackages = [3]", "3 is not pinned"),
        ('[rivals.x]\npackages = "x==1"', "rivals.x.packages: 'x==1' is not of the right kind"),
        ("[rivals.x]", "rivals.x: give one of packages, command and absent"),
        ('[rivals.x]\ncommand = "x"\nabsent = "y"', "give one of"),
        ('[rivals.x]\ncommand = "x"\nneeds = "tpu"', "rivals.x.needs"),
        ('[rivals.x]\ncommand = "x"\nsystem = []', "rivals.x: 'system' is none of"),
        ('[rivals.x]\ncommand = "x"\nsystems = { y = "host" }', "rivals.x.systems: 'y'"),
        ('[rivals.x]\ncommand = "x"\nsystems = { plain = "moon" }', "'moon' is none of device"),
        ('[rivals.x]\ncommand = "x"\nranks = ["plain"]', "rivals.x.ranks: 'plain'"),
        ("[rivals]\nx = 3", "rivals.x: give a table"),
        ("[rivals", "is no table of rivals"),
    ],
)
def test_an_entry_that_cannot_be_run_is_refused_by_name(text, tells, tmp_path):
    """Twin: the table without it is read."""
    with pytest.raises(ConfigError) as refused:
        table.read(a_table(tmp_path, text))
    assert tells in str(refused.value) and "rivals.toml" in str(refused.value)
    (tmp_path / "twin").mkdir()
    assert table.read(a_table(tmp_path / "twin", '[rivals.x]\npackages = ["x==1"]')).rivals


@pytest.mark.parametrize(
    "sweep, tells",
    [
        (SWEEP.replace("256", "100"), "sweep.tokens: 100 is no multiple of 256"),
        (SWEEP.replace("[1]", "[0]"), "sweep.ranks: 0"),
        (SWEEP.replace("tiny", "9T"), "sweep.sizes: '9T' is none of"),
        (SWEEP.replace("ranks = [1]\n", ""), "sweep: missing 1 required"),
        ("", "sweep: give a table"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused(sweep, tells, tmp_path):
    path = tmp_path / "rivals.toml"
    path.write_text(sweep)
    with pytest.raises(ConfigError) as refused:
        table.read(path)
    assert tells in str(refused.value)


def test_an_environment_is_made_once_for_its_pins(python, tmp_path):
    """Method: a double of Python counts calls; the same pins ask nothing. Twin: other pins make
    the environment anew."""
    asked, rival = python("exit 0"), Rival(packages=["x==1", "y==2"])
    made = python_of("x", rival)
    assert made == tmp_path / "rivals" / "x" / "bin" / "python"
    first = asked.read_text()
    assert "-m venv" in first and "x==1 y==2" in first and "system-site" not in first
    assert python_of("x", rival) == made and asked.read_text() == first
    assert python_of("x", Rival(packages=["x==2"])) == made
    assert "x==2" in asked.read_text().removeprefix(first)


def test_what_cannot_be_installed_says_why(python, tmp_path, monkeypatch):
    """Method: pip that fails, one without end, a package that there is not, a card and a command
    that this machine lacks. Twin: pip that succeeds, after it has failed."""
    python('echo "ERROR: No matching x==1" >&2; echo hint >&2; exit 1')
    rival = Rival(packages=["x==1"])
    assert python_of("x", rival) == "not installed (ERROR: No matching x==1)"
    assert not (tmp_path / "rivals" / "x").exists()
    python("exec sleep 10")
    assert python_of("x", rival, seconds=0.3) == "not installed (no end within 0 s)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    card = Rival(packages=["x==1"], needs="cuda")
    assert python_of("x", card) == "needs a GPU with CUDA"
    assert python_of("x", Rival(absent="no such package")) == "no such package"
    gone = Rival(command="no-such-command", install="apt install it")
    assert python_of("x", gone) == "not installed (apt install it)"
    python("exit 0")
    assert isinstance(python_of("x", rival), Path) and isinstance(
        python_of("x", Rival(command="sh")), Path
    )


def test_a_rival_takes_turns_with_ours_and_an_absent_one_is_noted(
    python, tmp_path, monkeypatch, capsys
):
    """Method: a rival's program that is a double takes turns with a double of ours, twice as fast;
    another's pip fails. The file has the rows, the ratio of every round, and both reasons. Twin: a
    program that fails is a note too, and leaves no ratio."""
    asked = python('case "$*" in *bad==1*) echo ERROR: none >&2; exit 1;; esac')
    text = """
    [rivals.good]
    packages = ["good==1"]
    systems = { plain = "host" }
    [rivals.bad]
    packages = ["bad==1"]
    systems = { fsdp2 = "host" }
    [rivals.none]
    absent = "nowhere"
    [rivals.broken]
    packages = ["broken==1"]
    systems = { bitsandbytes = "device" }
    """
    ours = tmp_path / "ours"
    ours.write_text('#!/bin/sh\necho \'{"tokens_per_second": 100.0, "peak_nbytes": 2}\'\n')
    ours.chmod(0o755)
    given = ["rivals", "--table", str(a_table(tmp_path, text)), "--rounds", "2"]
    given += ["--folder", str(tmp_path), "--save", str(tmp_path / "kept")]
    monkeypatch.setattr(sys, "executable", str(ours))
    made = environments.python_of

    def broken(name, rival):
        python = made(name, rival)
        if name == "broken":
            python.write_text("#!/bin/sh\necho it breaks >&2; exit 3\n")
        return python

    monkeypatch.setattr(command, "python_of", broken)
    assert checkout.main(given) == 0
    (file,) = (tmp_path / "kept").iterdir()
    found = json.loads(file.read_text())
    row = next(row for row in found["rows"] if row["name"] == "rivals.tiny.256.1.infinity_host")
    assert row["ratios"] == {"plain": 2.0} and row["ratio_rounds"] == {"plain": [2.0, 2.0]}
    assert found["rivals"]["good"] == {"packages": ["good==1"]}
    assert found["rivals"]["bad"]["absent"] == "not installed (ERROR: none)"
    notes = "\n".join(found["notes"])
    assert "rivals.none: nowhere" in notes and "rivals.bad: not installed" in notes
    assert "bitsandbytes does not run here (it breaks)" in notes and found["complete"]
    assert asked.read_text().count("bench.job plain --size tiny") == 2
    assert "2.00 x plain" in capsys.readouterr().out


def test_an_environment_is_listed_without_being_made(python, tmp_path, capsys):
    """Twin: an unknown name is refused with the known ones."""
    asked = python("exit 0")
    path = a_table(tmp_path, '[rivals.x]\npackages = ["x==1"]\n[rivals.y]\nabsent = "nowhere"')
    assert checkout.main(["rivals", "--list", "--table", str(path)]) == 0
    told = capsys.readouterr().out
    assert "environment not made yet" in told and "nowhere" in told and not asked.read_text()
    assert checkout.main(["rivals", "--only", "z", "--table", str(path)]) == 2
    assert "--only z is no rival: choose from x, y" in capsys.readouterr().err


def test_a_theme_runs_beside_a_rival_in_its_environment(tmp_path, monkeypatch):
    """Method: a double of the theme's process; its rows with a ratio to the rival are taken. Twin:
    a process that fails is a note."""
    row = {"name": "io.read", "unit": "GB/s", "median": 2.0, "low": 2.0, "high": 2.0}
    rows = [row | {"ratios": {"x": 1.5}}, row | {"name": "io.other", "ratios": {}}]
    told = {"rows": rows, "notes": ["x: slow", "y: gone"], "rivals": {"x": {"version": "1"}}}
    (tmp_path / "told").write_text(json.dumps(told))
    double = tmp_path / "python"
    double.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked; cat {tmp_path}/told\n')
    double.chmod(0o755)
    found = command._theme("x", "io", str(double), Settings(folder=str(tmp_path), rounds=2))
    assert [each.name for each in found.rows] == ["rivals.x.io.read"]
    assert found.notes == ["rivals.x.io: x: slow"] and found.rivals == {"x.io": {"version": "1"}}
    assert "-m bench io --rivals x --json --rounds 2" in (tmp_path / "asked").read_text()
    double.write_text("#!/bin/sh\necho no module >&2; exit 1\n")
    found = command._theme("x", "io", str(double), Settings(folder=str(tmp_path)))
    assert found.notes == ["rivals.x.io: does not run here (no module)"] and not found.rows


@pytest.mark.parametrize(
    "given, disks, optimizers",
    [
        (True, ["fio", "deepspeed"], ["deepspeed", "torch"]),
        (False, [], []),
        (["fio", "torch"], ["fio"], ["torch"]),
        (["deepspeed"], ["deepspeed"], ["deepspeed"]),
    ],
)
def test_only_the_rivals_that_are_named_are_measured(given, disks, optimizers):
    settings = Settings(rivals=given)
    assert [each.NAME for each in rivals.of_disks(settings)] == disks
    assert [each.NAME for each in rivals.of_optimizers(settings)] == optimizers


def test_rivals_are_named_on_the_command_line(monkeypatch, tmp_path, capsys):
    """Method: a theme that keeps its settings. Twins: an unknown name, and both options at once."""
    seen: list[Settings] = []

    def measure(settings):
        seen.append(settings)
        return SimpleNamespace(rows=[], notes=[], series={}, rivals={})

    monkeypatch.setattr(loops, "measure_io", measure)
    place = ["--folder", str(tmp_path)]
    assert checkout.main(["io", "--rivals", "fio,torch", "--retune", *place]) == 0
    assert seen[0].rivals == ["fio", "torch"] and seen[0].retune
    assert seen[0].kept()["rivals"] == ["fio", "torch"]
    assert checkout.main(["io", "--no-rivals", *place]) == 0 and seen[1].rivals is False
    assert checkout.main(["io", *place]) == 0 and seen[2].rivals is True and not seen[2].retune
    capsys.readouterr()
    assert checkout.main(["io", "--rivals", "fio,moon", *place]) == 2 and len(seen) == 3
    assert "--rivals moon is no rival: choose from fio, torch" in capsys.readouterr().err
    assert checkout.main(["io", "--rivals", "fio", "--no-rivals", *place]) == 2
    assert UsageError.__name__ and "not allowed with" in capsys.readouterr().err


class Handle:
    """A double of DeepSpeed's handle, which counts what it moves."""

    moved: dict[tuple, list[int]]

    def __init__(self, *setting):
        self.counts, self.started = self.moved.setdefault(setting, []), 0

    def new_cpu_locked_tensor(self, size, template):
        return torch.empty(size, dtype=torch.uint8)

    def async_pread(self, part, path, offset):
        self.counts.append(part.numel())
        self.started += 1

    def wait(self):
        started, self.started = self.started, 0
        return started


@pytest.fixture
def aio(tmp_path, monkeypatch):
    """Returns a function that reads a file with a new DeepSpeed of doubles, and how many times
    settings were tried."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    disk = {"device": "disk one"}
    monkeypatch.setattr(tuning, "Disk", lambda folder: SimpleNamespace(**disk))

    def read(nbytes: int = 1000, *, version: str = "1", retune: bool = False, device="disk one"):
        disk["device"] = device
        Handle.moved = {}
        module = SimpleNamespace(aio_handle=Handle)
        path = str(tmp_path / "file")
        made = deepspeed_aio.DeepSpeedAio(module, path, nbytes, version=version, retune=retune)
        made.run("read")
        return made.told(), sum(map(len, Handle.moved.values()))

    return read


RUN, TRIALS = 2, 64 * tuning.TRIALS  # moves of a run of two buffers; of a sweep


def test_deepspeed_is_tuned_by_its_own_sweep(aio):
    """Method: all 64 settings of its sweep have three trials of one buffer, then a run moves the
    whole file with one of them."""
    told, moves = aio()
    assert len(Handle.moved) == 64 and moves == TRIALS + RUN
    assert sorted(map(sum, Handle.moved.values()))[:63] == [1500] * 63
    assert {setting[2:4] for setting in Handle.moved} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert len(told["trials"]["read"]) == 64 and told["from_cache"] == {}


def test_the_best_setting_is_kept_for_a_disk_and_a_version(aio, tmp_path):
    """Method: a second run tries nothing and tells the date. Twins: another disk, version or size,
    --retune, and a damaged file try all settings again."""
    first, _ = aio()
    told, moves = aio()
    assert moves == RUN and told["chosen"] == first["chosen"] and not told["trials"]
    assert told["from_cache"]["read"][:2] == "20"
    for other in ({"device": "disk two"}, {"version": "2"}, {"nbytes": 1002}, {"retune": True}):
        told, moves = aio(**other)
        assert moves == TRIALS + RUN and told["from_cache"] == {}, other
    kept = tmp_path / "cache" / tuning.KEPT
    assert len(json.loads(kept.read_text())) == 4
    for damaged in ("[]", "{", '{"a": 3}', json.dumps(_with_best(kept, "(1, 2)"))):
        kept.write_text(damaged)
        assert aio()[1] == TRIALS + RUN, damaged


def _with_best(kept: Path, best: str) -> dict:
    return {
        key: {way: {"best": best, "date": "2026-01-01"} for way in ways}
        for key, ways in json.loads(kept.read_text()).items()
    }


def test_nothing_is_kept_without_a_key(aio, tmp_path):
    """Method: fio's few settings, which are tried in every run."""
    Tuned("x", [1, 2]).of("read", lambda setting: 1.0)
    assert not os.path.exists(tmp_path / "cache" / tuning.KEPT)
