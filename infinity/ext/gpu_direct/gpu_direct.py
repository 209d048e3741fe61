"""GpuDirect: reads arrays from disk into device memory, bypassing host memory.

slot      a lease of the staging pool. Each has a counterpart on the device, at the same offset of a
          buffer as large. A read arrives in one or the other, verified whole
          (:mod:`csrc/io/direct.h`), or in samples if the user chose that
refusal   why a read arrived on the host after all; each kind is logged once
"""

from __future__ import annotations

import logging

import torch

from ... import native
from ...config import Config
from ...core.homes.staging import ThroughHost
from ...core.homes.transfers import never_freed
from ...core.machine.device import Device
from ...core.machine.traffic import PAST_HOST
from . import direct_storage

logger = logging.getLogger(__name__)

ALIGNMENT = 64 * 1024  # of memory that a GPU exposes: its pages
SLACK_NBYTES = ALIGNMENT
THREADS = 8
LATE_SECONDS = 10.0
SAMPLED_READS = 16


class GpuDirect(ThroughHost):
    """The device's counterpart of the staging pool, and the reader that fills either."""

    passes_host = True

    def __init__(
        self, staging: native.PinnedPool, buffer: torch.Tensor, reader: native.DirectReader
    ):
        self._staging, self._buffer, self._reader = staging, buffer, reader
        self.copied_nbytes = 0  # inside the device
        self._told: set[str] = set()

    @classmethod
    def works(cls, config: Config, device: Device) -> bool:
        """Tells whether ``device`` can read the disks of ``config``, as its checksums demand: of a
        device on paper that is not known."""
        verified = device.kernels is not None or config.checksums is not True
        return (
            device.on_paper is None
            and bool(config.nvme_paths)
            and verified
            and bool(device.direct_calls)
            and not direct_storage.refusal(config.nvme_paths)
        )

    @staticmethod
    def device_nbytes(staging_nbytes: int) -> int:
        """Returns the device memory for a staging pool of so many bytes."""
        return staging_nbytes + SLACK_NBYTES

    @classmethod
    def open_pool(
        cls,
        io: native.IoEngine,
        pool: native.PinnedPool,
        device: Device,
        *,
        checksums: bool,
        sampled: bool = False,
    ) -> GpuDirect | None:
        """Opens the reader. None, with a logged reason, if the library does not accept the device's
        memory. Raises CapacityError if the device has no room.

        ``checksums``: all bytes are verified on the device. ``sampled``: without kernels for that,
        a part is verified on the host: each byte once in ``SAMPLED_READS`` reads of its piece.
        """
        whole = device.zeros(
            cls.device_nbytes(pool.capacity_nbytes),
            torch.uint8,
            "weights that come past the host's memory",
        )
        first = -whole.data_ptr() % ALIGNMENT
        buffer = whole[first : first + pool.capacity_nbytes]
        device.now().wait()  # before a disk writes there
        backend, why = native.make_cufile_road(buffer.data_ptr(), buffer.numel())
        if backend is None:
            logger.warning("bytes from disk pass through the host's memory: %s", why)
            return None
        timeout = native.io_timeout()
        reader = native.DirectReader(
            io,
            backend,
            calls=device.direct_calls,
            device=device.where.index or 0,
            threads=THREADS,
            checksums=checksums,
            sampled=SAMPLED_READS if sampled else 0,
            late_seconds=min(LATE_SECONDS, timeout / 2),
            hung_seconds=timeout,
        )
        return cls(pool, buffer, reader)

    @property
    def nbytes(self) -> int:
        """The number of bytes that bypassed the host so far."""
        return self._reader.nbytes

    @property
    def hung(self) -> str:
        """The file of a read that does not return, or ""."""
        return self._reader.hung

    def read(
        self,
        extent: native.Extent,
        offset: int,
        address: int,
        nbytes: int,
        *,
        after: native.Ticket | None,
        lease: native.Lease,
    ) -> native.Landing:
        """Starts reading as the I/O engine does, to ``address`` of the staging pool or its
        counterpart."""
        device = self._buffer.data_ptr() + address - self._staging.region.address
        return self._reader.read(extent, offset, address, device, nbytes, after=after, lease=lease)

    def cancel(self, transfer: native.Landing) -> None:
        """Cancels a read that has not started."""
        self._reader.cancel(transfer)

    def lane_of(self, transfer: native.Landing) -> str:
        """Returns the timeline's lane of a completed read."""
        return PAST_HOST if transfer.on_device else "nvme->host"

    def arrived(self, transfer: native.Landing, address: int, nbytes: int) -> torch.Tensor:
        """Returns the bytes of a completed read, in place: on the device, or at ``address``. Logs
        refusals."""
        if transfer.on_device:
            self.copied_nbytes += nbytes
            first = address - self._staging.region.address
            return self._buffer[first : first + nbytes]
        for word, (_, first_of_them) in self._reader.refused.items():
            if word not in self._told:
                self._told.add(word)
                logger.warning(
                    "a read past the host's memory was %s and came through it: %s",
                    word,
                    first_of_them,
                )
        return native.tensor_at(self._staging.region, address, nbytes, torch.uint8)

    def close(self) -> None:
        """Closes the reader after its running reads. Keeps memory that a stuck read may still write
        to."""
        if self._reader is not None:
            self._reader.shut_down()
            if self._reader.stuck:
                never_freed.append(self._buffer)
        # An error's traceback may keep a fetch, and this object with it.
        self._reader = self._buffer = None
