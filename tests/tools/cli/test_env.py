"""``infinity env`` says what was found and chosen, and what to do where it is worse than it could
be."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from native_arrays import outcome_in_child

import infinity
from infinity import native
from infinity.core.machine import disk_profile
from infinity.ext.gpu_direct import direct_storage
from infinity.tools import cli
from infinity.tools.cli import env

NAMES = {
    "infinity",
    "inside torch",
    "python",
    "simd",
    "io",
    "fixed buffers",
    "huge pages",
    "huge pages, shared",
    "cuda",
    "memory",
}
OF_A_GPU = {"cuda driver", "cuda kernels", "gpudirect storage"}


def findings(capsys, *more: str) -> dict:
    assert cli.main(["env", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_choice_is_named(capsys, tmp_path):
    # Method: the JSON has an entry for everything that the engine chooses, and one per folder.
    found = findings(capsys, "--nvme-path", str(tmp_path))
    names = NAMES | (set() if found["cuda"]["value"].startswith("no GPU") else OF_A_GPU)
    assert set(found) == names | {f"disk {tmp_path}"}
    assert native.simd_unit() in found["simd"]["value"]


def test_a_lesser_choice_comes_with_its_remedy(capsys, monkeypatch, tmp_path):
    # Method: choose the scalar unit and the thread engine by environment; the report says how to
    # get the better ones.
    monkeypatch.setenv("INFINITY_SIMD", "scalar")
    monkeypatch.setenv("INFINITY_IO", "threads")
    found = findings(capsys, "--nvme-path", str(tmp_path))
    assert found["simd"]["value"].startswith("scalar") and found["io"]["value"].startswith(
        "threads"
    )
    if len(native.simd_units()) > 1:
        assert "INFINITY_SIMD" in found["simd"]["remedy"]
    if not native.uring_refusal():
        assert "INFINITY_IO" in found["io"]["remedy"]


def test_a_folder_in_memory_is_told(capsys, tmp_path):
    # Twin: one on a disk, where the tests' own folder is one.
    own = disk_profile.file_system(str(tmp_path)) in disk_profile.IN_MEMORY
    for folder, is_memory in (("/dev/shm", True), (str(tmp_path), own)):
        found = findings(capsys, "--nvme-path", folder)[f"disk {folder}"]
        assert ("is memory" in found["value"]) == is_memory
        assert ("takes memory" in (found["remedy"] or "")) == is_memory


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_cannot_be_used_is_a_finding_and_not_an_error(folder, capsys, tmp_path):
    # Method: ask about a folder that is not there and about a file.
    (tmp_path / "file").write_text("")
    found = findings(capsys, "--nvme-path", str(tmp_path / folder))[f"disk {tmp_path / folder}"]
    assert "cannot be used" in found["value"] and found["remedy"]
    assert not list(tmp_path.glob("infinity-probe-*"))


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ([], "no GPU: the processor computes"),
        (["sm_90"], "no GPU: the processor computes; cuda kernels are inside, for sm_90"),
        (["sm_80", "compute_90", "sm_120"], "sm_80, sm_120, compute_90 and newer (PTX)"),
    ],
)
def test_kernels_of_a_gpu_are_named_also_without_one(targets, told, monkeypatch):
    # Method: kernels for other GPUs are built in; the twin has none.
    monkeypatch.setattr(native, "kernel_targets", lambda: targets)
    monkeypatch.setattr(native, "cuda_driver", lambda: (0, "no CUDA driver: none here"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(direct_storage, "has_gpu", lambda: False)
    [found] = env._gpu(torch, [])
    assert found.value.endswith(told) and bool(targets) == ("inside" in found.value)


@pytest.mark.parametrize(
    ("targets", "kernels", "value", "remedy"),
    [
        (["sm_90"], (object(), ""), "inside, for sm_90", ""),
        (["sm_90"], (None, "the driver is too old"), "not used: the driver is too old", ""),
        ([], None, "not built", "INFINITY_CUDA=1"),
    ],
)
def test_kernels_of_a_gpu_come_with_why_they_are_not_used(
    targets, kernels, value, remedy, monkeypatch
):
    # Method: kernels that run, that the driver refuses, and that are not built.
    monkeypatch.setattr(native, "kernel_targets", lambda: targets)
    if kernels is None:
        monkeypatch.setitem(sys.modules, "infinity._cuda", None)
        monkeypatch.delattr(infinity, "_cuda", raising=False)
    else:
        monkeypatch.setattr(native, "gpu_kernels", lambda: kernels)
    found = env._kernels()
    assert value in found.value and remedy in found.remedy and bool(remedy) == bool(found.remedy)


@pytest.mark.parametrize(
    ("device", "used", "told"),
    [
        ({"capability": (9, 0), "name": "a card"}, True, ""),
        ({"capability": (7, 5), "name": "a card"}, False, "the kernels need (8, 0)"),
        ({"refusal": "no CUDA-capable device is detected"}, False, "detected"),
        (
            {"refusal": "CUDA driver version is insufficient for CUDA runtime version"},
            False,
            "Update the driver, or build in a clone with an older CUDA's nvcc: INFINITY_CUDA=1",
        ),
    ],
)
def test_a_refusal_of_kernels_says_what_helps(device, used, told, monkeypatch):
    # Method: kernels that are built find these devices; the twin is one that they run on.
    module = SimpleNamespace(device=lambda: device, targets="sm_80 compute_90")
    monkeypatch.setattr(infinity, "_cuda", module, raising=False)
    kernels, refusal = native.gpu_kernels()
    assert (kernels is module) == used and told in refusal and bool(refusal) != used
    assert native.kernel_targets() == ["sm_80", "compute_90"]


def test_another_package_of_this_name_is_refused_at_import(tmp_path):
    """By its files in our folder. Twins: our own, and what Python and editors leave."""
    for name in ("__pycache__", "api"):
        (tmp_path / name).mkdir()
    for name in ("notes.txt", "_C.cpython-312-x86_64-linux-gnu.so"):
        (tmp_path / name).touch()
    (tmp_path / "native.py").touch()
    infinity._refuse_others(str(tmp_path))
    (tmp_path / "trainer.py").touch()
    with pytest.raises(ImportError, match=r"trainer\.py of another distribution.*python -m venv"):
        infinity._refuse_others(str(tmp_path))


def test_the_package_knows_its_own_files():
    """As git has them."""
    root = Path(infinity.__file__).parent
    listed = subprocess.run(
        ["git", "ls-files", "."], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    own = {name.partition("/")[0].partition(".")[0] for name in listed}
    assert own <= infinity._OWN and infinity._OWN - own <= {"_C", "_cuda", "__pycache__"}


def test_the_package_says_what_it_is(capsys):
    assert cli.main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["infinity"]["value"]
    assert infinity.__version__ in told and str(Path(infinity.__file__).parent) in told


def test_a_check_has_a_status_of_its_own(capsys, monkeypatch, tmp_path):
    """2 if anything could be better. Twins: without it the status is 0; a machine where nothing
    could be."""
    folder = ["--nvme-path", str(tmp_path)]
    monkeypatch.setattr(env, "find", lambda folders: [env.Finding("disk", "slow", "another one")])
    assert cli.main(["env", *folder]) == 0 and cli.main(["env", "--check", *folder]) == 2
    monkeypatch.setattr(env, "find", lambda folders: [env.Finding("disk", "fast")])
    assert cli.main(["env", "--check", *folder]) == 0


def test_a_folder_where_no_status_can_be_written_is_told(capsys, monkeypatch, tmp_path):
    """Method: the folder of INFINITY_CACHE lies in a file. Twin: one that can be made."""
    (tmp_path / "file").touch()
    for name, told in ((tmp_path / "file" / "cache", True), (tmp_path / "new", False)):
        monkeypatch.setenv("INFINITY_CACHE", str(name))
        found = findings(capsys, "--nvme-path", str(tmp_path))
        assert ("status of jobs" in found) is told
        assert not told or "INFINITY_CACHE" in found["status of jobs"]["remedy"]


@pytest.mark.skipif(native.uring_refusal() != "", reason=f"no io_uring: {native.uring_refusal()}")
@pytest.mark.parametrize("kib", [64, 8192])
def test_a_low_limit_of_locked_memory_comes_with_the_number_to_set(kib):
    """Method: an ordinary user with little lockable memory. Some kernels count the rings, and
    refuse io_uring; what the rings take is no more than the number has for them. Twin: a remedy of
    another kind has no number."""

    def work():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (kib * 1024, kib * 1024))
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        return " ".join(each.remedy for each in (env._io(), env._memlock()))

    said = outcome_in_child(work)
    assert said.count(f"{env.ENOUGH_MEMLOCK // 1024} KiB are enough here") == 1, said
    assert "set it to unlimited" in said and "67584 KiB" in said
    if found := re.search(r"(\d+) MiB of 64 MiB were registered", said):
        rings = env.ENOUGH_MEMLOCK - env.TRIED_NBYTES
        assert int(found[1]) * 1024**2 >= kib * 1024 - rings
    page = (Path(__file__).parents[3] / "docs" / "administrators.md").read_text()
    assert f"{env.ENOUGH_MEMLOCK // 1024} KiB" in page
    assert env._with_number("allow it in the seccomp profile") == "allow it in the seccomp profile"
