"""ArrayStore: reads, writes and verifies flat arrays at their homes.

array       one flat array of one flat param (its weights, its moments, ...), with its tier and
            extent
service     a small staging buffer of the store's own, for transfers outside the training loop

A transfer keeps the lease of its memory until it is over (:mod:`csrc/io`). So after an interrupted
wait, memory that the disk still uses is not reused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import methodcaller

import torch

from ... import native
from ...errors import CorruptionError, InfinityError, InternalError, StorageError, UsageError
from ...native import CHECKSUM_NBYTES
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.sizes import format_nbytes, round_down, round_up
from ..machine.tiers import Tier
from ..machine.traffic import Traffic
from .allocator import ArrayAllocator
from .arrays import StateArray, bytes_of
from .staging import Staging, ThroughHost
from .swap_folders import SwapFolders
from .swap_space import SwapSpace
from .transfers import TransferQueue
from .zero_copy_writes import ZeroCopyWrites

MIB = 1024 * 1024
AT_ONCE = 4  # transfers of one array outside the training loop

_Part = tuple[native.Ticket, native.Lease, int, slice, slice]  # of an array, being read


class Guard:
    """A block that records the first disk error in it. Later blocks raise it on entry: incomplete
    data must not be trained on, read or saved."""

    def __init__(self, on_failure: Callable[[BaseException], None]):
        self.failure: Callable[[], InfinityError] | None = None
        self.on_failure = on_failure

    def __enter__(self) -> None:
        if self.failure is not None:
            raise self.failure()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # Blocks around the one that failed have told of it.
        if self.failure is None and isinstance(error, (StorageError, CorruptionError)):
            # Made anew each time: the error's traceback would keep the model alive.
            kind, args, *_ = error.__reduce__()
            self.failure = partial(kind, *args)
            self.on_failure(error)


class ArrayStore:
    """Moves parts of arrays for everything outside the training loop, and remembers a failed disk.

    allocator
        Of arrays, in memory or in :attr:`space`, the swap files.
    staging
        The reads of weights inside the training loop.
    """

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
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ):
        """``layer``: the I/O engine, as for :func:`native.make_io_engine`. ``on_failure`` is called
        with the first error of a disk, to report it to other ranks."""
        self.ledger, self.traffic, self.checksums = ledger, traffic, checksums
        self.device = device or Device(torch.device("cpu"), traffic)
        self.pid = os.getpid()
        folders = SwapFolders(nvme_paths, rank=rank, ranks=ranks)
        self.io = folders.make_engine(layer)
        self.space = SwapSpace(folders, self.io, ledger)
        self.allocator = ArrayAllocator(self.space, ledger, self.device)
        self.staging = Staging(self.io, self.device, checksums=checksums, sampled=sampled)
        self._charges: list[native.Charge] = []
        self._service_nbytes = service_nbytes
        self.service: native.PinnedPool | None = None
        self.guard = Guard(on_failure)
        # Of a writer that uses part of the service buffer.
        self._flush_writer: Callable[[], None] | None = None
        self._zero_copy = ZeroCopyWrites()

    def open(
        self,
        regions: Sequence[native.Region],
        *,
        staging: native.PinnedPool | None = None,
        backend: type[ThroughHost] = ThroughHost,
    ) -> None:
        """Creates the swap files at full size and registers them and ``regions``, its transfer
        memory, with the I/O engine. ``staging``: the pool of weights on their way to the device.
        ``backend``: the way of those.

        Raises CapacityError if a disk has too little room, StorageError if it refuses.
        """
        self._make_service(self._service_nbytes)
        self.space.lay_out()
        self.register(regions)
        if staging is not None:
            self.staging.open(staging, backend)
        self.allocator.open()

    def register(self, regions: Iterable[native.Region]) -> None:
        """Registers ``regions``, and the service buffer, with the I/O engine, which keeps them in
        place of those before. Blocks until no transfer runs."""
        registered = list(regions)
        self.io.register([*registered, self._service_region])
        self._regions = registered

    def need_service(self) -> None:
        """Allocates a service buffer for disks if there is none. Raises CapacityError."""
        if self.service.capacity_nbytes < CHECKSUM_NBYTES:
            self._make_service(MIB)
            self.ledger.accounts[Tier.HOST].planned_nbytes += MIB
            self.register(self._regions)

    def _make_service(self, nbytes: int) -> None:
        self._charges.append(self.ledger.reserve(Tier.HOST, nbytes, "the store's service buffer"))
        self._service_region = self.allocator.make_region(nbytes, copied=False)
        self.service = native.PinnedPool(self._service_region)

    def rebuild(self) -> None:
        """Frees all that is not in use after an exception. Only while no transfer is running."""
        for pool in (self.service, self.staging.pool):
            if pool is not None:
                self.drain(pool)
        self._zero_copy.rebuild()
        self._flush_writer = None  # its parts belong to the service buffer again
        self.staging.forget()
        self.space.free_unused()

    # --- moving parts of arrays, synchronously ---

    def read(
        self,
        array: StateArray,
        begin: int,
        end: int,
        *,
        out: torch.Tensor | None = None,
        service: native.PinnedPool | None = None,
    ) -> torch.Tensor:
        """Reads elements ``begin`` to ``end`` as a CPU tensor: a new one, or flat ``out`` of the
        array's dtype. Blocks. Verifies checksums. ``service``: a buffer for another thread."""
        self.check_process()
        out = torch.empty(end - begin, dtype=array.dtype, device="cpu") if out is None else out
        with self.guard:
            if array.tier is not Tier.NVME:
                _copy_flat(out, array.flat[begin:end])
                return out
            if self._flush_writer is not None and service is None:
                self._flush_writer()
            pool = service or self.service

            def finish(part: _Part) -> None:
                ticket, lease, nbytes, inner, outer = part
                ticket.wait()
                values = bytes_of(pool, lease, nbytes).view(array.dtype)[inner]
                native.copy_flat(out[outer], values)
                lease.release()

            def abandon(part: _Part) -> None:
                self.io.cancel(part[0])
                with suppress(InfinityError):
                    part[0].wait()
                part[1].release()

            parts, piece_nbytes = _parts_of(pool)
            with TransferQueue(parts, finish, abandon) as reads:
                for offset, nbytes, inner, outer in _blocks(array, begin, end, piece_nbytes):
                    reads.make_room()
                    lease = self.take_lease(pool, nbytes)
                    ticket = self.start_read(array, offset, lease, nbytes)
                    reads.add((ticket, lease, nbytes, inner, outer))
        return out

    def write(
        self,
        array: StateArray,
        begin: int,
        source: torch.Tensor,
        *,
        version: int,
        stable: bool = False,
    ) -> None:
        """Writes the flat CPU tensor ``source`` at element ``begin``, with ``version``. Blocks
        until all is written, so ``stable`` has no effect. If interrupted, it must be repeated."""
        self.check_process()
        end = begin + source.numel()
        if array.tier is not Tier.NVME:
            _copy_flat(array.flat[begin:end], source.to(array.dtype).contiguous())
        else:
            if self._flush_writer is not None:
                self._flush_writer()
            with self.guard, TransferQueue(AT_ONCE, methodcaller("wait")) as writes:
                for offset, nbytes, inner, outer in _blocks(
                    array, begin, end, _parts_of(self.service)[1]
                ):
                    lease = self.take_lease(self.service, nbytes, writes.finish_oldest)
                    size = array.dtype.itemsize
                    if inner.start > 0 or inner.stop * size < min(nbytes, array.nbytes - offset):
                        block = self.read_block(array, offset, lease, nbytes)
                    else:
                        block = bytes_of(self.service, lease, nbytes)
                        block[inner.stop * size :].zero_()  # padding after the array
                    block.view(array.dtype)[inner] = source[outer]
                    writes.add(self.start_write(array, offset, lease, nbytes))
                    del lease, block  # the disk has it now
        array.extent.version = version

    def read_block(
        self, array: StateArray, offset: int, lease: native.Lease, nbytes: int
    ) -> torch.Tensor:
        """Reads checksum blocks from byte ``offset`` of a disk array: a tensor over ``lease``."""
        self.start_read(array, offset, lease, nbytes).wait()
        return bytes_of(self.service, lease, nbytes)

    def start_read(
        self,
        array: StateArray,
        offset: int,
        lease: native.Lease,
        nbytes: int,
        *,
        at: int = 0,
        after: native.Ticket | None = None,
    ) -> native.Ticket:
        """Starts reading whole checksum blocks from byte ``offset`` of an array on disk to byte
        ``at`` of ``lease``, after ``after``. The ticket raises CorruptionError if checksums differ.
        """
        return self.io.read(
            array.extent,
            offset,
            lease.address + at,
            nbytes,
            after=after,
            lease=lease,
            checksum=self.checksums,
        )

    def start_write(
        self, array: StateArray, offset: int, lease: native.Lease, nbytes: int, *, at: int = 0
    ) -> native.Ticket:
        """Starts writing ``nbytes`` of ``lease`` from byte ``at``, whole checksum blocks, to byte
        ``offset`` of an array on disk. They must not change before the ticket completes."""
        return self.io.write(
            array.extent, offset, lease.address + at, nbytes, lease=lease, checksum=self.checksums
        )

    def lend(self, array: StateArray, offset: int, memory: torch.Tensor) -> None:
        """Starts writing flat ``memory``, whole checksum blocks, to byte ``offset`` of an array on
        disk. Keeps it; it must not change before :meth:`finish_borrowed`. Blocks while many run."""
        self._zero_copy.write(self.io, array.extent, offset, memory, checksum=self.checksums)

    def finish_borrowed(self) -> None:
        """Blocks until all borrowed memory is written. Raises the first error."""
        self._zero_copy.finish()

    def take_lease(
        self, pool: native.PinnedPool, nbytes: int, give_up: Callable[[], bool] = lambda: False
    ) -> native.Lease:
        """Takes a lease of ``nbytes``. Waits for transfers, then calls ``give_up``, which returns
        whether it released any. Raises InternalError if nothing is left to wait for."""
        while (lease := pool.try_lease(nbytes)) is None:
            self.refuse_hung()
            if pool.wait_for_transfer():
                continue
            if (lease := pool.try_lease(nbytes)) is not None:  # one completed in between
                return lease
            if not give_up():
                capacity = format_nbytes(pool.capacity_nbytes)
                raise InternalError(
                    f"{format_nbytes(nbytes)} of a staging buffer of {capacity} are wanted, and it"
                    " is in use"
                )
        return lease

    def drain(self, pool: native.PinnedPool) -> None:
        """Waits until no transfer uses ``pool``, then revokes every lease: holders are gone."""
        while pool.wait_for_transfer():
            self.refuse_hung()
        pool.take_back_all()

    def refuse_hung(self) -> None:
        """Raises StorageError if a disk has not answered: its memory is never free again."""
        if folder := self.io.hung or self.staging.hung:
            raise StorageError(
                errno.ETIMEDOUT,
                f"the disk of {folder} has not answered, and may still write to the memory it was"
                " given: end this process and resume from the last checkpoint",
                folder,
            )

    @contextmanager
    def lending_service(self, flush: Callable[[], None]) -> Iterator[None]:
        """Gives the service buffer to a writer inside the block. ``flush`` is called before each
        read and write. Raises UsageError inside another such block. After an interrupt at its start
        or end, :meth:`rebuild` forgets the writer."""
        if self._flush_writer is not None:
            raise UsageError("this store is being written behind already")
        self._flush_writer = flush
        try:
            yield
        finally:
            self._flush_writer = None

    def check_process(self) -> None:
        """Raises UsageError in a forked child, which has no threads and no ring of the engine."""
        if os.getpid() != self.pid:
            raise UsageError(
                f"this model was wrapped in process {self.pid} and cannot be used in its forked"
                f" child {os.getpid()}: wrap a model in the child, or start it with the spawn"
                " method"
            )

    def close(self) -> None:
        """Closes the swap files, and frees disk space and memory. Repeat if interrupted."""
        self.allocator.close()
        self.staging.close()
        if self.io is not None:  # waits for transfers and closes the files
            self.io.shut_down()
            self._zero_copy.clear(hung=bool(self.io.hung))
        self.io = None
        self.staging.drop_pool()
        self.service, self._service_region, self._regions = None, None, []
        self.space.close()
        while self._charges:
            self._charges[-1].release()
            self._charges.pop()


def _copy_flat(target: torch.Tensor, source: torch.Tensor) -> None:
    both = target.is_cpu and source.is_cpu
    (native.copy_flat if both else torch.Tensor.copy_)(target, source)


def _parts_of(pool: native.PinnedPool) -> tuple[int, int]:
    """Returns the number of transfers that share a service buffer, and the bytes of each."""
    nbytes = pool.capacity_nbytes
    parts = min(AT_ONCE, nbytes // CHECKSUM_NBYTES)
    return parts, round_down(nbytes // parts, CHECKSUM_NBYTES)


def _blocks(
    array: StateArray, begin: int, end: int, nbytes: int
) -> Iterator[tuple[int, int, slice, slice]]:
    """Yields the checksum-aligned pieces that cover elements ``begin`` to ``end``, of at most
    ``nbytes``: none if there are no elements.

    Yields (byte offset in the extent, bytes, elements in them, elements of the caller's tensor).
    """
    size = array.dtype.itemsize
    offset = round_down(begin * size, CHECKSUM_NBYTES)
    while begin < end and offset < end * size:
        covered = min(nbytes, round_up(end * size - offset, CHECKSUM_NBYTES))
        count = min(covered, array.extent.nbytes - offset)
        first, last = offset // size, (offset + count) // size
        low, high = max(begin, first), min(end, last)
        yield offset, count, slice(low - first, high - first), slice(low - begin, high - begin)
        offset += count
