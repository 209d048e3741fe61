"""Staging: brings weights from disk towards the device, through slots of host memory or past it.

slot      a lease of the staging pool, for the bytes of one flat param
fetch     a read into a slot, or into the slot's counterpart on the device
backend   a way of fetches. Others than the one through host memory are listed in the seams
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ... import native
from ...config import Config
from ...errors import InfinityError
from .. import seams
from ..machine.device import Device, Event
from .arrays import StateArray


class ThroughHost:
    """The backend that works anywhere: reads into the staging pool itself, by the I/O engine.
    Others derive from it."""

    hung = ""  # the file of a read that does not return
    passes_host = False  # whether reads may bypass host memory, in small pieces
    nbytes = 0  # that have bypassed it
    copied_nbytes = 0  # of these: inside the device

    def __init__(self, io: native.IoEngine, pool: native.PinnedPool, *, checksums: bool):
        self._io, self._pool, self._checksums = io, pool, checksums

    @classmethod
    def works(cls, config: Config, device: Device) -> bool:
        """Tells whether ``device`` can read the disks of ``config`` so, and verify the bytes as
        its checksums demand."""
        return True

    @staticmethod
    def device_nbytes(staging_nbytes: int) -> int:
        """Returns the device memory that it needs beside a staging pool of so many bytes."""
        return 0

    @classmethod
    def open_pool(
        cls,
        io: native.IoEngine,
        pool: native.PinnedPool,
        device: Device,
        *,
        checksums: bool,
        sampled: bool,
    ) -> ThroughHost | None:
        """Opens it. None, with a logged reason, if the device refuses. Raises CapacityError if it
        has no room. ``sampled``: a part of the bytes is verified, if the device can verify none."""
        return cls(io, pool, checksums=checksums)

    def read(
        self,
        extent: native.Extent,
        offset: int,
        address: int,
        nbytes: int,
        *,
        after: native.Ticket | None,
        lease: native.Lease,
    ) -> native.Ticket | native.Landing:
        """Starts reading to ``address`` of the staging pool."""
        return self._io.read(
            extent, offset, address, nbytes, after=after, lease=lease, checksum=self._checksums
        )

    def cancel(self, transfer: Any) -> None:
        """Cancels the parts of a read that have not started."""
        self._io.cancel(transfer)

    def arrived(self, transfer: Any, address: int, nbytes: int) -> torch.Tensor:
        """Returns the bytes of a completed read, in place."""
        return native.tensor_at(self._pool.region, address, nbytes, torch.uint8)

    def lane_of(self, transfer: Any) -> str:
        """Returns the timeline's lane of a completed read."""
        return "nvme->host"

    def close(self) -> None:
        """Drops engine and pool: an error's traceback may keep a fetch."""
        self._io = self._pool = None


def backend_for(config: Config, device: Device) -> type[ThroughHost]:
    """Returns the first backend of the list that works for ``config`` and ``device``."""
    kinds = (*seams.classes_of(seams.STAGING_BACKENDS), ThroughHost)
    return next(kind for kind in kinds if kind.works(config, device))


@dataclass(frozen=True, eq=False)
class Fetch:
    """A read of ``nbytes`` into a slot at ``address``, or into the slot's counterpart."""

    transfer: native.Ticket | native.Landing
    backend: ThroughHost
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
        self.backend: ThroughHost | None = None
        # Slots that are still being copied to the device
        self._returning: deque[tuple[Event, list[native.Lease]]] = deque()

    def open(self, pool: native.PinnedPool, backend: type[ThroughHost] = ThroughHost) -> None:
        """Sets the pool, whose memory the I/O engine knows, and opens ``backend``."""
        self.pool = pool
        self.backend = backend.open_pool(
            self._io, pool, self._device, checksums=self._checksums, sampled=self._sampled
        ) or ThroughHost(self._io, pool, checksums=self._checksums)

    @property
    def needs_pieces(self) -> bool:
        """Whether reads must be in small pieces, as they are past the host."""
        return self.backend is not None and self.backend.passes_host

    @property
    def hung(self) -> str:
        """The file of a read past the host that does not return, or ""."""
        return self.backend.hung if self.backend is not None else ""

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
        transfer = self.backend.read(array.extent, offset, address, nbytes, after=after, lease=slot)
        return Fetch(transfer, self.backend, address, nbytes)

    def take_back(self, slots: list[native.Lease], event: Event) -> None:
        """Returns ``slots`` to the pool after ``event``."""
        self._returning.append((event, slots))
        self.collect()

    def collect(self, *, wait: bool = False) -> bool:
        """Releases slots that are no longer read (``wait``: at least one). Returns whether any."""
        collected = False
        while self._returning and (self._returning[0][0].done or (wait and not collected)):
            event, slots = self._returning.popleft()
            try:
                event.wait()
            except (InfinityError, RuntimeError):
                pass  # raised where its bytes are waited for, not where a slot is taken
            for slot in slots:
                slot.release()
            collected = True
        return collected

    def forget(self) -> None:
        """Forgets slots on their way back, once no transfer uses the pool."""
        self._returning.clear()

    def close(self) -> None:
        """Waits for reads past the host. Repeat if interrupted."""
        if self.backend is not None:
            self.backend.close()
        self.backend = None

    def drop_pool(self) -> None:
        """Drops the pool and its slots, once no transfer is running."""
        self.forget()
        self.pool = self._io = None
