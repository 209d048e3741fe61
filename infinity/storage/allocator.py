"""ArrayAllocator: takes memory, and space in swap files, for flat arrays.

swap file   this job's bytes in a folder of ``nvme_paths``. It has no name there: nobody else can open or remove it, there is
            nothing to lock or to clean up, and its space is free when the process ends, however it does
service     a small staging buffer of the store's own, for reads and writes outside the training loop
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import weakref
from collections.abc import Sequence

import torch

from .. import native
from ..errors import CapacityError, ConfigError, StorageError
from ..machine import disk_profile, processors
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.sizes import format_nbytes, round_up
from ..machine.tiers import Tier
from ..machine.traffic import Traffic
from .arrays import StateArray

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
GROWTH_NBYTES = 256 * MIB  # of a file that is added later, where there is room
MAX_DEPTH = 256  # transfers in flight over all disks


class ArrayAllocator:
    """Allocates arrays at their homes: all of them before :meth:`open`, and more later where there is room."""

    def __init__(
        self,
        nvme_paths: Sequence[str],
        ledger: Ledger,
        traffic: Traffic,
        *,
        service_nbytes: int,
        checksums: bool = True,
        faults: native.FaultPlan | None = None,
        device: Device | None = None,
    ):
        self.ledger, self.traffic, self.checksums = ledger, traffic, checksums
        self.device = device or Device(torch.device("cpu"), traffic)
        self.pid = os.getpid()
        self._paths = tuple(nvme_paths)
        self._shares = disk_profile.shares(self._paths)
        profiles = [disk_profile.disk_profile(path) for path in self._paths]
        self.io = native.make_io_engine(
            faults,
            block_nbytes=max((profile.block_nbytes for profile in profiles), default=MIB),
            depth=min(MAX_DEPTH, sum(profile.depth for profile in profiles) or 1),
        )
        self._file_nbytes = [0] * len(self._paths)
        self._charges: list[native.Charge] = []
        self._added: list[tuple[int, int, int]] = []  # files that were added: which, 0, and their bytes
        self._places: weakref.WeakSet[StateArray] = weakref.WeakSet()  # in those, that somebody has
        self._spaces: list[tuple[int, int, int]] = []  # file, offset and bytes that are free there
        self._leaving: list[tuple[list[native.Ticket], tuple[int, int, int]]] = []  # free when these transfers are over
        self._service_nbytes = service_nbytes
        self._service: native.PinnedPool | None = None
        self._is_open = False
        self._absent: list[native.Region] = []  # whose pages are to come
        self._pages: native.Pages | None = None  # that are coming
        self.staging: native.PinnedPool | None = None  # weights on their way to the device

    def allocate(self, tier: Tier, dtype: torch.dtype, numel: int, what: str) -> StateArray:
        """Allocates a zeroed array of ``numel`` elements at home on ``tier``. Raises CapacityError over the tier's budget."""
        nbytes = numel * dtype.itemsize
        charge = self.ledger.reserve(tier, round_up(nbytes, native.BLOCK_NBYTES), what)  # memory comes in pages
        if tier is Tier.NVME:
            file = self._next_file(nbytes)
            extent = native.Extent.in_file(file, self._file_nbytes[file], nbytes)
            self._file_nbytes[file] += nbytes
            return StateArray(tier, dtype, numel, extent, None, charge)
        region = None
        if tier is Tier.DEVICE and not self.device.is_host:
            flat = self.device.zeros(numel, dtype, what)
        else:
            region = self.make_region(nbytes)
            flat = native.tensor_at(region, region.address, numel, dtype)
        return StateArray(tier, dtype, numel, native.Extent.in_memory(flat.data_ptr(), nbytes, region), flat, charge, region)

    def _next_file(self, nbytes: int) -> int:
        """The file that would be done first with its bytes and these, at the measured rate of its disk."""
        usable = [index for index, share in enumerate(self._shares) if share]
        return min(usable, key=lambda index: (self._file_nbytes[index] + nbytes) / self._shares[index])

    def make_region(self, nbytes: int, *, copied: bool = True) -> native.Region:
        """Makes page-aligned memory. ``copied``: by the device, with which it is registered. Every page is present when this
        returns or, of what comes before :meth:`open`, after :meth:`await_pages`: the kernel clears them while the values that will
        be in them are read and copied. A device registers pages that are there."""
        later = not self._is_open and self.device.is_host
        region = native.Region(nbytes, huge_pages=True, touch_threads=0 if later else processors.for_pages())
        if later:
            self._absent.append(region)
        if copied:
            self.device.pin(region)
        return region

    def open(self, regions: Sequence[native.Region], *, staging: native.PinnedPool | None = None) -> None:
        """Creates the swap files at full size and tells the I/O engine about them and about ``regions`` that it moves bytes from and
        to. ``staging``: the pool of weights on their way to the device.

        Raises CapacityError when a disk has too little room, StorageError when it refuses.
        """
        service = self.make_region(self._service_nbytes, copied=False)
        self._service = native.PinnedPool(service)
        self._charges.append(self.ledger.reserve(Tier.HOST, self._service_nbytes, "the store's service buffer"))
        for path, nbytes in zip(self._paths, self._file_nbytes):
            # Extents refer to files by position, so a folder without bytes still gets a (smallest) file.
            self._create(path, max(nbytes, native.BLOCK_NBYTES))
        self.io.register([(region.address, region.nbytes) for region in (*regions, service)])
        self.staging = staging
        self._is_open = True
        self._pages = native.Pages(self._absent, processors.for_pages())
        self._absent = []

    def await_pages(self) -> None:
        """Returns when every page is present. Raises what the thread that sees to it raised."""
        if self._pages is not None:
            self._pages.wait()
            self._pages = None

    def _create(self, folder: str, nbytes: int) -> int:
        """Makes a swap file of ``nbytes`` in ``folder``. Raises ConfigError where there is no such folder, CapacityError where there
        is too little room, StorageError where it cannot be written."""
        if not os.path.isdir(folder):
            raise ConfigError(f"nvme_paths: there is no folder {folder}. Create it, or name another.")
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            raise CapacityError(
                f"NVMe home needs {format_nbytes(nbytes)} at {folder} but {format_nbytes(free)} is free. "
                f"Free {format_nbytes(nbytes - free)}, name more folders in nvme_paths, or keep more on the host: "
                "Config(optimizer='host')."
            )
        if (kind := disk_profile.file_system(folder)) in disk_profile.IN_MEMORY:
            logger.warning("nvme_paths: %s is on %s, which is memory: what has its home there takes memory beside host_memory, and may end in "
                           "the process being killed. Name a folder on a disk.", folder, kind)  # fmt: skip
        try:
            return self.io.create_swap_file(folder, nbytes)
        except StorageError as error:
            if error.errno == errno.ENOSPC:
                raise CapacityError(
                    f"NVMe home needs {format_nbytes(nbytes)} at {folder}, and the disk filled up while it was "
                    "being reserved. Free that much, or name more folders in nvme_paths."
                ) from error
            raise StorageError(
                error.errno, f"cannot make a swap file in {folder}: {os.strerror(error.errno)}. It must be writable; "
                "name another folder in nvme_paths", folder,
            ) from error  # fmt: skip

    def allocate_more(self, tier: Tier, nbytes: int, what: str, *, folder: str | None = None) -> StateArray:
        """Allocates ``nbytes`` bytes as :meth:`allocate` does, and also after :meth:`open`; the plan grows by as much. On disk they
        are part of a further file, in ``folder`` or, without one, on the fastest disk."""
        if tier is not Tier.NVME:
            array = self.allocate(tier, torch.uint8, nbytes, what)
            self.ledger.accounts[tier].planned_nbytes += round_up(nbytes, native.BLOCK_NBYTES)
            return array
        if (space := self._take_space(nbytes)) is None:
            self._grow(nbytes, what, folder)
            space = self._take_space(nbytes)
        array = StateArray(tier, torch.uint8, nbytes, native.Extent.in_file(*space, nbytes))
        self._places.add(array)
        return array

    def free_more(self, array: StateArray, *, after: Sequence[native.Ticket] = ()) -> None:
        """Gives back what :meth:`allocate_more` gave. Space on disk is taken anew once the transfers ``after`` are over."""
        if array.tier is Tier.NVME:
            self._places.discard(array)
            self._leaving.append((list(after), (array.extent.file, array.extent.offset, array.nbytes)))
        else:
            array.charge.release()
            self.ledger.accounts[array.tier].planned_nbytes -= round_up(array.nbytes, native.BLOCK_NBYTES)
            array.flat = array.extent = None

    def _take_space(self, nbytes: int) -> tuple[int, int] | None:
        """File and offset of ``nbytes`` in the files that were added; None when there is no such space."""
        leaving, self._leaving = self._leaving, []  # at once: what the collector finds meanwhile is added
        for tickets, space in leaving:
            if all(ticket.done for ticket in tickets):
                self._spaces.append(space)
            else:
                self._leaving.append((tickets, space))
        self._spaces = _joined(self._spaces)
        fitting = [space for space in self._spaces if space[2] >= nbytes]
        if not fitting:
            return None
        file, offset, size = min(fitting, key=lambda space: space[2])
        self._spaces.remove((file, offset, size))
        if size > nbytes:
            self._spaces.append((file, offset + nbytes, size - nbytes))
        return file, offset

    def need_service(self) -> None:
        """Makes a service buffer for a disk where the plan had none. Raises CapacityError over the budget."""
        if self._service.capacity_nbytes < native.CHECKSUM_NBYTES:
            charge = self.ledger.reserve(Tier.HOST, MIB, "the store's service buffer")
            self._charges.append(charge)
            self.ledger.accounts[Tier.HOST].planned_nbytes += MIB
            self._service = native.PinnedPool(self.make_region(MIB, copied=False))
            self._service_nbytes = MIB

    def empty(self, array: StateArray) -> None:
        """Gives the memory of ``array`` back to the system; what was in it is elsewhere. Its address stays."""
        if array.region is not None:
            array.region.discard()
        else:
            array.flat.untyped_storage().resize_(0)

    def refill(self, array: StateArray) -> None:
        """Takes memory for an array that was emptied. Twice is once."""
        if array.region is None:
            array.flat.untyped_storage().resize_(array.nbytes)
        elif not array.region.pinned:
            array.region.populate(processors.for_pages())
            self.device.pin(array.region)

    def _grow(self, nbytes: int, what: str, folder: str | None) -> None:
        """A further file with room for ``nbytes``, and for more of the kind where budget and disk allow."""
        account = self.ledger.accounts[Tier.NVME]
        room = GROWTH_NBYTES if account.budget_nbytes is None else account.budget_nbytes - account.charged_nbytes
        if folder is None:
            folder = self._paths[max(range(len(self._paths)), key=self._shares.__getitem__)]
        if not os.path.isdir(folder):
            raise ConfigError(f"there is no folder {folder}: create it, or name another")
        room = min(GROWTH_NBYTES, room, shutil.disk_usage(folder).free // 2)
        size = max(nbytes, room // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES)
        charge = self.ledger.reserve(Tier.NVME, size, what)
        file = self._create(folder, size)
        self._charges.append(charge)
        account.planned_nbytes += size
        self._added.append((file, 0, size))
        self._spaces.append((file, 0, size))


def _joined(spaces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """``spaces`` (file, offset, bytes) in order, those that touch made one."""
    joined: list[tuple[int, int, int]] = []
    for file, offset, size in sorted(spaces):
        if joined and joined[-1][0] == file and sum(joined[-1][1:]) == offset:
            joined[-1] = (file, joined[-1][1], joined[-1][2] + size)
        else:
            joined.append((file, offset, size))
    return joined
