"""What may be taken of memory: the least that the machine, the groups above the process and its
ulimits leave; and jobs in groups that are smaller than what they train."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import prepared
import psutil
import pytest

from infinity.core.machine.limits import GIB, for_the_engine, memory_left

MIB = 1024**2


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def own(root: Path, text: str) -> Path:
    path = root / "own"
    path.write_text(text)
    return path


def v2(
    limit: str, used: int, *, file: int = 0, shmem: int = 0, high: str = "max"
) -> dict[str, str]:
    return {
        "memory.max": limit,
        "memory.high": high,
        "memory.current": str(used),
        "memory.stat": f"anon 1\nfile {file}\nshmem {shmem}\n",
    }


def v1(limit: int, used: int, *, cache: int = 0, shmem: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": str(limit),
        "memory.usage_in_bytes": str(used),
        "memory.stat": f"cache 1\ntotal_cache {cache}\ntotal_shmem {shmem}\n",
    }


def within(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


NOT_LIMITED = within("", v2("max", 5 * MIB))
CASES = {
    "v2, own": ("0::/a/b\n", within("a/b", v2("300000000", 100_000_000)), 200_000_000),
    "v2, its parent": (
        "0::/a/b\n",
        within("a", v2("200000000", 50_000_000)) | within("a/b", v2("max", 1)),
        150_000_000,
    ),
    "v2, its grandparent": (
        "0::/a/b/c\n",
        within("a", v2("200000000", 50_000_000)) | within("a/b/c", v2("900000000", 1)),
        150_000_000,
    ),
    "v2, high": ("0::/a\n", within("a", v2("max", 10, high="1000010")), 1_000_000),
    "v2, caches give way": (
        "0::/a\n",
        within("a", v2("200000000", 150_000_000, file=100_000_000, shmem=20_000_000)),
        130_000_000,
    ),
    "v2 beside v1": ("3:memory:/x\n0::/a\n", within("unified/a", v2("200000000", 0)), 200_000_000),
    "v1, own": (
        "4:memory:/a\n0::/\n",
        within("memory/a", v1(300_000_000, 100_000_000)),
        200_000_000,
    ),
    "v1, its parent": (
        "4:memory:/a/b\n",
        within("memory/a", v1(200_000_000, 50_000_000)) | within("memory/a/b", v1(2**62, 1)),
        150_000_000,
    ),
    "v1, caches give way": (
        "4:memory:/a\n",
        within("memory/a", v1(200_000_000, 150_000_000, cache=100_000_000, shmem=20_000_000)),
        130_000_000,
    ),
    "v1, mounted inside the container": (
        "4:memory:/docker/0123\n",
        within("memory", v1(200_000_000, 50_000_000)),
        150_000_000,
    ),
    "more is used than allowed": ("0::/a\n", within("a", v2("100", 200)), 0),
}


@pytest.mark.parametrize("what", CASES)
def test_the_least_of_the_chain_counts(what, tmp_path):
    said, files, expected = CASES[what]
    root = tree(tmp_path / "root", files)
    assert memory_left(root, own(tmp_path, said)) == expected


@pytest.mark.parametrize("said", ["", "0::/\n", "garbage\n", "4:memory:/gone\n"])
def test_without_limits_the_machine_counts(said, tmp_path):
    root = tree(tmp_path / "root", {"memory.max": "max"})
    assert memory_left(root, own(tmp_path, said)) == pytest.approx(
        psutil.virtual_memory().available, rel=0.2
    )
    assert memory_left(root, tmp_path / "nowhere") == pytest.approx(
        psutil.virtual_memory().available, rel=0.2
    )


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_ulimits_count(limit):
    code = (
        "import resource, sys; from infinity.core.machine import limits; size = int(sys.argv[2])\n"
        "resource.setrlimit(int(sys.argv[1]), (size, size)); print(limits.memory_left())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(limit), str(3 * GIB)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < int(done.stdout) < 3 * GIB


def test_a_part_is_left_to_what_the_engine_does_not_hold():
    """A third of a small machine, a tenth of a large one, and never less for more."""
    assert (
        for_the_engine(3 * GIB) == 2 * GIB
        and for_the_engine(1000 * GIB) == 900 * GIB
        and for_the_engine(0) == 0
    )
    sizes = [for_the_engine(n * GIB // 4) for n in range(400)]
    assert sizes == sorted(sizes)


# --- jobs in groups ---


@contextlib.contextmanager
def group(nbytes: int) -> Iterator[Path]:
    """A v1 or v2 memory group of ``nbytes``; skips where none can be made."""
    own_path = next(
        (
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if ":memory:" in line
        ),
        None,
    )
    parent = (
        Path("/sys/fs/cgroup/memory" + own_path) if own_path is not None else Path("/sys/fs/cgroup")
    )
    folder = parent / f"infinity-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if own_path is not None else "memory.max")).write_text(
            str(nbytes)
        )
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory group can be made here: {error}")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


JOB = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import torch
from torch import nn
import infinity
torch.set_num_threads(1)
width, blocks = int(sys.argv[3]), int(sys.argv[4])
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
config = {"nvme_paths": [sys.argv[2]]} if sys.argv[2] else {}
model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)
for step in range(2):
    model(torch.randn(8, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", sum(param.numel() for param in model.parameters()) * 16, infinity.stats(model).tiers["host"].planned_nbytes)
"""  # noqa: E501


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("gib", "blocks"), [(1, 20), pytest.param(2, 110, marks=pytest.mark.slow)])
def test_a_job_by_default_options_trains_what_its_group_cannot_hold(gib, blocks, tmp_path):
    """Method: 1.3 GiB of state in a group of 1 GiB (6.9 in 2), with a scratch folder and nothing
    else: it trains, and is not killed."""
    with group(gib * GIB) as folder:
        command = [sys.executable, "-c", JOB, str(folder), str(tmp_path), "2048", str(blocks)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=580,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    word, state, planned = done.stdout.split()
    assert word == "trained" and int(state) > 1.2 * gib * GIB and int(planned) < gib * GIB


def test_env_tells_what_a_group_leaves(tmp_path):
    with group(GIB) as folder:
        code = (
            "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
            "from infinity.tools.cli import main; sys.exit(main(['env']))"
        )
        done = prepared.run("-c", code, folder)
    (line,) = [line for line in done.stdout.splitlines() if "control groups" in line]
    assert "MiB" in line or "GiB" in line


def test_a_job_that_fits_nowhere_is_told_and_not_killed(tmp_path):
    """The twin: the same without a folder; a CapacityError with numbers."""
    with group(GIB) as folder:
        done = prepared.run("-c", JOB, folder, "", "2048", "20")
    assert (
        done.returncode == 1 and "CapacityError" in done.stderr and "nvme_paths" in done.stderr
    ), (
        done.returncode,
        done.stderr[-2000:],
    )
