"""ShardStore: reads, writes and verifies flat arrays at their homes.

array       one flat array of one shard (its weights, its moments, ...), with its tier and its extent
service     a small staging buffer of the store's own, for reads and writes outside the training loop

A transfer keeps the lease of its memory until it is over (:mod:`csrc/io`), so whatever interrupts a wait here, no memory that the
disk still uses is given to anybody else.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch

from .. import native
from ..errors import CorruptionError, InfinityError, InternalError, StorageError, UsageError
from ..machine.device import Event
from ..machine.sizes import format_nbytes
from ..machine.tiers import Tier
from ..machine.timeline import PAST_HOST
from .allocator import ArrayAllocator, Space
from .arrays import StateArray, bytes_of
from .loans import Loans
from .write_behind import WriteBehind

logger = logging.getLogger(__name__)

Fetch = native.Ticket | native.Landing  # under way into a staging slot
AT_ONCE = 4  # reads, or writes, of one array outside the training loop


class ShardStore(ArrayAllocator):
    """Moves parts of arrays for everything outside the training loop, and knows of a disk that failed.

    ``on_failure`` is called with the first error of a disk: it tells who else has to know.
    """

    def __init__(self, *args: Any, on_failure: Callable[[BaseException], None] = lambda error: None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.failure: Callable[[], InfinityError] | None = None
        self.on_failure = on_failure
        self._behind: WriteBehind | None = None  # that has part of the service buffer
        self._loans = Loans()
        self._returning: deque[tuple[Event, list[native.Lease]]] = deque()  # slots that the device still copies from

    def rebuild(self) -> None:
        """Frees what nobody has any more, whatever an exception left of the books. Only while nothing is in flight."""
        for pool in (self._service, self.staging):
            if pool is not None:
                self.drain(pool)
        self._loans.rebuild()
        self._behind = None  # its parts are the service buffer's again
        self._returning.clear()
        self._leaving.clear()
        taken = sorted(self._places.values())
        self._spaces = [space for index, added in enumerate(self._added) for space in _between((index, 0, added.nbytes), taken)]
        self.drop_unused()

    # --- staging slots ---

    def take_back(self, slots: list[native.Lease], event: Event) -> None:
        """Gives ``slots`` back to the staging pool once ``event`` has come."""
        self._returning.append((event, slots))
        self.collect()

    def collect(self, *, wait: bool = False) -> bool:
        """Gives back the slots that nothing copies from any more; with ``wait``, at least the oldest. Whether there were any."""
        found = False
        while self._returning and (self._returning[0][0].done or (wait and not found)):
            event, slots = self._returning.popleft()
            try:
                event.wait()
            except (InfinityError, RuntimeError):
                pass  # that copy failed: it is raised where its bytes are waited for, not where another unit wants a slot
            for slot in slots:
                slot.release()
            found = True
        return found

    # --- reading ahead, into staging slots ---

    def fetch(
        self, array: StateArray, offset: int, lease: native.Lease, nbytes: int, *, at: int = 0, after: native.Ticket | None = None
    ) -> Fetch:
        """Starts reading as :meth:`start_read` does, or, past the host's memory, into the counterpart of ``lease`` on the device."""
        if self.past_host is None:
            return self.start_read(array, offset, lease, nbytes, at=at, after=after)
        return self.past_host.read(array.extent, offset, lease.address + at, nbytes, after=after, lease=lease)

    def fetched(self, fetch: Fetch, array: StateArray, address: int, nbytes: int) -> torch.Tensor:
        """Returns the bytes of a fetch that is over, as elements of the array, where they are."""
        flat = self.past_host.landed(fetch, address, nbytes) if isinstance(fetch, native.Landing) else None
        if flat is None:
            flat = native.tensor_at(self.staging.region, address, nbytes, torch.uint8)
        return flat.view(array.dtype)

    def lane_of(self, fetch: Fetch) -> str:
        """Names the timeline's lane of a fetch that is over."""
        return PAST_HOST if isinstance(fetch, native.Landing) and fetch.on_device else "nvme->host"

    def cancel(self, fetch: Fetch) -> None:
        """Takes back what of a fetch has not started."""
        if isinstance(fetch, native.Landing):
            self.past_host.cancel(fetch)
        else:
            self.io.cancel(fetch)

    # --- moving parts of arrays, synchronously ---

    def read(self, array: StateArray, begin: int, end: int) -> torch.Tensor:
        """Reads elements ``begin`` to ``end`` as a new CPU tensor. Checksums are verified on the way from the disk."""
        out = torch.empty(end - begin, dtype=array.dtype, device="cpu")
        at = 0
        for values in self.stream(array, begin, end):
            copy = native.copy_flat if values.is_cpu else torch.Tensor.copy_
            copy(out[at : at + values.numel()], values)
            at += values.numel()
        return out

    def stream(self, array: StateArray, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yields elements ``begin`` to ``end`` in order, in flat pieces that are valid until the next is asked for. What follows is read,
        and its checksums verified, meanwhile. Nothing else of this store is used inside."""
        self.check_process()
        with self.guarding():
            if array.tier is not Tier.NVME:
                yield array.flat[begin:end]
                return
            if self._behind is not None:
                self._behind.flush()
            under_way: deque[tuple[native.Ticket, native.Lease, int, slice]] = deque()
            parts = max(1, min(AT_ONCE, self._service.capacity_nbytes // native.CHECKSUM_NBYTES))
            blocks = self._blocks(array, begin, end, parts=parts)
            try:
                while True:
                    for offset, nbytes, inner, _ in islice(blocks, parts - len(under_way)):
                        lease = self.take_lease(self._service, nbytes)
                        under_way.append((self.start_read(array, offset, lease, nbytes), lease, nbytes, inner))
                    if not under_way:
                        return
                    ticket, lease, nbytes, inner = under_way[0]
                    ticket.wait()
                    yield bytes_of(self._service, lease, nbytes).view(array.dtype)[inner]
                    under_way.popleft()
                    lease.release()
            finally:
                for ticket, lease, _, _ in under_way:  # that nobody asks for any more
                    self.io.cancel(ticket)
                    with suppress(InfinityError):
                        ticket.wait()
                    lease.release()

    def write(self, array: StateArray, begin: int, source: torch.Tensor, *, version: int, stays: bool = False) -> None:
        """Writes the flat CPU tensor ``source`` at element ``begin``; its blocks carry ``version`` from then on. Interrupted,
        some of it is written: doing it again makes it whole. ``stays`` changes nothing here: all is written when this returns."""
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
                for offset, nbytes, inner, outer in self._blocks(array, begin, end, parts=AT_ONCE):
                    lease = self.take_lease(self._service, nbytes, finish_first)
                    size = array.dtype.itemsize
                    if inner.start > 0 or inner.stop * size < min(nbytes, array.nbytes - offset):
                        block = self.read_block(array, offset, lease, nbytes)
                    else:
                        block = bytes_of(self._service, lease, nbytes)
                        block[inner.stop * size :].zero_()  # what follows the array
                    block.view(array.dtype)[inner] = source[outer]
                    tickets.append(self.start_write(array, offset, lease, nbytes))
                    del lease, block  # the disk has it now
                while finish_first():
                    pass
        array.extent.version = version

    def read_block(self, array: StateArray, offset: int, lease: native.Lease, nbytes: int) -> torch.Tensor:
        """Reads whole checksummed blocks of an array on disk, from byte ``offset`` on, as a tensor over ``lease``."""
        self.start_read(array, offset, lease, nbytes).wait()
        return bytes_of(self._service, lease, nbytes)

    def start_read(
        self, array: StateArray, offset: int, lease: native.Lease, nbytes: int, *, at: int = 0, after: native.Ticket | None = None
    ) -> native.Ticket:
        """Starts reading whole checksum blocks from byte ``offset`` of an array on disk to byte ``at`` of ``lease``, once ``after`` is
        over. They are verified as they arrive: waiting for the ticket raises CorruptionError where they are not what was written."""
        address = lease.address + at
        return self.io.read(array.extent, offset, address, nbytes, after=after, lease=lease, checksum=self.checksums)

    def start_write(self, array: StateArray, offset: int, lease: native.Lease, nbytes: int) -> native.Ticket:
        """Starts writing ``nbytes`` of ``lease``, whole checksum blocks, from byte ``offset`` of an array on disk. They stay as they are
        until the ticket is over: their checksums are taken meanwhile."""
        return self.io.write(array.extent, offset, lease.address, nbytes, lease=lease, checksum=self.checksums)

    def lend(self, array: StateArray, offset: int, memory: torch.Tensor) -> None:
        """Starts writing flat ``memory``, whole checksum blocks, from byte ``offset`` of an array on disk on. It stays as it is until
        :meth:`finish_lent`, and is kept until the disk has read it. Waits where much is under way."""
        self._loans.write(self.io, array.extent, offset, memory, checksum=self.checksums)

    def finish_lent(self) -> None:
        """Waits until what was lent is at home, or failed. Raises what went wrong first."""
        self._loans.finish()

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[native.Lease]:
        """Borrows a piece of the service buffer. Waits for transfers that still have it."""
        lease = self.take_lease(self._service, nbytes)
        try:
            yield lease
        finally:
            lease.release()

    def take_lease(self, pool: native.PinnedPool, nbytes: int, give_up: Callable[[], bool] = lambda: False) -> native.Lease:
        """Takes a lease of ``nbytes``: waits for transfers that still use the pool, then asks ``give_up`` to let something go,
        which says whether it did. Raises InternalError when there is nothing left to wait for."""
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
        if folder := self.io.hung or (self.past_host.hung if self.past_host is not None else ""):
            raise StorageError(errno.ETIMEDOUT, f"the disk of {folder} has not answered, and may still write to the memory it was given: end "
                               "this process and resume from the last checkpoint", folder)  # fmt: skip

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
            nbytes = min(covered, array.extent.nbytes - offset)
            first, last = offset // size, (offset + nbytes) // size
            low, high = max(begin, first), min(end, last)
            yield offset, nbytes, slice(low - first, high - first), slice(low - begin, high - begin)
            offset += nbytes

    @contextmanager
    def writing_behind(self) -> Iterator[WriteBehind]:
        """Yields a writer for many writes, of which those that follow each other on disk become large ones that nobody waits for.
        All is at home when the block ends; of one that raises, some may be unwritten. Raises UsageError inside another one. Where an
        exception came as the block began or ended, that one is forgotten by :meth:`rebuild`."""
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
        """Ends every such block with the disk's first error inside any of them: what it left half done must not be trained on, read
        or saved."""
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
        if self.past_host is not None:
            self.past_host.close()
        self.past_host = None
        if self.io is not None:  # waits for what is in flight and closes the files, whoever still refers to it
            self.io.shut_down()
            self._loans.clear(hung=bool(self.io.hung))
        self.io = None
        self._returning.clear()
        self._service = self.staging = None
        self._added.clear()
        while self._charges:
            self._charges[-1].release()
            self._charges.pop()


def _between(whole: Space, taken: list[Space]) -> Iterator[Space]:
    """Yields what of the space ``whole`` is not ``taken``, which is in order."""
    volume, at, size = whole
    end = at + size
    for other, offset, nbytes in taken:
        if other == volume:
            if at < offset:
                yield volume, at, offset - at
            at = offset + nbytes
    if at < end:
        yield volume, at, end - at
