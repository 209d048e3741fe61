"""Disks: what one can do, measured once per device and kept in a file.

profile    rates in both directions, and the block size and depth that gave them
identity   the kernel's device with its serial number: another disk under the same folder is measured anew

The file is ``disks.json`` in ``INFINITY_CACHE``, else in ``$XDG_CACHE_HOME/infinity`` or ``~/.cache/infinity``. It may
be deleted at any time.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .. import native
from ..errors import CorruptionError

MIB = 1024 * 1024
IN_MEMORY = ("tmpfs", "ramfs")
PROBE_NBYTES = 64 * MIB
# Memory of the probe: little, for it is nobody's budget. Transfers share it, since nobody looks at the bytes.
PROBE_MEMORY_NBYTES = 16 * MIB
PROBE_REQUEST_NBYTES = 4 * MIB
# (block, depth), the likely ones first: a slow disk is not asked for all of them.
SETTINGS = [(MIB, 32), (MIB, 64), (4 * MIB, 16), (4 * MIB, 32), (256 * 1024, 64), (256 * 1024, 128)]
PATIENCE_SECONDS = 1.5
WORTH = 1.03  # another setting must be this much better than one before it


@dataclass(frozen=True)
class DiskProfile:
    """One device. Rates in bytes per second; ``mixed_rate`` is of both directions at once, summed."""

    read_rate: float
    write_rate: float
    mixed_rate: float
    block_nbytes: int = MIB
    depth: int = 64


GUESS = DiskProfile(1e9, 1e9, 1e9)


@cache
def disk_profile(folder: str, kind: str | None = None) -> DiskProfile:
    """Returns the profile of the device under ``folder`` with an I/O engine of ``kind`` (None: the usual one).

    It comes from this process, from the file, or is measured now (half a second, two on a slow disk, 64 MiB at a time).
    A folder that cannot be measured gets a guess: who writes to it will meet the reason.
    """
    kind = kind or native.io_kind()
    key = f"{identity(folder)} {kind}"
    kept = _read_kept()
    if key in kept:
        return kept[key]
    try:
        profile = _measure(folder, kind)
    except (OSError, CorruptionError):
        return GUESS
    _keep(_read_kept() | {key: profile})
    return profile


def identity(folder: str) -> str:
    """Names the device under ``folder``: the kernel's name, its serial number where it has one, and its size."""
    status = os.stat(folder)
    numbers = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    device = Path("/sys/dev/block", numbers).resolve()
    if not device.exists():
        return f"{numbers} {os.uname().nodename}"  # a network or overlay file system
    whole = device if (device / "queue").exists() else device.parent  # of a partition
    serial = next((text for name in ("serial", "device/serial", "wwid") if (text := _read_text(whole / name))), "")
    return " ".join(filter(None, (device.name, serial, _read_text(device / "size"))))


def file_system(folder: str) -> str:
    """Names the kind of file system that ``folder`` is on, "ext4" say; empty where the kernel does not tell."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _read_text(Path("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number]:
            return after.split()[0]
    return ""


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def cache_folder() -> Path:
    """Returns the folder for what is kept between jobs; it may not be there, nor be absolute, where there is no home."""
    if folder := os.environ.get("INFINITY_CACHE"):
        return Path(folder)
    # Not Path.home(), which raises for a user without an entry and without HOME.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "infinity")


def _file() -> Path:
    return cache_folder() / "disks.json"


def _read_kept() -> dict[str, DiskProfile]:
    """Reads what the file holds; nothing when it is not there or is not one of ours."""
    try:
        return {key: _checked(DiskProfile(**entry)) for key, entry in json.loads(_file().read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _checked(profile: DiskProfile) -> DiskProfile:
    """Raises ValueError for a profile that no disk has."""
    rates = (profile.read_rate, profile.write_rate, profile.mixed_rate)
    sizes = (profile.block_nbytes, profile.depth)
    if not all(isinstance(rate, (int, float)) and 0 < rate < 1e15 for rate in rates):
        raise ValueError(f"rates {rates}")
    if not all(type(size) is int for size in sizes) or sizes not in SETTINGS:
        raise ValueError(f"block and depth {sizes}")
    return profile


def _keep(profiles: dict[str, DiskProfile]) -> None:
    """Replaces the file at once, so that no reader meets half of it. What cannot be kept is measured again."""
    path = _file()
    if not path.is_absolute():
        return  # no home folder, and the current one is not ours
    content = json.dumps({key: dataclasses.asdict(profile) for key, profile in profiles.items()}, indent=1)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(content + "\n")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)


def _measure(folder: str, kind: str) -> DiskProfile:
    if shutil.disk_usage(folder).free < 2 * PROBE_NBYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
    best, deadline = None, time.perf_counter() + PATIENCE_SECONDS
    with tempfile.TemporaryDirectory(prefix="infinity-probe-", dir=folder) as probe:
        memory = native.Region(PROBE_MEMORY_NBYTES, True, 1)
        path = os.path.join(probe, "probe")
        native.make_io_engine().create_file(path, PROBE_NBYTES)
        for block_nbytes, depth in SETTINGS:
            read, write, mixed = _rates(path, memory, kind, block_nbytes, depth)
            if best is None or mixed > WORTH * best.mixed_rate:
                best = DiskProfile(read, write, mixed, block_nbytes, depth)
            if time.perf_counter() > deadline:
                break
    return best


def _rates(path: str, memory: native.Region, kind: str, block_nbytes: int, depth: int) -> tuple[float, float, float]:
    engine = native.make_io_engine(kind=kind, block_nbytes=block_nbytes, depth=depth)
    extent = native.Extent.in_file(engine.open_file(path), 0, PROBE_NBYTES)
    engine.register([(memory.address, memory.nbytes)])
    half = PROBE_NBYTES // 2

    def place(offset: int) -> tuple[native.Extent, int, int, int]:
        return extent, offset, memory.address + offset % PROBE_MEMORY_NBYTES, PROBE_REQUEST_NBYTES

    def read(offset: int) -> native.Ticket:
        return engine.read(*place(offset))

    def write(offset: int) -> native.Ticket:
        return engine.write(*place(offset), checksum=False)

    def rate(first, second) -> float:
        """Times moving the first half one way and the second half another, in turns."""
        start = time.perf_counter()
        offsets = range(0, half, PROBE_REQUEST_NBYTES)
        for ticket in [ticket for offset in offsets for ticket in (first(offset), second(half + offset))]:
            ticket.wait()
        return PROBE_NBYTES / (time.perf_counter() - start)

    rate(write, write)  # the first write also allocates blocks
    return rate(read, read), rate(write, write), rate(read, write)


def rates(folders: Sequence[str]) -> tuple[float, float, float]:
    """Adds up the bytes per second (read, written, both at once) over all ``folders``, each device counted once."""
    used = [disk_profile(folder) for folder, share in zip(folders, shares(folders)) if share]
    return tuple(sum(getattr(one, name) for one in used) for name in ("read_rate", "write_rate", "mixed_rate"))


def seconds(folders: Sequence[str], read: float, written: float) -> float:
    """Returns the seconds that the disks need at least for so many bytes in both directions at once."""
    read_rate, write_rate, mixed_rate = rates(folders)
    return max(read / read_rate, written / write_rate, (read + written) / mixed_rate)


def shares(folders: Sequence[str]) -> list[float]:
    """Computes how much of the bytes each folder should take, as rates. Folders on one device would only get in each other's way:
    the first of them takes its part, the others nothing."""
    seen: set[str] = set()
    found = []
    for folder in folders:
        key = identity(folder)
        found.append(0.0 if key in seen else disk_profile(folder).mixed_rate)
        seen.add(key)
    return found
