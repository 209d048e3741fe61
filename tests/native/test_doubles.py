"""The doubles of disks: in a checkout that is built in place, and in nothing that users get."""

from __future__ import annotations

import runpy
import sys
import tarfile
import zipfile
from pathlib import Path
from unittest import mock

import doubles
import pytest
from native_arrays import MIB, Disk, Staging
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

import infinity
from infinity import native
from infinity.core.machine import disk_profile

ROOT = Path(__file__).parents[2]
PIECE = 16 * 4096  # bytes: a checksum block
MODULE = "tests.support.disks.doubles._native"
no_doubles = runpy.run_path(str(ROOT / "tools" / "no_doubles.py"))


def built(**options: bool) -> set[str]:
    """The extension modules that a build with these options of `build_ext` makes. Nothing is
    built."""
    with mock.patch("setuptools.setup") as setup, mock.patch.dict("os.environ", INFINITY_CUDA="0"):
        runpy.run_path(str(ROOT / "setup.py"))
    given = setup.call_args.kwargs
    command = given["cmdclass"]["build_ext"](Distribution({"ext_modules": given["ext_modules"]}))
    command.inplace = options.get("inplace", False)
    command.finalize_options()
    command.editable_mode = options.get(
        "editable_mode", False
    )  # as pip does: after the options are final
    with mock.patch.object(build_ext, "run"):
        command.run()
    return {extension.name for extension in command.extensions}


def test_a_wheel_is_built_without_doubles_and_a_checkout_with_them():
    """Asks setup.py for the modules of a wheel; the twins are the builds of a checkout."""
    assert built() == {"infinity._C"}
    assert built(inplace=True) == built(editable_mode=True) == {"infinity._C", MODULE}


def test_the_package_has_no_double_and_reads_none_of_their_variables():
    """Looks for their names in every file of the package, the compiled core too; the doubles' own
    module is the twin."""
    found = {
        path.name: path.read_bytes()
        for path in Path(infinity.__file__).parent.rglob("*")
        if path.suffix in (".py", ".pyi")
    }
    found["_C"] = Path(native._C.__file__).read_bytes()
    assert not {
        name
        for name, content in found.items()
        if any(each in content for each in no_doubles["BYTES"])
    }
    assert b"FaultyBackend" in Path(sys.modules["doubles._native"].__file__).read_bytes()


def test_a_double_in_a_package_is_found(tmp_path):
    """Packs files that are doubles, or have one in them, into a wheel and a source distribution;
    the twin is clean."""
    files = {
        "infinity/faulty.cpp": b"",
        "infinity/_C.so": b"\0N8infinity13FaultyBackendE\0",
        "infinity/a.py": b"pass",
        "B.md": b"INFINITY_FAULTS",
    }
    with (
        zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel,
        tarfile.open(tmp_path / "a.tar.gz", "w:gz") as source,
    ):
        for name, content in files.items():
            wheel.writestr(name, content)
            (tmp_path / "file").write_bytes(content)
            source.add(tmp_path / "file", name)
    with zipfile.ZipFile(tmp_path / "clean.whl", "w") as wheel:
        wheel.writestr("infinity/a.py", b"pass")
    for name in ("a.whl", "a.tar.gz"):
        assert no_doubles["doubles_in"](tmp_path / name) == [
            "infinity/faulty.cpp",
            "infinity/_C.so",
        ]
    assert not no_doubles["doubles_in"](tmp_path / "clean.whl")


def test_engines_use_the_doubles_that_are_installed_and_no_others(tmp_path, monkeypatch):
    """Describes a modelled disk and faults in the environment: with the machine's own disks
    installed nothing of it is read."""
    model = tmp_path / "model.json"
    model.write_text(f'{{"{tmp_path}": 1e9}}')
    monkeypatch.setenv("INFINITY_MODEL_DISKS", str(model))
    monkeypatch.setenv("INFINITY_FAULTS", "eio=1.0")
    assert disk_profile.Disk(str(tmp_path)).device == f"model {tmp_path}"
    engine = native.make_io_engine(layer=native.disks.state_layer())
    assert engine.device(engine.create_swap_file(str(tmp_path), MIB)) == f"model {tmp_path}"
    monkeypatch.setattr(native, "disks", native.Disks())
    assert disk_profile.Disk(str(tmp_path)).device != f"model {tmp_path}"
    assert native.disks.state_layer() is None
    engine = native.make_io_engine()
    assert not engine.device(engine.create_swap_file(str(tmp_path), MIB)).startswith("model")


@pytest.mark.parametrize("limit", [1, 4])
def test_an_engine_takes_so_many_pieces_and_no_more(tmp_path, limit):
    """Fills an engine with transfers that wait for a ticket of Python's, then submits one piece
    more: refused with the numbers, and nothing changed. Room comes back in time for whoever waited
    for a transfer. A submission that could never fit is refused as well.
    """
    disk = Disk(tmp_path, block_nbytes=PIECE, max_pieces=limit)
    extent, staging = disk.extent(MIB), Staging(MIB)
    for _ in range(20):
        before = native.Ticket(1)
        ticket = disk.engine.read(extent, 0, staging.address, limit * PIECE, after=before)
        for after in (None, before):
            with pytest.raises(
                infinity.UsageError,
                match=f"a submission of 1 pieces .* beside {limit} that .* takes {limit} at most",
            ):
                disk.engine.read(extent, 0, staging.address, PIECE, after=after)
        before.part_done()
        ticket.wait()
    with pytest.raises(
        infinity.UsageError, match=f"a submission of {limit + 1} pieces .* beside 0"
    ):
        disk.engine.write(extent, 0, staging.address, (limit + 1) * PIECE)


def test_pieces_that_fail_are_cancelled_or_never_start_give_their_room_back(tmp_path):
    """Fills an engine of eight pieces with transfers behind one that fails, then with cancelled
    ones, again and again."""
    failing = Disk(tmp_path, faults=doubles.fault_plan(eio=1.0), block_nbytes=PIECE, max_pieces=8)
    extent, staging = failing.extent(MIB), Staging(MIB)
    for _ in range(4):
        first = failing.engine.read(extent, 0, staging.address, 4 * PIECE)
        behind = failing.engine.read(extent, 0, staging.address, 4 * PIECE, after=first)
        for ticket in (first, behind):
            with pytest.raises(infinity.StorageError):
                ticket.wait()
    late = Disk(
        tmp_path,
        faults=doubles.fault_plan(delay=1.0, delay_seconds=0.02),
        block_nbytes=PIECE,
        depth=1,
        max_pieces=8,
    )
    extent = late.extent(MIB)
    for _ in range(4):
        ticket = late.engine.read(extent, 0, staging.address, 8 * PIECE)
        late.engine.cancel(ticket)
        with pytest.raises(infinity.StorageError, match="cancelled"):
            ticket.wait()
