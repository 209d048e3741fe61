"""Scratch folders: customary ones on disks, each disk once; never memory, never a network, never
one that cannot be written."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from infinity.core.machine import disk_profile, scratch
from infinity.core.machine.scratch import Candidate

GIB = 1024**3


@pytest.fixture
def nothing_named(monkeypatch, tmp_path):
    """No variable names a folder; the current one is on the disk of the test."""
    for name in (scratch.VARIABLE, *scratch.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(scratch, "CUSTOMARY", ())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_disk_is_looked_at_once(nothing_named, monkeypatch):
    """Method: the temporary, the cache and the current folder, all on one disk: the first of them
    is the candidate."""
    monkeypatch.setenv("INFINITY_CACHE", str(nothing_named))
    (found,) = scratch.candidates()
    assert found.folder == str(nothing_named) and not found.refusal and found.usable_nbytes > 0
    assert not list(nothing_named.iterdir())


def test_folders_on_two_disks_are_both_candidates(nothing_named, monkeypatch):
    (nothing_named / "other").mkdir()
    monkeypatch.setenv("TMPDIR", str(nothing_named / "other"))
    monkeypatch.setattr(
        disk_profile,
        "Disk",
        lambda folder: SimpleNamespace(device="b" if folder.endswith("other") else "a"),
    )
    assert [os.path.basename(found.folder) for found in scratch.candidates()] == [
        "other",
        nothing_named.name,
    ]


def test_a_named_folder_is_the_only_one(nothing_named, monkeypatch):
    monkeypatch.setenv(scratch.VARIABLE, str(nothing_named / "gone"))
    (found,) = scratch.candidates()
    assert found.refusal == "is no folder" and scratch.choose([found], 0) is None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("tmpfs", "memory"),
        ("nfs4", "other machines"),
        ("fuse.sshfs", "other machines"),
        ("ext4", ""),
    ],
)
def test_memory_and_networks_are_refused(kind, said, nothing_named, monkeypatch):
    """Method: the folder's file system is said to be of each kind; a disk's is not refused."""
    monkeypatch.setattr(disk_profile, "file_system", lambda folder: kind)
    found = scratch.candidates()[0]
    assert said in found.refusal and bool(found.refusal) == bool(said)


def test_a_folder_that_cannot_be_written_is_refused(nothing_named, monkeypatch):
    monkeypatch.setattr(
        "tempfile.TemporaryFile",
        lambda dir: (_ for _ in ()).throw(PermissionError(13, "Permission denied")),
    )
    assert "Permission denied" in scratch.candidates()[0].refusal


def test_a_part_of_the_disk_is_left(nothing_named, monkeypatch):
    """A tenth of a small disk, 16 GiB of a large one."""
    for free, usable in ((10 * GIB, 9 * GIB), (1000 * GIB, 984 * GIB)):
        monkeypatch.setattr(
            "shutil.disk_usage", lambda folder, free=free: type("Usage", (), {"free": free})
        )
        assert scratch.candidates()[0].usable_nbytes == usable


def test_the_fastest_disk_with_room_is_chosen(monkeypatch):
    """Method: three disks with said rates; the fastest has too little room. Without room for all,
    the roomiest is taken, unmeasured."""
    rates = {"fast": 9e9, "middle": 5e9, "slow": 1e9}
    measured = []

    def profile(folder):
        measured.append(folder)
        return disk_profile.DiskProfile(1.0, 1.0, rates[folder])

    monkeypatch.setattr(disk_profile, "disk_profile", profile)
    found = [
        Candidate("fast", 1),
        Candidate("slow", 100),
        Candidate("middle", 10),
        Candidate("bad", 1000, "is a file"),
    ]
    assert scratch.choose(found, 5).folder == "middle" and "fast" not in measured
    measured.clear()
    assert (
        scratch.choose(found, 50).folder == "slow"
        and scratch.choose(found, 500).folder == "slow"
        and not measured
    )
    assert scratch.choose(found[3:], 0) is None
