"""GradHomes: gives the bytes of gradients at home to whoever computes with them.

opened     a shard's gradients lie in memory: always where their home is memory, in a slot of the gradient staging pool
           while one from disk is being written or read
landing    a queue of the device still sends gradients of a shard home
remote     the home is memory that the device cannot compute with
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .. import native
from ..distributed.collectives import Collectives
from ..machine.device import Copy, Event
from ..machine.in_flight import InFlight
from ..machine.tiers import Tier
from ..state.handle import ParamHandle
from ..state.shard import ParamShard
from ..storage.store import ShardStore
from .record import GradState


@dataclass(eq=False)
class OpenedShard:
    """A shard's gradients in a staging slot."""

    slot: native.Lease
    flat: torch.Tensor
    dirty: bool = False


class GradHomes:
    """The homes of all gradients: memory here, memory elsewhere, or disk. Used from the thread that runs backward or the step."""

    def __init__(
        self, store: ShardStore, staging: native.PinnedPool | None, collectives: Collectives, *, in_flight_nbytes: int = 0
    ):
        self._store, self._staging = store, staging
        self.device = store.device
        self.collectives, self.ranks = collectives, collectives.ranks
        self._landing: dict[ParamShard, Event] = {}  # of gradients on their way to the host
        self._in_flight = InFlight(in_flight_nbytes)  # gradients that are still read there
        self._opened: OrderedDict[ParamShard, OpenedShard] = OrderedDict()  # least recently used first

    def rebuild(self) -> None:
        """Sends what is in memory home after an exception. Only while nothing is in flight."""
        self._landing.clear()
        self._in_flight = self._in_flight.emptied()
        self.close_all(list(self._opened))
        if self._staging is not None:
            self._store.drain(self._staging)

    def _send(self, shard: ParamShard, send: Callable[[], None], nbytes: int, what: str, *read: torch.Tensor) -> Event:
        """Runs ``send`` in the queue to the host, which reads the tensors ``read``. Returns when it is done."""
        landing = self.device.put("out", send, behind=[self.device.now()], transfer=Copy("device->host", nbytes, what))
        self._landing[shard] = landing
        for tensor in read:
            self._in_flight.keep(tensor, landing)
        return landing

    def _flat_view(self, handle: ParamHandle, *, write: bool) -> torch.Tensor:
        """The gradient's elements at home in the order in which they lie."""
        place = handle.shard.layout.placements[handle.index]
        home = self._view(handle, write=write, wait=False)
        return home.as_strided((place.numel,), (1,), home.storage_offset())

    def _wait_landing(self, shard: ParamShard) -> None:
        """Waits until what was sent home is there: the host is about to use it."""
        if (landing := self._landing.get(shard)) is not None:
            with self._store.traffic.stalled("device->host", "gradients"):
                landing.wait()
            del self._landing[shard]

    def _is_remote(self, handle: ParamHandle) -> bool:
        """Whether the gradient is at home where the device cannot compute with it."""
        return not self.device.is_host and handle.shard.arrays["grad"].tier is not Tier.DEVICE

    def whole(self, shard: ParamShard) -> torch.Tensor:
        """Returns this rank's whole flat gradient, where it has one (ZeRO-1), on the device."""
        shard.wait()
        self._wait_landing(shard)
        return shard.arrays["grad"].flat.to(self.device.where)

    def _slice(self, handle: ParamHandle, *, write: bool, wait: bool = True) -> torch.Tensor:
        """This rank's elements of the gradient, in the order they lie: a flat view of their home."""
        shard = handle.shard
        if wait:
            self._wait_landing(shard)
        if write:
            shard.drop_shadow()
        array = shard.arrays["grad"]
        flat = array.flat if array.tier is not Tier.NVME else self._open(handle, write=write).flat
        begin, end = shard.slice_part(handle.index)
        first = shard.own("grad")[0]
        return flat[begin - first : end - first]

    def close_shard(self, shard: ParamShard) -> list[native.Ticket]:
        """Sends an opened shard's gradients to disk. What has to be over before they can be read at home."""
        opened = self._opened.get(shard)
        if opened is not None:
            if opened.dirty:
                self._wait_landing(shard)
                array = shard.arrays["grad"]
                # The disk keeps the slot until it has written it. Interrupted before the next line, it is written again.
                self._store.io.write(array.extent, 0, opened.slot.address, array.nbytes, lease=opened.slot)
                opened.dirty = False
            del self._opened[shard]
            opened.slot.release()
        landing = self._landing.get(shard)
        ticket = self.device.ticket([landing]) if landing is not None else None
        written = shard.arrays["grad"].extent.writes_under_way() if "grad" in shard.arrays else None
        return [each for each in (ticket, written) if each is not None]

    def landing_of(self, shard: ParamShard) -> list[Event]:
        """Lists what has to be over before the device can read a shard's gradients at home."""
        return [self._landing[shard]] if shard in self._landing else []

    def close_all(self, shards: Iterable[ParamShard]) -> None:
        """Sends what is opened of ``shards`` to disk."""
        for shard in [shard for shard in shards if shard in self._opened]:
            self.close_shard(shard)

    def _view(self, handle: ParamHandle, *, write: bool, wait: bool = True) -> torch.Tensor:
        shard = handle.shard
        if wait:
            self._wait_landing(shard)
        if write:
            shard.drop_shadow()
        array = shard.arrays["grad"]
        flat = array.flat if array.tier is not Tier.NVME else self._open(handle, write=write).flat
        return shard.layout.placements[handle.index].view(flat)

    def _open(self, handle: ParamHandle, *, write: bool) -> OpenedShard:
        """Brings the gradients of the handle's shard into memory. What none of them needs is not read: nothing has landed yet."""
        shard = handle.shard
        opened = self._opened.get(shard)
        if opened is None:
            array = shard.arrays["grad"]
            with self._store.traffic.stalled("host->nvme", "gradients"):
                slot = self._store.take_lease(self._staging, array.nbytes, self._close_oldest)
            flat = native.tensor_at(self._staging.region, slot.address, array.numel, array.dtype)
            if all(other.grad.state is GradState.ABSENT for other in handle.unit.handles if other.shard is shard):
                flat.zero_()  # parameters without a gradient have defined bytes beside the others
            else:
                with self._store.traffic.stalled("nvme->host", "gradients"):
                    self._store.io.read(array.extent, 0, slot.address, array.nbytes, lease=slot).wait()
                self._store.verify(array, slot.address, array.nbytes)
            opened = self._opened[shard] = OpenedShard(slot, flat)
        opened.dirty |= write
        self._opened.move_to_end(shard)
        return opened

    def _close_oldest(self) -> bool:
        """Sends what was not used for longest to disk. False when nothing is open."""
        oldest = next(iter(self._opened), None)
        if oldest is not None:
            self.close_shard(oldest)
        return oldest is not None
