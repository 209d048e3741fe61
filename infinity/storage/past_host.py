"""PastHost: reads arrays from disk into the device's memory, past the host's.

slot      a lease of the staging pool. Each has a counterpart on the device, at the same place of a buffer as large: a read lands in
          one or the other, whole and verified (:mod:`csrc/io/direct.h`), or verified in part where the user chose that
refusal   why a read landed on the host after all; each kind is told once
"""

from __future__ import annotations

import logging

import torch

from .. import native
from ..machine.device import Device

logger = logging.getLogger(__name__)

ALIGNMENT = 64 * 1024  # of memory that a GPU offers to others: its pages
SLACK_NBYTES = ALIGNMENT
THREADS = 8
LATE_SECONDS = 10.0
SAMPLED_READS = 16

_abandoned: list[torch.Tensor] = []  # that a disk may still write to, for as long as the process lives


class PastHost:
    """A device's counterpart of the staging pool, and the reader that fills either."""

    def __init__(self, staging: native.PinnedPool, buffer: torch.Tensor, reader: native.DirectReader):
        self._staging, self._buffer, self._reader = staging, buffer, reader
        self.copied_nbytes = 0  # inside the device
        self._told: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Counts the bytes that came past the host so far."""
        return self._reader.nbytes

    @property
    def hung(self) -> str:
        """Names a file that has a read which will not return; empty where there is none."""
        return self._reader.hung

    def read(
        self, extent: native.Extent, offset: int, address: int, nbytes: int, *, after: native.Ticket | None, lease: native.Lease
    ) -> native.Landing:
        """Starts reading as the I/O engine does, into ``address`` of the staging pool or its counterpart."""
        device = self._buffer.data_ptr() + address - self._staging.region.address
        return self._reader.read(extent, offset, address, device, nbytes, after=after, lease=lease)

    def cancel(self, landing: native.Landing) -> None:
        """Takes back a read that has not started."""
        self._reader.cancel(landing)

    def landed(self, landing: native.Landing, address: int, nbytes: int) -> torch.Tensor | None:
        """Returns the bytes of a read that is over, where they came past the host; None: they are at ``address``. Tells of refusals."""
        if landing.on_device:
            self.copied_nbytes += nbytes
            first = address - self._staging.region.address
            return self._buffer[first : first + nbytes]
        for word, (_, first_of_them) in self._reader.refused.items():
            if word not in self._told:
                self._told.add(word)
                logger.warning("a read past the host's memory was %s and came through it: %s", word, first_of_them)
        return None

    def close(self) -> None:
        """Ends the reader once what is under way is over. Memory that a stuck read may still write to stays."""
        self._reader.shut_down()
        if self._reader.stuck:
            _abandoned.append(self._buffer)


def open_past_host(
    io: native.IoEngine, staging: native.PinnedPool, device: Device, *, checksums: bool, sampled: bool = False
) -> PastHost | None:
    """Opens the way past the host's memory; None, after a line that says why, where the library does not take the device's. Raises
    CapacityError where that has no room.

    ``checksums``: what comes is verified, all of it on the device. ``sampled``: or, where the device has no kernels for that, a part of it
    on the host, each byte once in ``SAMPLED_READS`` reads of its piece.
    """
    whole = device.zeros(staging.capacity_nbytes + SLACK_NBYTES, torch.uint8, "weights that come past the host's memory")
    first = -whole.data_ptr() % ALIGNMENT
    buffer = whole[first : first + staging.capacity_nbytes]
    device.now().wait()  # before a disk writes there
    road, why = native.make_cufile_road(buffer.data_ptr(), buffer.numel())
    if road is None:
        logger.warning("bytes from disk pass through the host's memory: %s", why)
        return None
    timeout = native.io_timeout()
    reader = native.DirectReader(
        io, road, calls=device.direct_calls, device=device.where.index or 0, threads=THREADS, checksums=checksums,
        sampled=SAMPLED_READS if sampled else 0,
        late_seconds=min(LATE_SECONDS, timeout / 2), hung_seconds=timeout,
    )  # fmt: skip
    return PastHost(staging, buffer, reader)
