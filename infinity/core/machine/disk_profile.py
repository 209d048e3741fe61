"""Disks: their rates, measured once per device and kept in a file.

profile    rates in both directions, and the block size and depth that gave them
identity   the kernel's device with its serial number: another disk under the same folder is
           measured anew

The file is ``disks.json`` in ``INFINITY_CACHE``, else in ``$XDG_CACHE_HOME/infinity`` or
``~/.cache/infinity``. It may be deleted at any time.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ... import native
from ...errors import CorruptionError

MIB = 1024 * 1024
IN_MEMORY = ("tmpfs", "ramfs")
PROBE_NBYTES = 64 * MIB
# Memory of the probe: small, because no budget includes it. Transfers share it: the bytes are not
# used.
PROBE_MEMORY_NBYTES = 16 * MIB
PROBE_REQUEST_NBYTES = 4 * MIB
# (block, depth), likely ones first: a slow disk is not measured with all of them.
SETTINGS = [(MIB, 32), (MIB, 64), (4 * MIB, 16), (4 * MIB, 32), (256 * 1024, 64), (256 * 1024, 128)]
PATIENCE_SECONDS = 1.5
WAIT_SECONDS = 20.0  # for other processes that measure
WORTH = 1.03  # another setting must be better by this factor


@dataclass(frozen=True)
class DiskProfile:
    """One device. Rates in bytes per second; ``mixed_rate``: both directions at once, summed."""

    read_rate: float
    write_rate: float
    mixed_rate: float
    block_nbytes: int = MIB
    depth: int = 64


GUESS = DiskProfile(1e9, 1e9, 1e9)


@cache
def disk_profile(folder: str, kind: str | None = None) -> DiskProfile:
    """Returns the profile of the device under ``folder`` with an I/O engine of ``kind`` (None:
    default).

    It comes from this process, from the file, or is measured now: half a second, two on a slow
    disk, 64 MiB at a time. A folder that cannot be measured gets a guess: a later write raises the
    reason.
    """
    kind = kind or native.io_kind()
    key = f"{Disk(folder).device} {kind}"
    profiles = _read_profiles()
    if key in profiles:
        return profiles[key]
    with _alone(folder):  # over this machine's processes, or each would measure the rest
        profiles = _read_profiles()
        if key in profiles:
            return profiles[key]
        try:
            profile = _measure(folder, kind)
        except (OSError, CorruptionError):
            return GUESS
        _write_profiles(_read_profiles() | {key: profile})
        return profile


class Disk:
    """What is under ``folder``, by three names."""

    def __init__(self, folder: str):
        modelled = native.disks.modelled(folder)
        self._model = None if modelled is None else f"model {modelled}"
        self._folder = folder

    @property
    def system(self) -> str:
        """The file system. Folders with one name share their free space."""
        if self._model is not None:
            return self._model
        device = os.stat(self._folder).st_dev
        return f"{os.major(device)}:{os.minor(device)}"

    @property
    def device(self) -> str:
        """The device: kernel name, serial number if any, and size."""
        if self._model is not None:
            return self._model
        device = _block_device(self.system)
        if device is None:
            # A network or overlay file system
            return f"{self.system} {os.uname().nodename}"
        texts = (_read_text(_whole(device) / name) for name in ("serial", "device/serial", "wwid"))
        serial = next(filter(None, texts), "")
        return " ".join(filter(None, (device.name, serial, _read_text(device / "size"))))

    @property
    def disks(self) -> str:
        """The disks, equal for partitions and logical volumes on one disk."""
        device = _block_device(self.system) if self._model is None else None
        return self.device if device is None else " ".join(sorted(_disks_below(device)))


def _block_device(system: str) -> Path | None:
    """Returns the kernel's entry for the device of a file system; None if it is not a block
    device."""
    device = Path("/sys/dev/block", system).resolve()
    return device if device.exists() else None


def _whole(device: Path) -> Path:
    """Returns the disk of a partition."""
    return device if (device / "queue").exists() else device.parent


def _disks_below(device: Path) -> set[str]:
    below = list((_whole(device) / "slaves").glob("*"))
    return (
        set().union(*(_disks_below(lower.resolve()) for lower in below))
        if below
        else {_whole(device).name}
    )


def free_nbytes(folders: Sequence[str]) -> int:
    """Counts the free bytes in all ``folders``, once per file system."""
    systems = {Disk(folder).system: folder for folder in reversed(folders)}
    return sum(shutil.disk_usage(folder).free for folder in systems.values())


def largest_file(folder: str, wanted: int) -> int:
    """Returns the maximum length of a file in ``folder``, up to ``wanted``: the minimum of the file
    system's (16 TiB on ext4) and the process's limit. ``wanted`` if unnamed files cannot be made: a
    later creation raises the reason."""
    try:
        descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        return wanted
    try:
        return _longest(descriptor, wanted)
    finally:
        os.close(descriptor)


def _longest(descriptor: int, wanted: int) -> int:
    def can_be(nbytes: int) -> bool:
        try:
            os.ftruncate(descriptor, nbytes)  # takes no space
            return True
        except OSError as error:
            return error.errno not in (errno.EFBIG, errno.EINVAL)

    if can_be(wanted):
        return wanted
    fits, too_much = 0, wanted
    while too_much - fits > native.BLOCK_NBYTES:
        middle = (fits + too_much) // 2
        fits, too_much = (middle, too_much) if can_be(middle) else (fits, middle)
    return fits


def file_system(folder: str) -> str:
    """Returns the type of the file system of ``folder``, such as "ext4"; "" if unknown."""
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
    """Returns the folder for files kept between jobs. It may not exist, nor be absolute without a
    home."""
    if folder := os.environ.get("INFINITY_CACHE"):
        return Path(folder)
    # Not Path.home(), which raises for a user without an entry and without HOME.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "infinity")


def _file() -> Path:
    return cache_folder() / "disks.json"


def _read_profiles() -> dict[str, DiskProfile]:
    """Reads the file; empty if it does not exist or is not one of ours."""
    try:
        return {
            key: _checked(DiskProfile(**entry))
            for key, entry in json.loads(_file().read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _checked(profile: DiskProfile) -> DiskProfile:
    """Raises ValueError for an impossible profile."""
    rates = (profile.read_rate, profile.write_rate, profile.mixed_rate)
    sizes = (profile.block_nbytes, profile.depth)
    if not all(isinstance(rate, (int, float)) and 0 < rate < 1e15 for rate in rates):
        raise ValueError(f"rates {rates}")
    if not all(type(size) is int for size in sizes) or sizes not in SETTINGS:
        raise ValueError(f"block and depth {sizes}")
    return profile


def _write_profiles(profiles: dict[str, DiskProfile]) -> None:
    """Replaces the file atomically. If that fails, the disk is measured again next time."""
    path = _file()
    if not path.is_absolute():
        return  # no home folder, and the current one is not ours
    content = json.dumps(
        {key: dataclasses.asdict(profile) for key, profile in profiles.items()}, indent=1
    )
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(content + "\n")
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Runs a block in one process at a time for ``folder``, if its file system has locks.

    Waits ``WAIT_SECONDS`` at most: the folder is a user's, who may have locked it around the whole
    job.
    """
    descriptor, deadline = (
        os.open(folder, os.O_RDONLY | os.O_CLOEXEC),
        time.monotonic() + WAIT_SECONDS,
    )
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            except OSError:
                pass  # the file system has no locks
            break
        yield
    finally:
        os.close(descriptor)


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


def _rates(
    path: str, memory: native.Region, kind: str, block_nbytes: int, depth: int
) -> tuple[float, float, float]:
    io = native.make_io_engine(kind=kind, block_nbytes=block_nbytes, depth=depth)
    extent = native.Extent.in_file(io.open_file(path), 0, PROBE_NBYTES)
    io.register([memory])
    half = PROBE_NBYTES // 2

    def part(offset: int) -> tuple[native.Extent, int, int, int]:
        return extent, offset, memory.address + offset % PROBE_MEMORY_NBYTES, PROBE_REQUEST_NBYTES

    def read(offset: int) -> native.Ticket:
        return io.read(*part(offset), checksum=False)

    def write(offset: int) -> native.Ticket:
        return io.write(*part(offset), checksum=False)

    def rate(first, second) -> float:
        """Times moving the first half one way and the second half the other, in turns."""
        start = time.perf_counter()
        offsets = range(0, half, PROBE_REQUEST_NBYTES)
        for ticket in [
            ticket for offset in offsets for ticket in (first(offset), second(half + offset))
        ]:
            ticket.wait()
        return PROBE_NBYTES / (time.perf_counter() - start)

    rate(write, write)  # the first write also allocates blocks
    return rate(read, read), rate(write, write), rate(read, write)
