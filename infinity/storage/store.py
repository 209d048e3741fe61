"""ShardStore: gives flat arrays their homes, in memory or in swap files.

array       one flat array of one shard (its weights, its moments, ...), with its tier and its extent
swap file   this job's bytes in a folder of ``nvme_paths``. It has no name there: nobody else can open or remove it, there is
            nothing to lock or to clean up, and its space is free when the process ends, however it does
service     a small staging buffer of the store's own, for reads and writes outside the training loop

A transfer keeps the lease of its memory until it is over (:mod:`csrc/io`), so whatever interrupts a wait here, no memory that the
disk still uses is given to anybody else.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from .. import native
from ..errors import CapacityError, ConfigError, CorruptionError, InfinityError, InternalError, StorageError, UsageError
from ..machine import disk_profile, processors
from ..machine.device import Device, Event
from ..machine.ledger import Ledger
from ..machine.sizes import format_nbytes, round_up
from ..machine.tiers import Tier
from ..machine.traffic import Traffic
from .arrays import bytes_of, StateArray
from .write_behind import WriteBehind

logger = logging.getLogger(__name__)

MIB = 1024 * 1024
WRITES_AT_ONCE = 4  # of a write outside the training loop
GROWTH_NBYTES = 256 * MIB  # of a file that is added later, where there is room
MAX_DEPTH = 256  # transfers in flight over all disks


class ShardStore:
    """Allocates arrays at their homes, then moves parts of them for everything outside the training loop."""

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
        self.failure: Callable[[], InfinityError] | None = None
        self.on_failure: Callable[[BaseException], None] = lambda error: None  # tells who else has to know
        self._paths = tuple(nvme_paths)
        self._shares = disk_profile.shares(self._paths)
        profiles = [disk_profile.disk_profile(path) for path in self._paths]
        self.engine = native.make_io_engine(
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
        self._behind: WriteBehind | None = None  # that has part of the service buffer
        self.staging: native.PinnedPool | None = None  # weights on their way to the device
        self._returning: deque[tuple[Event, list[native.Lease]]] = deque()  # slots that the device still copies from

    # --- allocation ---

    def allocate(self, tier: Tier, dtype: torch.dtype, numel: int, what: str) -> StateArray:
        """A zeroed array of ``numel`` elements at home on ``tier``. Raises CapacityError over the tier's budget."""
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
        return StateArray(tier, dtype, numel, native.Extent.in_memory(flat.data_ptr(), nbytes, region), flat, charge)

    def _next_file(self, nbytes: int) -> int:
        """The file that would be done first with its bytes and these, at the measured rate of its disk."""
        usable = [index for index, share in enumerate(self._shares) if share]
        return min(usable, key=lambda index: (self._file_nbytes[index] + nbytes) / self._shares[index])

    def make_region(self, nbytes: int, *, copied: bool = True) -> native.Region:
        """Page-aligned memory. ``copied``: by the device, with which it is registered. Every page is present when this
        returns or, of what comes before :meth:`open`, after :meth:`await_pages`: the kernel clears them while the values
        that will be in them are read and copied. A device registers pages that are there."""
        later = not self._is_open and self.device.is_host
        region = native.Region(nbytes, huge_pages=True, touch_threads=0 if later else processors.for_pages())
        if later:
            self._absent.append(region)
        if copied:
            self.device.pin(region)
        return region

    def open(self, staging: Sequence[native.Region]) -> None:
        """Creates the swap files at full size and tells the I/O engine about them and the staging memory.

        Raises CapacityError when a disk has too little room, StorageError when it refuses.
        """
        service = self.make_region(self._service_nbytes, copied=False)
        self._service = native.PinnedPool(service)
        self._charges.append(self.ledger.reserve(Tier.HOST, self._service_nbytes, "the store's service buffer"))
        for path, nbytes in zip(self._paths, self._file_nbytes):
            # Extents refer to files by position, so a folder without bytes still gets a (smallest) file.
            self._create(path, max(nbytes, native.BLOCK_NBYTES))
        self.engine.register([(region.address, region.nbytes) for region in (*staging, service)])
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
            return self.engine.create_swap_file(folder, nbytes)
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

    def allocate_more(self, tier: Tier, nbytes: int, what: str) -> StateArray:
        """Like :meth:`allocate`, of bytes, and also after :meth:`open`; the plan grows by as much. On disk they are part
        of a further file."""
        if tier is not Tier.NVME:
            array = self.allocate(tier, torch.uint8, nbytes, what)
            self.ledger.accounts[tier].planned_nbytes += round_up(nbytes, native.BLOCK_NBYTES)
            return array
        if (space := self._take_space(nbytes)) is None:
            self._grow(nbytes, what)
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

    def _grow(self, nbytes: int, what: str) -> None:
        """A further file with room for ``nbytes``, and for more of the kind where budget and disk allow."""
        account = self.ledger.accounts[Tier.NVME]
        room = GROWTH_NBYTES if account.budget_nbytes is None else account.budget_nbytes - account.charged_nbytes
        fastest = self._paths[max(range(len(self._paths)), key=self._shares.__getitem__)]
        room = min(GROWTH_NBYTES, room, shutil.disk_usage(fastest).free // 2)
        size = max(nbytes, room // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES)
        charge = self.ledger.reserve(Tier.NVME, size, what)
        file = self._create(fastest, size)
        self._charges.append(charge)
        account.planned_nbytes += size
        self._added.append((file, 0, size))
        self._spaces.append((file, 0, size))

    # --- after an exception ---

    def rebuild(self) -> None:
        """What nobody has any more is free, whatever an exception left of the books. Only while nothing is in flight."""
        for pool in (self._service, self.staging):
            if pool is not None:
                self.drain(pool)
        self._returning.clear()
        self._leaving.clear()
        taken = sorted((array.extent.file, array.extent.offset, array.nbytes) for array in self._places)
        self._spaces = [space for added in self._added for space in _between(added, taken)]

    # --- staging slots ---

    def take_back(self, slots: list[native.Lease], moment: Event) -> None:
        """Gives ``slots`` back to the staging pool once ``moment`` has come."""
        self._returning.append((moment, slots))
        self.collect()

    def collect(self, *, wait: bool = False) -> bool:
        """Gives back the slots that nothing copies from any more; with ``wait``, at least the oldest. Whether there were any."""
        found = False
        while self._returning and (self._returning[0][0].done or (wait and not found)):
            moment, slots = self._returning.popleft()
            try:
                moment.wait()
            except (InfinityError, RuntimeError):
                pass  # that copy failed: it is raised where its bytes are waited for, not where another unit wants a slot
            for slot in slots:
                slot.release()
            found = True
        return found

    # --- moving parts of arrays, synchronously ---

    def read(self, array: StateArray, begin: int, end: int) -> torch.Tensor:
        """Elements ``begin`` to ``end`` as a new CPU tensor. Checksums are verified on the way from the disk."""
        self.check_process()
        out = torch.empty(end - begin, dtype=array.dtype, device="cpu")
        with self.guarding():
            if array.tier is not Tier.NVME:
                return out.copy_(array.flat[begin:end])
            if self._behind is not None:
                self._behind.flush()
            for offset, nbytes, inner, outer in self._blocks(array, begin, end):
                with self.borrow(nbytes) as lease:
                    block = self.read_block(array, offset, lease, nbytes)
                    out[outer] = block.view(array.dtype)[inner]
            return out

    def write(self, array: StateArray, begin: int, source: torch.Tensor, *, version: int) -> None:
        """Writes the flat CPU tensor ``source`` at element ``begin``; its blocks carry ``version`` from then on. Interrupted,
        some of it is written: doing it again makes it whole."""
        self.check_process()
        end = begin + source.numel()
        if array.tier is not Tier.NVME:
            source = source.to(array.dtype).contiguous()
            copy = native.copy_flat if array.flat.is_cpu else torch.Tensor.copy_
            copy(array.flat[begin:end], source)
        else:
            if self._behind is not None:
                self._behind.flush()
            tickets: deque[native.Ticket] = deque()

            def finish_first() -> bool:
                if tickets:
                    tickets[0].wait()
                    tickets.popleft()
                    return True
                return False

            with self.guarding():
                for offset, nbytes, inner, outer in self._blocks(array, begin, end, parts=WRITES_AT_ONCE):
                    lease = self.take_lease(self._service, nbytes, finish_first)
                    if inner.stop - inner.start < nbytes // array.dtype.itemsize:
                        block = self.read_block(array, offset, lease, nbytes)
                    else:
                        block = bytes_of(self._service, lease, nbytes)
                    block.view(array.dtype)[inner] = source[outer]
                    tickets.append(self.engine.write(array.extent, offset, lease.address, nbytes, lease=lease))
                    del lease, block  # the disk has it now
                while finish_first():
                    pass
        array.extent.version = version

    def read_block(self, array: StateArray, offset: int, lease: native.Lease, nbytes: int) -> torch.Tensor:
        """Whole checksummed blocks of an array on disk, from byte ``offset`` on, as a tensor over ``lease``."""
        self.engine.read(array.extent, offset, lease.address, nbytes, lease=lease).wait()
        self.verify(array, lease.address, nbytes, offset=offset)
        return bytes_of(self._service, lease, nbytes)

    def verify(self, array: StateArray, address: int, nbytes: int, *, offset: int = 0) -> None:
        """Raises CorruptionError when bytes read from ``offset`` of ``array`` are not those last written there."""
        if self.checksums:
            self.engine.verify(array.extent, offset, address, nbytes)

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[native.Lease]:
        """A piece of the service buffer. Waits for transfers that still have it."""
        lease = self.take_lease(self._service, nbytes)
        try:
            yield lease
        finally:
            lease.release()

    def take_lease(self, pool: native.PinnedPool, nbytes: int, give_up: Callable[[], bool] = lambda: False) -> native.Lease:
        """A lease of ``nbytes``: waits for transfers that still use the pool, then asks ``give_up`` to let something go, which
        says whether it did. Raises InternalError when there is nothing left to wait for."""
        while (lease := pool.try_lease(nbytes)) is None:
            self.refuse_hung()
            if pool.wait_for_transfer():
                continue
            if (lease := pool.try_lease(nbytes)) is not None:  # the last transfer ended between the two looks
                return lease
            if not give_up():
                capacity = format_nbytes(pool.capacity_nbytes)
                raise InternalError(f"{format_nbytes(nbytes)} of a staging buffer of {capacity} are wanted, and it is in use")
        return lease

    def drain(self, pool: native.PinnedPool) -> None:
        """Waits until no transfer uses ``pool``, then takes every lease back: whatever held one was given up."""
        while pool.wait_for_transfer():
            self.refuse_hung()
        pool.take_back_all()

    def refuse_hung(self) -> None:
        """Raises StorageError where a disk has not answered: what it was given is never free again."""
        if self.engine.gave_up:
            raise StorageError(errno.ETIMEDOUT, "a disk has not answered, and may still write to the memory it was given: end this "
                               "process and resume from the last checkpoint", self._paths[0] if self._paths else None)  # fmt: skip

    def _blocks(self, array: StateArray, begin: int, end: int, *, parts: int = 1) -> Iterator[tuple[int, int, slice, slice]]:
        """The checksum-aligned pieces that cover elements ``begin`` to ``end``, each of at most one of ``parts`` of the service
        buffer.

        Yields (byte offset in the extent, bytes, elements inside them, elements of the caller's tensor).
        """
        size, service_nbytes = array.dtype.itemsize, self._service.capacity_nbytes
        parts = min(parts, service_nbytes // native.CHECKSUM_NBYTES)
        step = service_nbytes // parts // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES
        offset = begin * size // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES
        while offset < end * size:
            covered = min(step, -(-(end * size - offset) // native.CHECKSUM_NBYTES) * native.CHECKSUM_NBYTES)
            nbytes = min(covered, array.nbytes - offset)
            first, last = offset // size, (offset + nbytes) // size
            low, high = max(begin, first), min(end, last)
            yield offset, nbytes, slice(low - first, high - first), slice(low - begin, high - begin)
            offset += nbytes

    @contextmanager
    def writing_behind(self) -> Iterator[WriteBehind]:
        """For many writes, of which those that follow each other on disk become large ones that nobody waits for. All is at
        home when the block ends. One that raises leaves some of it unwritten: the store is of no use then. Raises UsageError
        inside another one."""
        if self._behind is not None:
            raise UsageError("this store is being written behind already")
        writer = self._behind = WriteBehind(self, self._service)
        try:
            yield writer
            writer.flush()
        finally:
            self._behind = None
            writer.close()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """The disk's first error inside any such block ends all of them: what it left half done must not be trained
        on, read or saved."""
        if self.failure is not None:
            raise self.failure()
        try:
            yield
        except StorageError as error:
            self.failure = partial(StorageError, error.errno, error.strerror, error.filename)
            self.on_failure(error)
            raise
        except CorruptionError as error:
            # Made anew each time: the error itself would keep its traceback, and with it the model, alive.
            self.failure = partial(CorruptionError, *error.args)
            self.on_failure(error)
            raise

    def check_process(self) -> None:
        """Raises UsageError in a forked child, which has neither the engine's threads nor a ring of its own."""
        if os.getpid() != self.pid:
            raise UsageError(
                f"this model was wrapped in process {self.pid} and cannot be used in its forked child {os.getpid()}: "
                "wrap a model in the child, or start it with the spawn method"
            )

    def close(self) -> None:
        """Closes the swap files, which frees their space, and gives the memory back. Interrupted, it is to be called again."""
        if self._pages is not None:
            self._pages.stop()
            self._pages = None
        self._absent = []
        if self.engine is not None:  # waits for what is in flight and closes the files, whoever still refers to it
            self.engine.shut_down()
        self.engine = None
        self._returning.clear()
        self._service = self.staging = None
        while self._charges:
            self._charges[-1].release()
            self._charges.pop()


def _joined(spaces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """``spaces`` (file, offset, bytes) in order, those that touch made one."""
    joined: list[tuple[int, int, int]] = []
    for file, offset, size in sorted(spaces):
        if joined and joined[-1][0] == file and sum(joined[-1][1:]) == offset:
            joined[-1] = (file, joined[-1][1], joined[-1][2] + size)
        else:
            joined.append((file, offset, size))
    return joined


def _between(whole: tuple[int, int, int], taken: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """What of the space ``whole`` is not ``taken``; both are (file, offset, bytes), ``taken`` is in order."""
    file, at, size = whole
    end = at + size
    for other, offset, nbytes in taken:
        if other == file:
            if at < offset:
                yield file, at, offset - at
            at = offset + nbytes
    if at < end:
        yield file, at, end - at
