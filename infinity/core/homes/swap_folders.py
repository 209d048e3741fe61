"""SwapFolders: the folders of ``nvme_paths`` for swap files, and how many bytes each takes.

place      a file system, reached by one of the folders: another folder on it adds nothing
device     the disk below it: places on one share its rate
volume     one range of bytes in stripes over a swap file in every folder (:mod:`csrc/io/volume`)
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from ... import native
from ...errors import CapacityError, ConfigError, StorageError
from ..machine import disk_profile, processors
from ..machine.sizes import format_nbytes, round_down, round_up

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
MAX_DEPTH = 256  # transfers in flight on one disk
MAX_STRIPE_NBYTES = 4 * MIB


@dataclass(frozen=True)
class SwapFolder:
    """A file system for swap files. ``rate``: of the whole device, in bytes per second."""

    path: str
    device: str
    rate: float


class SwapFolders:
    """Creates volumes over all folders. This is rank ``rank`` of ``ranks`` that share the machine's
    disks. It uses its part of the free space, and its first stripe is on another disk than theirs.
    """

    def __init__(self, folders: Sequence[str], *, rank: int = 0, ranks: int = 1):
        self._rank, self._ranks = rank, ranks
        self.folders: list[SwapFolder] = []
        self.profiles: list[disk_profile.DiskProfile] = []
        systems: set[str] = set()
        for folder in folders:
            _check(folder)
            profile, disk = disk_profile.disk_profile(folder), disk_profile.Disk(folder)
            if (system := disk.system) not in systems:
                systems.add(system)
                self.profiles.append(profile)
                self.folders.append(SwapFolder(folder, disk.disks, profile.mixed_rate))
        self._block = max((profile.block_nbytes for profile in self.profiles), default=MIB)
        self.stripe_nbytes = min(max(MIB, self._block), MAX_STRIPE_NBYTES)

    def make_engine(self, layer: native.BackendLayer | None) -> native.IoEngine:
        """Makes an I/O engine for the disks of all folders; ``layer`` as for
        :func:`native.make_io_engine`."""
        return native.make_io_engine(
            layer=layer,
            block_nbytes=self._block,
            depth=min(MAX_DEPTH, max((profile.depth for profile in self.profiles), default=1)),
            work_threads=processors.for_checksums(),
        )

    def free_nbytes(self) -> int:
        """Counts the free bytes over all folders. Raises ConfigError if a folder is gone."""
        for folder in self.folders:
            _check(folder.path)
        return disk_profile.free_nbytes([folder.path for folder in self.folders])

    def lay_out(self, volume: native.Volume, nbytes: int, io: native.IoEngine) -> None:
        """Creates the swap files of ``volume``, with room for ``nbytes``, a multiple of 4096.
        Raises ConfigError if a folder is gone, CapacityError for too little room, StorageError if a
        disk refuses; then no file is left."""
        parts = self._parts(nbytes)
        folders = [folder for folder, _ in parts]
        counts = _stripes([part for _, part in parts], self.stripe_nbytes, nbytes)
        sizes = volume.lay_out(
            self.stripe_nbytes, counts, self._rank * len(folders) // self._ranks, nbytes
        )
        files: list[int] = []
        try:
            for folder, size in zip(folders, sizes):
                files.append(create_swap_file(io, folder, size) if size else -1)
        except BaseException:
            for file in files:
                if file >= 0:
                    io.drop_file(file, behind=False)
            raise
        volume.set_files(files)

    def _parts(self, nbytes: int) -> list[tuple[str, int]]:
        """Splits ``nbytes`` over swap files: (folder, bytes) each."""
        stripe_nbytes = self.stripe_nbytes
        for folder in self.folders:
            _check(folder.path)
        # Several files have whole stripes, so a full one gets no stripe that it has no room for.
        whole = stripe_nbytes if len(self.folders) > 1 else 1
        free = [round_down(shutil.disk_usage(folder.path).free, whole) for folder in self.folders]
        if nbytes > sum(free):
            raise CapacityError(
                f"NVMe home needs {format_nbytes(nbytes)} at"
                f" {', '.join(folder.path for folder in self.folders)} but"
                f" {format_nbytes(sum(free))} is free. Free {format_nbytes(nbytes - sum(free))}, or"
                " name more folders in nvme_paths."
            )
        first = split(nbytes, self.folders, [round_down(n // self._ranks, whole) for n in free])
        # If this rank's share is too small, use what the others left after taking theirs.
        more = split(nbytes - sum(first), self.folders, [n - part for n, part in zip(free, first)])
        parts = []
        for folder, part in zip(self.folders, map(sum, zip(first, more))):
            limit = disk_profile.largest_file(folder.path, part + stripe_nbytes)
            if limit < part + stripe_nbytes:
                limit = max(stripe_nbytes, round_down(limit, stripe_nbytes) - stripe_nbytes)
            while part > 0:
                parts.append((folder.path, min(part, limit)))
                part -= parts[-1][1]
        return parts


def split(nbytes: int, folders: Sequence[SwapFolder], rooms: Sequence[int]) -> list[int]:
    """Splits ``nbytes`` over ``folders`` so that all devices finish at once, within ``rooms`` bytes
    each. What a full device cannot take goes to the others. Folders on one device are filled in
    order. Returns less than ``nbytes`` in sum if the rooms are too small."""
    devices = dict.fromkeys(folder.device for folder in folders)
    rates = {folder.device: folder.rate for folder in reversed(folders)}
    free = {
        device: sum(room for folder, room in zip(folders, rooms) if folder.device == device)
        for device in devices
    }
    taken = dict.fromkeys(devices, 0.0)
    wanted, open_devices = float(nbytes), {device for device in devices if free[device] > 0}
    while wanted >= 1 and open_devices:
        rate = sum(rates[device] for device in open_devices)
        even = {device: wanted * rates[device] / rate for device in open_devices}
        full = {device for device in open_devices if taken[device] + even[device] >= free[device]}
        for device in full or open_devices:
            added = free[device] - taken[device] if full else even[device]
            taken[device] += added
            wanted -= added
        if not full:
            break
        open_devices -= full
    parts = []
    for folder, room in zip(folders, rooms):
        parts.append(min(room, round(taken[folder.device])))
        taken[folder.device] -= parts[-1]
    return parts


def _stripes(parts: list[int], stripe_nbytes: int, nbytes: int) -> list[int]:
    """Returns the stripes of each part: in sum enough for ``nbytes``, the largest remainders
    rounded up."""
    counts = [part // stripe_nbytes for part in parts]
    missing = -(-nbytes // stripe_nbytes) - sum(counts)
    for index in sorted(range(len(parts)), key=lambda index: -(parts[index] % stripe_nbytes))[
        :missing
    ]:
        counts[index] += 1
    return counts


def _check(folder: str) -> None:
    if not os.path.isdir(folder):
        raise ConfigError(f"nvme_paths: there is no folder {folder}. Create it, or name another.")


def create_swap_file(io: native.IoEngine, folder: str, nbytes: int) -> int:
    """Creates a swap file of ``nbytes`` in ``folder``. Returns the engine's index of it. Raises
    CapacityError for too little room, StorageError if it cannot be written."""
    if (kind := disk_profile.file_system(folder)) in disk_profile.IN_MEMORY:
        logger.warning(
            "nvme_paths: %s is on %s, which is memory: what has its home there takes memory beside"
            " host_memory, and may end in the process being killed. Name a folder on a disk.",
            folder,
            kind,
        )
    try:
        return io.create_swap_file(folder, round_up(nbytes, native.BLOCK_NBYTES))
    except StorageError as error:
        if error.errno == errno.ENOSPC:
            raise CapacityError(
                f"NVMe home needs {format_nbytes(nbytes)} at {folder}, and the disk filled up while"
                " it was being reserved. Free that much, or name more folders in nvme_paths."
            ) from error
        raise StorageError(
            error.errno,
            f"cannot make a swap file in {folder}: {os.strerror(error.errno)}. It must be writable;"
            " name another folder in nvme_paths",
            folder,
        ) from error
