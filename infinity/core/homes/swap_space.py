"""SwapSpace: the bytes of a store's swap files, and which arrays they belong to.

swap file   this job's bytes in a folder of ``nvme_paths``. It has no name: no other process can
            open or remove it, nothing needs a lock or cleaning up, and its space is free when the
            process ends, in whatever way
volume      one range of bytes in stripes over a swap file in every folder. The first has the
            plan's arrays; more are added if arrays are allocated later
table       checksums of a planned array, at home on disk behind it (:mod:`csrc/io/sums`)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ... import native
from ...errors import CapacityError, InfinityError
from ..machine.ledger import Ledger
from ..machine.sizes import round_up
from ..machine.tiers import Tier
from .arrays import StateArray
from .swap_folders import SwapFolders

GROWTH_NBYTES = 256 * 1024 * 1024  # of a volume that is added later, if there is room
SUMS_NBYTES = 4 * 1024 * 1024  # of checksums in memory, if they are at home on disk

Space = tuple[int, int, int]  # number of the added volume, offset, bytes


@dataclass(frozen=True)
class _Added:
    """A volume that was added after the store was opened."""

    volume: native.Volume
    folder: str | None  # for arrays of this folder; None: all folders
    nbytes: int
    charges: list[native.Charge]  # of the disk, and of checksums in memory


class SwapSpace:
    """Space in swap files: planned until :meth:`lay_out`, later from added volumes."""

    def __init__(self, folders: SwapFolders, io: native.IoEngine, ledger: Ledger):
        self._folders, self._io, self._ledger = folders, io, ledger
        self.first = native.Volume()
        self.planned_nbytes = 0  # of the first volume
        # Of checksums, if planned arrays have tables
        self.sums: native.SumCache | None = None
        self.covered_nbytes = 0  # of checksums of later arrays, that the plan has charged
        self.added: list[_Added] = []
        # Spaces in use
        self._places: weakref.WeakKeyDictionary[StateArray, Space] = weakref.WeakKeyDictionary()
        self.free_spaces: list[Space] = []  # in added volumes
        # Free once the transfers complete
        self._leaving: list[tuple[list[native.Ticket], Space]] = []

    def plan(self, nbytes: int) -> native.Extent:
        """Plans space for ``nbytes`` in the first volume, before :meth:`lay_out`."""
        extent, taken = native.extent_in(self.first, self.planned_nbytes, nbytes, self.sums)
        self.planned_nbytes += taken
        return extent

    def lay_out(self) -> None:
        """Creates the swap files of the first volume. Raises CapacityError if a disk has too little
        room, StorageError if it refuses."""
        if self.planned_nbytes:
            self._folders.lay_out(self.first, self.planned_nbytes, self._io)

    def allocate(self, nbytes: int, purpose: str, folder: str | None) -> StateArray:
        """Allocates an array of ``nbytes`` bytes in an added volume, in ``folder`` or over all
        folders. The space's old contents stay, so whole blocks must be written before they are
        read."""
        taken = round_up(nbytes, native.BLOCK_NBYTES)
        while (space := self._take(taken, folder)) is None:
            try:
                self._grow(taken, purpose, folder)
            except CapacityError:
                if not self._leaving:
                    raise
                for ticket in [pending for tickets, _ in self._leaving for pending in tickets]:
                    with suppress(InfinityError):  # whatever became of the transfer
                        ticket.wait()
        volume, offset, _ = space
        array = StateArray(
            Tier.NVME,
            torch.uint8,
            nbytes,
            native.Extent.in_volume(self.added[volume].volume, offset, taken),
        )
        self._places[array] = space
        return array

    def make_room(self, nbytes: int, purpose: str) -> None:
        """Adds a volume of ``nbytes``, if that is not free."""
        if nbytes > sum(
            size for volume, _, size in self.free_spaces if not self.added[volume].folder
        ):
            self._grow(nbytes, purpose, None)

    def free(self, array: StateArray, after: Sequence[native.Ticket]) -> None:
        """Frees the space of an array of :meth:`allocate`, which is reused once the transfers
        ``after`` complete. Idempotent."""
        if (space := self._places.pop(array, None)) is not None:
            self._leaving.append((list(after), space))

    def free_unused(self) -> None:
        """Frees all space without an array, after an exception. Only while no transfer runs."""
        self._leaving.clear()
        self.free_spaces = []
        for index, added in enumerate(self.added):
            taken = sorted(space[1:] for space in self._places.values() if space[0] == index)
            self.free_spaces += [
                (index, end, at - end)
                for end, at in zip([0, *map(sum, taken)], [*(at for at, _ in taken), added.nbytes])
                if end < at
            ]
        self.drop_unused()

    def drop_unused(self) -> None:
        """Closes swap files without a volume, left by an interrupted creation. Their space is free
        soon after."""
        used = {
            file
            for volume in (self.first, *(added.volume for added in self.added))
            for file in volume.files
        }
        for file in set(self._io.open_files) - used:
            self._io.drop_file(file)

    def close(self) -> None:
        """Drops the added volumes, after the shutdown of the I/O engine."""
        self._io = None
        self.added.clear()

    def _take(self, nbytes: int, folder: str | None) -> Space | None:
        """Takes a space of ``nbytes`` from the volumes added for ``folder``; None if there is
        none."""
        # Swapped at once: the garbage collector may append meanwhile
        leaving, self._leaving = self._leaving, []
        for tickets, space in leaving:
            if all(ticket.done for ticket in tickets):
                self.free_spaces.append(space)
            else:
                self._leaving.append((tickets, space))
        self.free_spaces = _merged(self.free_spaces)
        fitting = [
            space
            for space in self.free_spaces
            if space[2] >= nbytes and self.added[space[0]].folder == folder
        ]
        if not fitting:
            return None
        volume, offset, size = min(fitting, key=lambda space: space[2])
        self.free_spaces.remove((volume, offset, size))
        if size > nbytes:
            self.free_spaces.append((volume, offset + nbytes, size - nbytes))
        return volume, offset, nbytes

    def _grow(self, nbytes: int, purpose: str, folder: str | None) -> None:
        """Adds a volume with room for ``nbytes``, and for more if budget and disks allow: as much
        again as all before it, so that few arrays take little, and many few volumes."""
        growth = min(GROWTH_NBYTES, sum(added.nbytes for added in self.added))
        folders = self._folders if folder is None else SwapFolders([folder])
        account = self._ledger.accounts[Tier.NVME]
        room = self._ledger.room(Tier.NVME)
        room = min(growth, growth if room is None else room, folders.free_nbytes() // 2)
        size = max(nbytes, room // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES)
        sums = native.sums_nbytes(size) - self.covered_nbytes
        charges = [
            self._ledger.reserve(Tier.NVME, size, purpose),
            self._ledger.reserve(Tier.HOST, max(0, sums), f"checksums of {purpose}"),
        ]
        volume = native.Volume()
        folders.lay_out(volume, size, self._io)
        # One statement cannot be interrupted: the volume is known, or drop_unused() finds its
        # files.
        self.added, account.planned_nbytes = (
            [*self.added, _Added(volume, folder, size, charges)],
            account.planned_nbytes + size,
        )
        self._ledger.accounts[Tier.HOST].planned_nbytes += charges[1].nbytes
        self.covered_nbytes = max(0, -sums)
        self.free_spaces.append((len(self.added) - 1, 0, size))


def _merged(spaces: list[Space]) -> list[Space]:
    """Returns ``spaces`` in order, with adjacent ones joined."""
    joined: list[Space] = []
    for volume, offset, size in sorted(spaces):
        if joined and joined[-1][0] == volume and sum(joined[-1][1:]) == offset:
            joined[-1] = (volume, joined[-1][1], joined[-1][2] + size)
        else:
            joined.append((volume, offset, size))
    return joined
