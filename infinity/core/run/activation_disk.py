"""ActivationsOnDisk: writes saved storages to NVMe, and reads them before the backward needs them.

staging   memory for activations on their way to and from the disk
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ... import native
from ..homes.arrays import bytes_of
from ..homes.store import ArrayStore
from ..homes.transfers import TransferQueue
from ..machine.device import Copy, Event
from .saved_tensor import Saved, SavingOrder, blocks


@dataclass(frozen=True)
class _CopiedPart:
    """A part of a storage on its way into staging memory, and to disk from there."""

    begin: int
    nbytes: int
    lease: native.Lease
    whole: torch.Tensor  # over the lease, in checksum blocks
    event: Event


class ActivationsOnDisk:
    """Transfers between the device and the disk, through staging memory. Used from the threads that
    run forward and backward."""

    def __init__(self, store: ArrayStore, staging: native.PinnedPool, order: SavingOrder):
        self._store, self._staging, self._order = store, staging, order
        self._device = store.device

    def drain(self) -> None:
        """Waits until all staging memory is free, after an exception."""
        self._store.drain(self._staging)

    def send(self, saved: Saved, source: torch.Tensor) -> None:
        """Sends ``source``, the bytes of ``saved``, to disk."""
        saved.checksum = 0
        # One part is written while the next one is copied.
        with TransferQueue(2, partial(self._write, saved)) as copies:
            for begin, end in self._parts(saved):
                copies.make_room()
                copies.add(self._copy_out(begin, source[begin:end]))

    def _copy_out(self, begin: int, source: torch.Tensor) -> _CopiedPart:
        """Starts copying a part of a storage from the device into staging memory."""
        nbytes = source.numel()
        lease = self._lease(blocks(nbytes))
        whole = self._staged(lease, blocks(nbytes))
        whole[nbytes:] = 0
        transfer = Copy("device->host", nbytes, "activations")
        event = self._device.put(
            "out",
            lambda: whole[:nbytes].copy_(source, non_blocking=True),
            after=[self._device.now()],
            transfer=transfer,
        )
        return _CopiedPart(begin, nbytes, lease, whole, event)

    def _write(self, saved: Saved, part: _CopiedPart) -> None:
        """Starts writing a part to disk once it is in staging memory. Blocks on the copy."""
        if not part.event.done:
            with self._store.traffic.stalled("device->host", "activations"):
                part.event.wait()
        part.event.wait()  # raises the copy's error
        if self._device.is_host:
            saved.checksum = native.crc32c(part.whole[: part.nbytes], saved.checksum)
        saved.writes.append(
            self._store.start_write(saved.array, part.begin, part.lease, part.whole.numel())
        )

    def read(self, saved: Saved, target: torch.Tensor) -> None:
        """Reads the bytes of ``saved`` into ``target``, on the device. Blocks on the disk."""
        if saved.read is None and saved.nbytes <= self._largest:
            self._start_read(saved, self._lease(blocks(saved.nbytes)))
        self._read_ahead(saved)
        if saved.read is not None:
            (ticket, lease), saved.read = saved.read, None
            self._finish_read(saved, 0, saved.nbytes, ticket, lease, target)
            return
        for begin, end in self._parts(saved):
            lease = self._lease(blocks(end - begin))
            ticket = self._store.start_read(saved.array, begin, lease, blocks(end - begin))
            self._finish_read(saved, begin, end, ticket, lease, target)

    def _start_read(self, saved: Saved, lease: native.Lease) -> None:
        read = self._store.start_read(saved.array, 0, lease, blocks(saved.nbytes))
        saved.writes.append(read)  # its buffer must not be overwritten before the read is done
        saved.read = read, lease

    def _finish_read(
        self, saved: Saved, begin: int, end: int, ticket, lease, target: torch.Tensor
    ) -> None:
        with self._store.traffic.stalled("nvme->host", "activations"):
            ticket.wait()
        nbytes = blocks(end - begin)
        self._store.traffic.tell("nvme->host", "activations", *ticket.times)
        with self._store.traffic.copying("host->device", end - begin, "activations"):
            target[begin:end] = self._staged(lease, nbytes)[: end - begin]
        lease.release()

    def _read_ahead(self, saved: Saved) -> None:
        """Starts reading what was saved just before ``saved``: the backward needs it next."""
        for other in self._order.before(saved):
            if other.read is not None or other.nbytes > self._largest:
                continue
            lease = self._staging.try_lease(blocks(other.nbytes))
            if lease is None:
                return
            self._start_read(other, lease)

    @property
    def _largest(self) -> int:
        """Largest number of bytes staged at once: a quarter, so that transfers overlap. Whole
        checksum blocks."""
        quarter = self._staging.capacity_nbytes // 4
        return max(
            native.CHECKSUM_NBYTES, quarter // native.CHECKSUM_NBYTES * native.CHECKSUM_NBYTES
        )

    def _parts(self, saved: Saved) -> Iterator[tuple[int, int]]:
        for begin in range(0, saved.nbytes, self._largest):
            yield begin, min(saved.nbytes, begin + self._largest)

    def _staged(self, lease: native.Lease, nbytes: int) -> torch.Tensor:
        return bytes_of(self._staging, lease, nbytes)

    def _lease(self, nbytes: int) -> native.Lease:
        """Leases staging memory. Waits for running transfers, then drops storages that were read
        ahead."""
        if (lease := self._staging.try_lease(nbytes)) is not None:
            return lease
        with self._store.traffic.stalled("host->nvme", "activations"):
            return self._store.take_lease(self._staging, nbytes, self._drop_read_ahead)

    def _drop_read_ahead(self) -> bool:
        """Drops one storage that was read ahead of its use. Returns False if there is none."""
        for other in self._order:
            if other.read is not None:
                other.read = None
                return True
        return False
