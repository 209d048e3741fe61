"""Disks are measured once, what is kept is checked, and the bytes go where the rates say."""

from __future__ import annotations

import fcntl
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity import native
from infinity.core.machine import disk_profile
from infinity.ext.rates.rates import disk_rates


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """A cache of its own, and a process that remembers nothing."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    forget = disk_profile.disk_profile.cache_clear
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """The folders that were measured, instead of measuring them."""
    folders = []

    def measure(folder: str, kind: str) -> disk_profile.DiskProfile:
        folders.append(folder)
        return disk_profile.DiskProfile(3e9, 2e9, 2.5e9, 4 * disk_profile.MIB, 16)

    monkeypatch.setattr(disk_profile, "_measure", measure)
    return folders


def test_a_disk_is_measured_once_and_kept(tmp_path, measured, cache_folder):
    """Method: ask in one process, forget, ask again; the second answer comes from the file. Another
    identity, or no file, is measured anew."""
    first = disk_profile.disk_profile(str(tmp_path))
    disk_profile.disk_profile.cache_clear()
    assert disk_profile.disk_profile(str(tmp_path)) == first and len(measured) == 1
    assert [one for one in os.listdir(cache_folder)] == ["disks.json"]
    os.remove(cache_folder / "disks.json")
    disk_profile.disk_profile.cache_clear()
    assert disk_profile.disk_profile(str(tmp_path)) == first and len(measured) == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "7", '{"a": 1}', '{"a": {"read_rate": 1}}', "\x00", "[" * 100000],
)
def test_a_damaged_cache_is_measured_anew_and_replaced(tmp_path, measured, cache_folder, text):
    cache_folder.mkdir()
    (cache_folder / "disks.json").write_text(text)
    assert disk_profile.disk_profile(str(tmp_path)).depth == 16 and len(measured) == 1
    assert json.loads((cache_folder / "disks.json").read_text())


NUMBERS = st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none(), st.booleans())


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    entry=st.fixed_dictionaries(
        {
            name: NUMBERS
            for name in ("read_rate", "write_rate", "mixed_rate", "block_nbytes", "depth")
        }
    )
)
def test_no_content_of_the_cache_gets_through_unchecked(tmp_path, measured, cache_folder, entry):
    """Method: any numbers under the right names; what is used is one that a disk could have."""
    cache_folder.mkdir(exist_ok=True)
    key = f"{disk_profile.Disk(str(tmp_path)).device} {native.io_kind()}"
    (cache_folder / "disks.json").write_text(json.dumps({key: entry}))
    disk_profile.disk_profile.cache_clear()
    profile = disk_profile.disk_profile(str(tmp_path))
    assert (profile.block_nbytes, profile.depth) in disk_profile.SETTINGS
    assert min(profile.read_rate, profile.write_rate, profile.mixed_rate) > 0


def test_a_real_measurement_gives_rates_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_profile, "SETTINGS", disk_profile.SETTINGS[:1])
    folder = tmp_path / "disk"
    folder.mkdir()
    profile = disk_profile.disk_profile(str(folder))
    assert min(profile.read_rate, profile.write_rate, profile.mixed_rate) > 1e6
    assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_measured_gets_a_guess_that_is_not_kept(
    tmp_path, monkeypatch, cache_folder
):
    def refuse(folder: str, kind: str) -> disk_profile.DiskProfile:
        raise PermissionError(13, "no", folder)

    monkeypatch.setattr(disk_profile, "_measure", refuse)
    assert disk_profile.disk_profile(str(tmp_path)) == disk_profile.GUESS
    assert not cache_folder.exists()


def test_a_user_without_a_home_can_still_use_a_disk(tmp_path, measured, monkeypatch):
    """Method: no INFINITY_CACHE, no HOME, and a name that expands to nothing; the disk is measured
    and nothing kept."""
    for name in ("INFINITY_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert disk_profile.disk_profile(str(tmp_path)).depth == 16
    assert os.listdir(tmp_path) == []


def test_ranks_of_one_machine_measure_a_disk_once(tmp_path, monkeypatch, cache_folder):
    """Method: four ask at once, in threads, which locks of files tell apart like processes; one
    measures. The twin: where nothing can be kept, each measures, one after the other."""
    under_way, most = [], []

    def measure(folder: str, kind: str) -> disk_profile.DiskProfile:
        under_way.append(folder)
        most.append(len(under_way))
        time.sleep(0.05)
        under_way.pop()
        return disk_profile.DiskProfile(3e9, 2e9, 2.5e9)

    monkeypatch.setattr(disk_profile, "_measure", measure)
    ask = disk_profile.disk_profile.__wrapped__
    (tmp_path / "file").touch()
    for cache, count in ((cache_folder, 1), (tmp_path / "file" / "no folder", 4)):
        monkeypatch.setenv("INFINITY_CACHE", str(cache))
        most.clear()
        with ThreadPoolExecutor(4) as threads:
            assert {profile.read_rate for profile in threads.map(ask, [str(tmp_path)] * 4)} == {3e9}
        assert most == [1] * count


def test_a_folder_that_somebody_keeps_locked_is_measured_all_the_same(
    tmp_path, measured, monkeypatch
):
    """Method: as under `flock FOLDER python ...`, the lock is another descriptor's for as long as
    the job runs. The twin: one that is let go meanwhile is waited for."""
    monkeypatch.setattr(disk_profile, "WAIT_SECONDS", 0.1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as threads:
            try:
                asked = threads.submit(disk_profile.disk_profile, str(tmp_path))
                assert asked.result(timeout=280).read_rate == 3e9 and len(measured) == 1
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        disk_profile.disk_profile.cache_clear()
        monkeypatch.setattr(disk_profile, "WAIT_SECONDS", 3600.0)
        monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(descriptor, fcntl.LOCK_UN))
        (tmp_path / "cache" / "disks.json").unlink()
        assert disk_profile.disk_profile(str(tmp_path)).read_rate == 3e9 and len(measured) == 2
    finally:
        os.close(descriptor)


def test_the_rate_of_a_device_counts_once(tmp_path, monkeypatch):
    """Method: three folders, two of them on partitions of one disk."""
    folders = [str(tmp_path / name) for name in ("slow", "fast", "slow-too")]
    rate = {"slow": 1e9, "fast": 3e9}
    device = lambda folder: os.path.basename(folder).removesuffix("-too")
    monkeypatch.setattr(disk_profile, "Disk", lambda folder: SimpleNamespace(disks=device(folder)))
    monkeypatch.setattr(
        disk_profile,
        "disk_profile",
        lambda folder: disk_profile.DiskProfile(*[rate[device(folder)]] * 3),
    )
    assert disk_rates(folders) == (4e9, 4e9, 4e9)


def test_partitions_and_volumes_on_one_disk_are_one_device(tmp_path, monkeypatch):
    """Method: a tree as the kernel shows it in /sys: two partitions of nvme0n1, one of nvme1n1, and
    a logical volume over a partition of each; the names below them are those of the whole disks."""
    for disk in ("nvme0n1", "nvme1n1", "dm-0"):
        (tmp_path / disk / "queue").mkdir(parents=True)
    for part in ("nvme0n1/nvme0n1p1", "nvme0n1/nvme0n1p2", "nvme1n1/nvme1n1p1"):
        (tmp_path / part).mkdir()
    (tmp_path / "dm-0" / "slaves").mkdir()
    for part in ("nvme0n1/nvme0n1p2", "nvme1n1/nvme1n1p1"):
        (tmp_path / "dm-0" / "slaves" / part.split("/")[1]).symlink_to(tmp_path / part)
    found = {}
    for entry in ("nvme0n1/nvme0n1p1", "nvme0n1/nvme0n1p2", "nvme1n1/nvme1n1p1", "dm-0"):
        monkeypatch.setattr(
            disk_profile, "_block_device", lambda system, entry=entry: tmp_path / entry
        )
        found[entry] = disk_profile.Disk(str(tmp_path)).disks
    assert list(found.values()) == ["nvme0n1", "nvme0n1", "nvme1n1", "nvme0n1 nvme1n1"]


def test_memory_that_is_given_as_a_disk_is_said(tmp_path, caplog):
    """Method: a wrap with a folder on tmpfs, and one on the disk of this test."""
    import infinity
    from infinity.core.machine.disk_profile import IN_MEMORY, file_system

    shm = Path("/dev/shm")
    if not shm.is_dir() or file_system(str(shm)) != "tmpfs":
        pytest.skip("no tmpfs here")
    for folder, warned in ((shm, True), (tmp_path, file_system(str(tmp_path)) in IN_MEMORY)):
        caplog.clear()
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        with caplog.at_level("WARNING", "infinity"):
            infinity.wrap_model(
                model,
                torch.optim.AdamW(model.parameters()),
                {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(folder)]},
            )
        assert any("which is memory" in record.getMessage() for record in caplog.records) == warned
