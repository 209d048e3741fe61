"""GradHomes: provides the bytes of gradients at home for computing.

opened     home on a disk, bytes now in a staging slot (:mod:`infinity.gradients.opened`)
landing    transfer home still in the device's queue (:mod:`infinity.gradients.landing`)
remote     the home is memory that the device cannot compute with
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import native
from ..machine.device import Device, Event
from ..machine.tiers import Tier
from ..state.handle import ParamHandle
from ..state.shard import ParamShard
from ..storage.store import ShardStore
from .landing import LandingQueue
from .opened import OpenedGrads


class GradHomes:
    """The homes of all gradients: device memory, host memory or disk. Used from the thread that
    runs backward or the step."""

    def __init__(
        self, store: ShardStore, staging: native.PinnedPool | None, *, in_flight_nbytes: int = 0
    ):
        self.device: Device = store.device
        self.queue = LandingQueue(self.device, store.traffic, in_flight_nbytes)
        self._opened = OpenedGrads(store, staging, self.queue.wait)

    def rebuild(self) -> None:
        """Sends opened gradients home after an exception. Only while no transfer is running."""
        self.queue.rebuild()
        self._opened.settle()

    def settle(self) -> None:
        """Sends opened gradients to disk, and waits until they are written."""
        self._opened.settle()

    def stage_in(self, staging: native.PinnedPool | None) -> None:
        """Opens gradients of disks in ``staging`` from now on. None may be open."""
        self._opened.stage_in(staging)

    def is_remote(self, handle: ParamHandle) -> bool:
        """Returns whether the gradient's home is memory that the device cannot compute with."""
        return not self.device.is_host and handle.shard.arrays["grad"].tier is not Tier.DEVICE

    def view(self, handle: ParamHandle, *, write: bool, wait: bool = True) -> torch.Tensor:
        """Returns the whole gradient of ``handle`` as a tensor over its home. ``write``: it is
        about to change. ``wait``: block until landing gradients have arrived."""
        return handle.shard.layout.placements[handle.index].view(
            self._flat(handle.shard, write=write, wait=wait)
        )

    def flat_view(self, handle: ParamHandle, *, write: bool) -> torch.Tensor:
        """Returns the gradient's elements at home, flat, in storage order."""
        place = handle.shard.layout.placements[handle.index]
        home = self.view(handle, write=write, wait=False)
        return home.as_strided((place.numel,), (1,), home.storage_offset())

    def slice(self, handle: ParamHandle, *, write: bool, wait: bool = True) -> torch.Tensor:
        """Returns this rank's elements of the gradient, in storage order: a flat view of their
        home."""
        shard = handle.shard
        begin, end = shard.layout.slice_part(handle.index)
        first = shard.layout.own("grad")[0]
        return self._flat(shard, write=write, wait=wait)[begin - first : end - first]

    def _flat(self, shard: ParamShard, *, write: bool, wait: bool) -> torch.Tensor:
        if wait:
            self.queue.wait(shard)
        if write:
            shard.homes.inputs_change()
        array = shard.arrays["grad"]
        return array.flat if array.tier is not Tier.NVME else self._opened.flat(shard, write=write)

    def whole(self, shard: ParamShard) -> torch.Tensor:
        """Returns this rank's whole flat gradient on the device, if its home is whole (ZeRO-1)."""
        shard.homes.wait()
        self.queue.wait(shard)
        return shard.arrays["grad"].flat.to(self.device.where)

    def close_shard(self, shard: ParamShard) -> list[native.Ticket]:
        """Sends a shard's opened gradients to disk. Returns tickets that must complete before they
        can be read at home."""
        self._opened.close(shard)
        landing = self.queue.of(shard)
        ticket = self.device.ticket(landing) if landing else None
        written = shard.arrays["grad"].extent.writes_under_way() if "grad" in shard.arrays else None
        return [each for each in (ticket, written) if each is not None]

    def close_all(self, shards: Iterable[ParamShard]) -> None:
        """Sends the opened gradients of ``shards`` to disk."""
        for shard in shards:
            self._opened.close(shard)

    def landing_of(self, shard: ParamShard) -> list[Event]:
        """Lists the events that must complete before the device can read a shard's gradients at
        home."""
        return self.queue.of(shard)
