"""ArrayAllocator: allocates memory, and space in swap files, for flat arrays.

swap file   this job's bytes in a folder of ``nvme_paths``. It has no name: no other process can
            open or remove it, nothing needs a lock or cleaning up, and its space is free when the
            process ends, in whatever way
volume      one range of bytes in stripes over a swap file in every folder
service     a small staging buffer of the store's own, for transfers outside the training loop
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .. import native
from ..machine import processors
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.sizes import round_up
from ..machine.tiers import Tier
from ..machine.traffic import Traffic
from .arrays import StateArray
from .staging import Staging
from .swap_folders import SwapFolders

MIB = 1024 * 1024
GROWTH_NBYTES = 256 * MIB  # of a volume that is added later, if there is room
MAX_DEPTH = 256  # transfers in flight on one disk

Space = tuple[int, int, int]  # number of the added volume, offset, bytes


@dataclass(frozen=True)
class _Added:
    """A volume that was added after the store was opened."""

    volume: native.Volume
    folder: str | None  # for arrays of this folder; None: all folders
    nbytes: int
    charge: native.Charge


class MakeRegion(Protocol):
    """The interface of :class:`native.Region`'s constructor."""

    def __call__(self, nbytes: int, *, huge_pages: bool, touch_threads: int) -> native.Region:
        """Allocates a region."""


class ArrayAllocator:
    """Allocates arrays at their homes: the plan's before :meth:`open`, and more later if there is
    room."""

    def __init__(
        self,
        nvme_paths: Sequence[str],
        ledger: Ledger,
        traffic: Traffic,
        *,
        service_nbytes: int,
        checksums: bool = True,
        sampled: bool = False,
        layer: native.BackendLayer | None = None,
        device: Device | None = None,
        rank: int = 0,
        ranks: int = 1,
    ):
        """``layer``: the I/O engine, as for :func:`native.make_io_engine`."""
        self.ledger, self.traffic, self.checksums = ledger, traffic, checksums
        self.device = device or Device(torch.device("cpu"), traffic)
        self.pid = os.getpid()
        self._folders = SwapFolders(nvme_paths, rank=rank, ranks=ranks)
        profiles = self._folders.profiles
        self.io = native.make_io_engine(
            layer=layer,
            block_nbytes=max((profile.block_nbytes for profile in profiles), default=MIB),
            depth=min(MAX_DEPTH, max((profile.depth for profile in profiles), default=1)),
            work_threads=processors.for_checksums(),
        )
        self._first = native.Volume()  # laid out by open()
        self._nbytes = 0  # of the first volume
        self._added: list[_Added] = []
        self._charges: list[native.Charge] = []
        # Spaces in use
        self._places: weakref.WeakKeyDictionary[StateArray, Space] = weakref.WeakKeyDictionary()
        self._spaces: list[Space] = []  # free spaces in added volumes
        # Free once the transfers complete
        self._leaving: list[tuple[list[native.Ticket], Space]] = []
        self._service_nbytes = service_nbytes
        self._service: native.PinnedPool | None = None
        self._is_open = False
        self._absent: list[native.Region] = []  # pages not yet populated
        self._pages: native.Pages | None = None  # being populated
        self.staging = Staging(self.io, self.device, checksums=checksums, sampled=sampled)

    def allocate(
        self,
        tier: Tier,
        dtype: torch.dtype,
        numel: int,
        what: str,
        *,
        make: MakeRegion = native.Region,
    ) -> StateArray:
        """Allocates a zeroed array of ``numel`` elements at home on ``tier``; ``make`` allocates
        host memory. Raises CapacityError over the tier's budget."""
        nbytes = numel * dtype.itemsize
        # Memory comes in pages
        charge = self.ledger.reserve(tier, round_up(nbytes, native.BLOCK_NBYTES), what)
        if tier is Tier.NVME:
            extent = native.Extent.in_volume(self._first, self._nbytes, _on_disk(nbytes))
            self._nbytes += extent.nbytes
            return StateArray(tier, dtype, numel, extent, None, charge)
        region = None
        if tier is Tier.DEVICE and not self.device.is_host:
            flat = self.device.zeros(numel, dtype, what)
        else:
            region = self.make_region(nbytes, make=make)
            flat = native.tensor_at(region, region.address, numel, dtype)
        return StateArray(
            tier,
            dtype,
            numel,
            native.Extent.in_memory(flat.data_ptr(), nbytes, region),
            flat,
            charge,
            region,
        )

    def make_region(
        self, nbytes: int, *, copied: bool = True, make: MakeRegion = native.Region
    ) -> native.Region:
        """Allocates page-aligned memory. ``copied``: registered with the device, which copies it.

        Every page is populated on return. Before :meth:`open` on the host only after
        :meth:`await_pages`: the kernel clears pages while values are read and copied. A device
        registers only populated pages.
        """
        later = not self._is_open and self.device.is_host
        region = make(nbytes, huge_pages=True, touch_threads=0 if later else processors.for_pages())
        if later:
            self._absent.append(region)
        if copied:
            self.device.pin(region)
        return region

    def open(
        self,
        regions: Sequence[native.Region],
        *,
        staging: native.PinnedPool | None = None,
        past_host: bool = False,
    ) -> None:
        """Creates the swap files at full size and registers them and ``regions``, its transfer
        memory, with the I/O engine. ``staging``: the pool of weights on their way to the device.
        ``past_host``: those may bypass host memory.

        Raises CapacityError if a disk has too little room, StorageError if it refuses.
        """
        service = self.make_region(self._service_nbytes, copied=False)
        self._service = native.PinnedPool(service)
        self._charges.append(
            self.ledger.reserve(Tier.HOST, self._service_nbytes, "the store's service buffer")
        )
        if self._nbytes:
            self._folders.lay_out(self._first, self._nbytes, self.io)
        self.io.register([(region.address, region.nbytes) for region in (*regions, service)])
        if staging is not None:
            self.staging.open(staging, past_host=past_host)
        self._is_open = True
        self._pages = native.Pages(self._absent, processors.for_pages())
        self._absent = []

    def await_pages(self) -> None:
        """Blocks until every page is populated. Raises the error of the thread that populates
        them."""
        if self._pages is not None:
            self._pages.wait()
            self._pages = None

    def allocate_more(
        self, tier: Tier, nbytes: int, what: str, *, folder: str | None = None
    ) -> StateArray:
        """Allocates ``nbytes`` bytes as :meth:`allocate` does, also after :meth:`open`; the plan
        grows by as much.

        On disk they are in an added volume, in ``folder`` or over all folders. Their old contents
        stay, so whole blocks must be written before they are read.
        """
        if tier is not Tier.NVME:
            array = self.allocate(tier, torch.uint8, nbytes, what)
            self.ledger.accounts[tier].planned_nbytes += round_up(nbytes, native.BLOCK_NBYTES)
            return array
        taken = _on_disk(nbytes)
        if (space := self._take_space(taken, folder)) is None:
            self._grow(taken, what, folder)
            space = self._take_space(taken, folder)
        volume, offset, _ = space
        array = StateArray(
            tier,
            torch.uint8,
            nbytes,
            native.Extent.in_volume(self._added[volume].volume, offset, taken),
        )
        self._places[array] = space
        return array

    def allocate_later(self, tier: Tier, dtype: torch.dtype, numel: int, what: str) -> StateArray:
        """Allocates an array as :meth:`allocate` does, after :meth:`open`. :meth:`free_more` frees
        it."""
        array = self.allocate_more(tier, numel * dtype.itemsize, what)
        array.dtype, array.numel = dtype, numel
        if array.flat is not None:
            array.flat = array.flat.view(dtype)
        return array

    def free_more(self, array: StateArray, *, after: Sequence[native.Ticket] = ()) -> None:
        """Frees an array of :meth:`allocate_more`. Space on disk is reused once the transfers
        ``after`` complete."""
        if array.tier is Tier.NVME:
            if (space := self._places.pop(array, None)) is not None:
                self._leaving.append((list(after), space))
        else:
            array.charge.release()
            self.ledger.accounts[array.tier].planned_nbytes -= round_up(
                array.nbytes, native.BLOCK_NBYTES
            )
            array.flat = array.extent = None

    def _take_space(self, nbytes: int, folder: str | None) -> Space | None:
        """Takes a space of ``nbytes`` from the volumes added for ``folder``; None if there is
        none."""
        # Swapped at once: the garbage collector may append meanwhile
        leaving, self._leaving = self._leaving, []
        for tickets, space in leaving:
            if all(ticket.done for ticket in tickets):
                self._spaces.append(space)
            else:
                self._leaving.append((tickets, space))
        self._spaces = _joined(self._spaces)
        fitting = [
            space
            for space in self._spaces
            if space[2] >= nbytes and self._added[space[0]].folder == folder
        ]
        if not fitting:
            return None
        volume, offset, size = min(fitting, key=lambda space: space[2])
        self._spaces.remove((volume, offset, size))
        if size > nbytes:
            self._spaces.append((volume, offset + nbytes, size - nbytes))
        return volume, offset, nbytes

    def need_service(self) -> None:
        """Allocates a service buffer for disks if the plan had none. Raises CapacityError over the
        budget."""
        if self._service.capacity_nbytes < native.CHECKSUM_NBYTES:
            charge = self.ledger.reserve(Tier.HOST, MIB, "the store's service buffer")
            self._charges.append(charge)
            self.ledger.accounts[Tier.HOST].planned_nbytes += MIB
            self._service = native.PinnedPool(self.make_region(MIB, copied=False))
            self._service_nbytes = MIB

    def empty(self, array: StateArray) -> None:
        """Frees the memory of ``array``, whose contents are elsewhere. Its address stays."""
        if array.region is not None:
            array.region.discard()
        else:
            array.flat.untyped_storage().resize_(0)

    def refill(self, array: StateArray) -> None:
        """Allocates the memory of an array that was emptied. Idempotent."""
        if array.region is None:
            array.flat.untyped_storage().resize_(array.nbytes)
        elif not array.region.pinned:
            array.region.populate(processors.for_pages())
            self.device.pin(array.region)

    def _grow(self, nbytes: int, what: str, folder: str | None) -> None:
        """Adds a volume with room for ``nbytes``, and for more if budget and disks allow."""
        folders = self._folders if folder is None else SwapFolders([folder])
        account = self.ledger.accounts[Tier.NVME]
        room = (
            GROWTH_NBYTES
            if account.budget_nbytes is None
            else account.budget_nbytes - account.charged_nbytes
        )
        room = min(GROWTH_NBYTES, room, folders.free_nbytes() // 2)
        size = max(nbytes, room // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES)
        charge = self.ledger.reserve(Tier.NVME, size, what)
        volume = native.Volume()
        folders.lay_out(volume, size, self.io)
        added = _Added(volume, folder, size, charge)
        # One statement cannot be interrupted: the volume is known, or drop_unused() finds its
        # files.
        self._added, account.planned_nbytes = [*self._added, added], account.planned_nbytes + size
        self._spaces.append((len(self._added) - 1, 0, size))

    def drop_unused(self) -> None:
        """Closes swap files without a volume, left by an interrupted creation. Their space is free
        soon after."""
        used = {
            file
            for volume in (self._first, *(added.volume for added in self._added))
            for file in volume.files
        }
        for file in self.io.open_files:
            if file not in used:
                self.io.drop_file(file)


def _on_disk(nbytes: int) -> int:
    """Returns how much disk space ``nbytes`` take. Disks transfer whole blocks, so spaces start and
    end at one."""
    return round_up(nbytes, native.BLOCK_NBYTES)


def _joined(spaces: list[Space]) -> list[Space]:
    """Returns ``spaces`` in order, with adjacent ones joined."""
    joined: list[Space] = []
    for volume, offset, size in sorted(spaces):
        if joined and joined[-1][0] == volume and sum(joined[-1][1:]) == offset:
            joined[-1] = (volume, joined[-1][1], joined[-1][2] + size)
        else:
            joined.append((volume, offset, size))
    return joined
