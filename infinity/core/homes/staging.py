"""Staging: brings weights from disk towards the device, through slots of host memory or past it.

slot      a lease of the staging pool, for the bytes of one flat param
fetch     a read into a slot, or into the slot's counterpart on the device
backend   a way of fetches. Others than the one through host memory are listed in the seams
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ... import native
from ...errors import InfinityError
from ..machine.device import Device, Event
from ..seams import STAGING_BACKENDS, classes_of
from .arrays import StateArray


class Backend(Protocol):
    """A way from disk to the device that passes the host by."""

    hung: str  # the file of a read that does not return, or ""
    nbytes: int  # that have passed the host by
    copied_nbytes: int  # inside the device

    @classmethod
    def works(cls, config: Any, device: Device) -> bool:
        """Tells whether ``device`` can read the disks of ``config``, as its checksums demand."""

    @staticmethod
    def device_nbytes(staging_nbytes: int) -> int:
        """Returns the device memory that it needs beside a staging pool of so many bytes."""

    @classmethod
    def open(
        cls,
        io: native.IoEngine,
        staging: native.PinnedPool,
        device: Device,
        *,
        checksums: bool,
        sampled: bool,
    ) -> Backend | None:
        """Opens it. None, with a logged reason, if the device refuses. Raises CapacityError."""

    def read(
        self,
        extent: native.Extent,
        offset: int,
        address: int,
        nbytes: int,
        *,
        after: native.Ticket | None,
        lease: native.Lease,
    ) -> Any:
        """Starts reading to ``address`` of the staging pool or its counterpart."""

    def cancel(self, transfer: Any) -> None:
        """Cancels a read that has not started."""

    def arrived(self, transfer: Any, address: int, nbytes: int) -> torch.Tensor:
        """Returns the bytes of a completed read, in place."""

    def lane_of(self, transfer: Any) -> str:
        """Returns the timeline's lane of a completed read."""

    def close(self) -> None:
        """Waits for running reads. Repeat if interrupted."""


def backend_for(config: Any, device: Device) -> type[Backend] | None:
    """Returns the first backend that works for ``config`` and ``device``; None: reads pass through
    the host."""
    return next((kind for kind in classes_of(STAGING_BACKENDS) if kind.works(config, device)), None)


class ThroughHost:
    """The reads into the staging pool itself, by the I/O engine."""

    hung = ""

    def __init__(self, io: native.IoEngine, pool: native.PinnedPool, *, checksums: bool):
        self._io, self._pool, self._checksums = io, pool, checksums

    def read(
        self,
        extent: native.Extent,
        offset: int,
        address: int,
        nbytes: int,
        *,
        after: native.Ticket | None,
        lease: native.Lease,
    ) -> native.Ticket:
        """Starts reading to ``address`` of the staging pool."""
        return self._io.read(
            extent, offset, address, nbytes, after=after, lease=lease, checksum=self._checksums
        )

    def cancel(self, ticket: native.Ticket) -> None:
        """Cancels the parts of a read that have not started."""
        self._io.cancel(ticket)

    def arrived(self, ticket: native.Ticket, address: int, nbytes: int) -> torch.Tensor:
        """Returns the bytes of a completed read, in place."""
        return native.tensor_at(self._pool.region, address, nbytes, torch.uint8)

    def lane_of(self, ticket: native.Ticket) -> str:
        """Returns the timeline's lane of a completed read."""
        return "nvme->host"

    def close(self) -> None:
        """Drops engine and pool: an error's traceback may keep a fetch."""
        self._io = self._pool = None


@dataclass(frozen=True, eq=False)
class Fetch:
    """A read of ``nbytes`` into a slot at ``address``, or into the slot's counterpart."""

    transfer: native.Ticket | native.Landing
    backend: ThroughHost | Backend
    address: int
    nbytes: int

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.transfer.done

    @property
    def times(self) -> tuple[float, float]:
        """Start and end, once it is over."""
        return self.transfer.times

    @property
    def lane(self) -> str:
        """The timeline's lane of a completed fetch."""
        return self.backend.lane_of(self.transfer)

    def wait(self) -> None:
        """Blocks until it is over. Raises its error."""
        self.transfer.wait()

    def cancel(self) -> None:
        """Cancels the parts that have not started."""
        self.backend.cancel(self.transfer)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the bytes of a completed fetch as elements of ``dtype``, in place."""
        return self.backend.arrived(self.transfer, self.address, self.nbytes).view(dtype)


class Staging:
    """The staging pool of weights, and the reads into it. Only this object knows whether reads
    bypass host memory."""

    def __init__(self, io: native.IoEngine, device: Device, *, checksums: bool, sampled: bool):
        """``sampled``: reads past the host are checked by samples, if the device cannot."""
        self._io, self._device, self._checksums, self._sampled = io, device, checksums, sampled
        self.pool: native.PinnedPool | None = None
        self.past_host: Backend | None = None
        self._backend: ThroughHost | Backend | None = None
        # Slots that are still being copied to the device
        self._returning: deque[tuple[Event, list[native.Lease]]] = deque()

    def open(self, pool: native.PinnedPool, backend: type[Backend] | None = None) -> None:
        """Sets the pool, whose memory the I/O engine knows. ``backend``: reads may bypass it."""
        self.pool = pool
        if backend is not None:
            self.past_host = backend.open(
                self._io, pool, self._device, checksums=self._checksums, sampled=self._sampled
            )
        self._backend = self.past_host or ThroughHost(self._io, pool, checksums=self._checksums)

    @property
    def needs_pieces(self) -> bool:
        """Whether reads must be in small pieces, as they are past the host."""
        return self.past_host is not None

    @property
    def hung(self) -> str:
        """The file of a read past the host that does not return, or ""."""
        return self._backend.hung if self._backend is not None else ""

    def fetch(
        self,
        array: StateArray,
        offset: int,
        slot: native.Lease,
        nbytes: int,
        *,
        at: int = 0,
        after: native.Ticket | None = None,
    ) -> Fetch:
        """Starts reading whole checksum blocks from byte ``offset`` of an array on disk to byte
        ``at`` of ``slot``, after ``after``. The fetch raises CorruptionError if checksums differ.
        """
        address = slot.address + at
        transfer = self._backend.read(
            array.extent, offset, address, nbytes, after=after, lease=slot
        )
        return Fetch(transfer, self._backend, address, nbytes)

    def take_back(self, slots: list[native.Lease], event: Event) -> None:
        """Returns ``slots`` to the pool after ``event``."""
        self._returning.append((event, slots))
        self.collect()

    def collect(self, *, wait: bool = False) -> bool:
        """Releases slots that are no longer read (``wait``: at least one). Returns whether any."""
        found = False
        while self._returning and (self._returning[0][0].done or (wait and not found)):
            event, slots = self._returning.popleft()
            try:
                event.wait()
            except (InfinityError, RuntimeError):
                pass  # raised where its bytes are waited for, not where a slot is taken
            for slot in slots:
                slot.release()
            found = True
        return found

    def forget(self) -> None:
        """Forgets slots on their way back, once no transfer uses the pool."""
        self._returning.clear()

    def close(self) -> None:
        """Waits for reads past the host. Repeat if interrupted."""
        if self._backend is not None:
            self._backend.close()
        self._backend = self.past_host = None

    def drop_pool(self) -> None:
        """Drops the pool and its slots, once no transfer is running."""
        self.forget()
        self.pool = self._io = None
