"""GradientBank: lands gradients at home, lends them to whoever reads ``p.grad``, and hands them to the step.

opened     a shard's gradients lie in memory: always where their home is memory, in a slot of the gradient staging pool
           while one from disk is being written or read
changing   gradients that the running backward, or a multiplication, has begun to change: torn when it is cut short
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .. import native
from ..distributed.data_ranks import DataRanks
from ..errors import UsageError
from ..machine.device import Copy, Event
from ..machine.in_flight import InFlight
from ..machine.tiers import Tier
from ..state.handle import ParamHandle, set_raw_grad
from ..state.shard import ParamShard
from ..storage.store import ShardStore
from .record import GradRecord, GradState, OpenedShard
from .tensor import LandedGrad

if TYPE_CHECKING:
    from .reducer import Reducer


class GradientBank:
    """Lands, lends and consumes gradients. Used from the thread that runs backward or the step."""

    def __init__(self, store: ShardStore, staging: native.PinnedPool | None, peers: DataRanks, *, borrowed_nbytes: int = 0):
        self._store, self._staging = store, staging
        self.device = store.device
        self.peers = peers
        self._landing: dict[ParamShard, Event] = {}  # of gradients on their way to the host
        self._borrowed = InFlight(borrowed_nbytes)  # gradients that are still read there
        self.reducer: Reducer | None = None  # where there are other ranks
        self._opened: OrderedDict[ParamShard, OpenedShard] = OrderedDict()  # least recently used first
        self._changing: set[ParamHandle] = set()
        self._factor: tuple[Callable, int, float] = (lambda: None, 0, 1.0)  # the last tensor gradients were multiplied by
        self._norm_order: float | None = None  # of the norms that are asked for: they are taken as gradients land
        self.adds_to_consumed = False  # the running backward came through an input: the loss is another model's

    # --- what autograd and torch.nn.utils see ---

    def get(self, handle: ParamHandle) -> LandedGrad | None:
        """``p.grad``."""
        with handle.engine.using():
            self.average()
        record = handle.grad
        if record.state is GradState.ABSENT:
            return None
        if record.stand_in is None:
            record.stand_in = LandedGrad(handle)
        return record.stand_in

    def set(self, handle: ParamHandle, value: torch.Tensor | None) -> None:
        """``p.grad = value``."""
        with handle.engine.using():
            self._set(handle, value)

    def _set(self, handle: ParamHandle, value: torch.Tensor | None) -> None:
        record = handle.grad
        if value is None:
            self.clear(handle)
        elif value is not record.stand_in:
            wanted = handle.shard.spec.grad_dtype
            if not isinstance(value, torch.Tensor) or value.dtype not in (wanted, handle.shard.spec.dtype):
                found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
                raise UsageError(f"{handle.name}.grad must be None or a tensor of {wanted}, not {found}")
            if tuple(value.shape) != tuple(handle.shard.layout.placements[handle.index].shape):
                raise UsageError(f"{handle.name}.grad: a gradient of shape {tuple(value.shape)} for another shape")
            if value.layout is not torch.strided:
                raise UsageError(f"{handle.name}.grad must be a dense tensor, not one of layout {value.layout}")
            value = value.detach().clone()
            self.peers.same(f"setting the gradient of {handle.name}", value)
            self.clear(handle)
            self.average()
            handle.grad.state, handle.grad.averaged = GradState.LANDED, not self.peers.alone
            with self._store.guarding():
                handle.shard.settle()
                self.put(handle, value)

    def average(self) -> None:
        """Has gradients that wait for it averaged over the ranks. Every rank comes here."""
        if self.reducer is not None:
            self.reducer.average()

    def clear(self, handle: ParamHandle) -> None:
        """``p.grad = None``."""
        handle.grad = GradRecord()
        set_raw_grad(handle.param, None)  # what autograd had accumulated when an exception kept it from landing

    # --- backwards that fail ---

    def change(self, handle: ParamHandle) -> None:
        """The running backward is about to change the gradient of ``handle``."""
        self._changing.add(handle)

    @property
    def is_changing(self) -> bool:
        """Whether something has begun to change gradients, and is not done."""
        return bool(self._changing)

    def end_backward(self) -> None:
        """The backward came to its end: what it changed is whole."""
        self._changing, self.adds_to_consumed = set(), False

    def rebuild(self) -> None:
        """After an exception, with nothing in flight: what somebody had begun to change is torn, what is in memory goes home."""
        for handle in self._changing:
            if handle.grad.state is not GradState.CONSUMED:
                handle.grad = GradRecord(GradState.TORN)
        self._changing, self.adds_to_consumed = set(), False
        self._landing.clear()
        self._borrowed = self._borrowed.emptied()
        self.close_all(list(self._opened))
        if self._staging is not None:
            self._store.drain(self._staging)

    def land(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Adds ``grad`` to what has landed. Raises UsageError when a step has consumed that already."""
        record, shard = handle.grad, handle.shard
        if grad.is_sparse:
            raise UsageError(f"{handle.name} got a sparse gradient; build the embedding with sparse=False")
        self._reopen(handle)
        self.change(handle)
        if self.reducer is not None and not self.peers.keeps_gradients:
            self.reducer.add(handle, grad)
            return
        if record.state is GradState.TORN:
            return
        if record.averaged:
            raise UsageError(
                f"a backward through {handle.name} after its gradient was read: with shard='optimizer' reading averages it "
                "over the ranks. Read gradients after the last backward of a step, or use shard='gradients'."
            )
        if self.device.overlaps and shard.arrays["grad"].tier is not Tier.DEVICE:
            self._send(handle, grad)
            return
        nbytes = grad.numel() * shard.spec.grad_dtype.itemsize if self.device.is_host else 0  # else it stays on the device
        with self._store.traffic.copying("device->host", nbytes, handle.name):
            shard.settle()
            home = self._view(handle, write=True)
            if record.state is GradState.ABSENT:
                home.copy_(grad)
            else:
                self._apply_factors(handle, home)
                home.add_(grad)
            # While the bytes are near: they need not be read once more, from a disk perhaps.
            order = self._norm_order
            record.norm = None if order is None or record.viewed else (order, torch.linalg.vector_norm(home, order))
        record.state = GradState.LANDED

    def _send(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """:meth:`land` beside the compute. What is added is added on the device, and the norm taken there: both are the same
        for every home."""
        record, shard, where = handle.grad, handle.shard, self.device.where
        shard.settle()
        place = shard.layout.placements[handle.index]
        home = self._flat_view(handle, write=True)
        if grad.stride() != place.stride or grad.dtype != shard.spec.grad_dtype:
            grad = torch.empty_strided(place.shape, place.stride, dtype=shard.spec.grad_dtype, device=where).copy_(grad)
        flat = grad.detach().as_strided((place.numel,), (1,), grad.storage_offset())

        def take_norm(total: torch.Tensor, order: float) -> torch.Tensor:
            return torch.linalg.vector_norm(total.as_strided(place.shape, place.stride, total.storage_offset()), order)

        self._put_out(handle, home, flat, take_norm, adds=record.state is not GradState.ABSENT)
        record.state = GradState.LANDED

    def _put_out(self, handle: ParamHandle, home: torch.Tensor, flat: torch.Tensor, take_norm: Callable, *, adds: bool) -> None:
        """Sends ``flat`` home in the queue, where it is added to what is there or replaces it."""
        record, shard, where = handle.grad, handle.shard, self.device.where
        factors = list(record.factors)
        order = None if record.viewed else self._norm_order
        norm = torch.empty((), dtype=torch.float32, device=where) if order is not None else None

        def send() -> None:
            total = flat
            if adds:
                total = home if self.device.is_host else torch.empty_like(home, device=where).copy_(home, non_blocking=True)
                self._with_factors(factors, total).add_(flat)
            if total is not home:
                home.copy_(total, non_blocking=True)
            if norm is not None:
                norm.copy_(take_norm(total, order))

        freight = Copy("device->host", home.nbytes, handle.name)
        landing = self.device.put("out", send, behind=[self.device.now()], freight=freight)
        self._landing[shard] = landing
        self._borrowed.keep(flat, landing)
        if norm is not None:
            self._borrowed.keep(norm, landing)
        record.factors.clear()
        record.norm = None if norm is None else (order, norm)
        record.landing = landing

    def _flat_view(self, handle: ParamHandle, *, write: bool) -> torch.Tensor:
        """The gradient's elements at home in the order in which they lie."""
        place = handle.shard.layout.placements[handle.index]
        home = self._view(handle, write=write, settle=False)
        return home.as_strided((place.numel,), (1,), home.storage_offset())

    def _settle_landing(self, shard: ParamShard) -> None:
        """Waits until what was sent home is there: the host is about to use it."""
        if (landing := self._landing.get(shard)) is not None:
            with self._store.traffic.stalled("device->host", "gradients"):
                landing.wait()
            del self._landing[shard]

    def land_average(self, handle: ParamHandle, average: torch.Tensor) -> None:
        """Takes this rank's elements of the average of all ranks' gradients, in fp32: adds them to what has landed."""
        if not self.peers.keeps_gradients:
            self._reopen(handle)
        record, shard = handle.grad, handle.shard
        if record.state is GradState.TORN:
            return
        average = average.to(shard.spec.grad_dtype)
        if self._is_remote(handle):
            shard.settle()
            adds = record.state is not GradState.ABSENT and not self.peers.keeps_gradients
            home = self._slice(handle, write=True, settle=False)
            self._put_out(handle, home, average, self._slice_norm, adds=adds)
            record.stand_in_norm = None
            record.state, record.averaged = GradState.LANDED, True
            return
        with self._store.traffic.copying("device->host", average.numel() * shard.spec.grad_dtype.itemsize, handle.name):
            shard.settle()
            home = self._slice(handle, write=True)
            if record.state is GradState.ABSENT or self.peers.keeps_gradients:
                home.copy_(average)
            else:
                self._apply_factors(handle, home)
                home.add_(average)
        order = self._norm_order
        record.norm = None if order is None else (order, self._slice_norm(home, order))
        record.stand_in_norm = None
        record.state, record.averaged = GradState.LANDED, True

    def _reopen(self, handle: ParamHandle) -> None:
        """Before something is added: a consumed gradient is at home still, and is added to as torch does where the loss is another
        model's (a GAN's generator leaves gradients on the discriminator). Elsewhere somebody forgot zero_grad: raises UsageError."""
        if handle.grad.state is GradState.CONSUMED and self.adds_to_consumed and self.peers.keeps_gradients:
            raise UsageError(
                f"another model's loss would add to the gradient of {handle.name}, which a step has averaged over the ranks and consumed: with "
                "shard='optimizer' that cannot be done. Call zero_grad() before that backward, or use shard='gradients'."
            )
        if handle.grad.state is GradState.CONSUMED and self.adds_to_consumed:
            handle.grad.state, handle.grad.norm = GradState.LANDED, None
        elif handle.grad.state is GradState.CONSUMED:
            raise UsageError(
                f"a second backward through {handle.name} after optimizer.step(): its gradient was consumed by the "
                "step. Call optimizer.zero_grad() between step() and the next backward()."
            )

    @contextmanager
    def landing_rows(self, handle: ParamHandle, *, wanted: bool) -> Iterator[Callable]:
        """Lands a gradient in parts: yields ``land(begin, end, compute)``, which puts what ``compute()`` returns where
        rows ``begin`` to ``end`` are. Raises UsageError as :meth:`land` does."""
        record, shard = handle.grad, handle.shard  # never with other ranks: a plan with tiles is refused there
        if not wanted:
            yield lambda begin, end, compute: None
            return
        self._reopen(handle)
        if record.state is GradState.TORN:
            yield lambda begin, end, compute: None
            return
        self.change(handle)
        first = record.state is GradState.ABSENT

        def land(begin: int, end: int, compute: Callable[[], torch.Tensor]) -> None:
            part = compute()
            with self._store.traffic.copying("device->host", part.numel() * shard.spec.grad_dtype.itemsize, handle.name):
                with self._store.guarding():
                    shard.settle()
                    home = self._view(handle, write=True)
                    if not first:
                        self._apply_factors(handle, home)
                rows = home[begin:end]
                rows.copy_(part) if first else rows.add_(part.to(rows.device))

        record.norm = None
        yield land
        record.state = GradState.LANDED

    def zero(self, handle: ParamHandle) -> None:
        """Leaves zeros, which the next step applies."""
        record = handle.grad
        if record.state is GradState.TORN:
            record = handle.grad = GradRecord(stand_in=record.stand_in)
        handle.shard.settle()
        whole = self.peers.size == 1 or self.peers.keeps_gradients
        (self._view(handle, write=True) if whole else self._slice(handle, write=True)).zero_()
        record.factors.clear()
        record.norm = None
        record.state, record.averaged = GradState.LANDED, False

    def scale(self, handle: ParamHandle, factor: float) -> None:
        """Multiplies the gradient: noted, and done by the step's kernel."""
        record = handle.grad
        if factor == 1.0:
            return
        record.norm = None
        if len(record.factors) == native.MAX_GRAD_FACTORS:
            self._apply_factors(handle, self._slice(handle, write=True))
        record.factors.append(factor)

    def value(self, handle: ParamHandle, *, write: bool) -> torch.Tensor:
        """The gradient as a tensor over its home, with every factor applied. With other ranks it is a copy, made of all of
        their slices: :meth:`put` takes changes home."""
        if self.peers.size > 1:
            return self._gathered(handle)
        if self._is_remote(handle):
            return self._fetched(handle)
        record = handle.grad
        with self._store.guarding():
            handle.shard.settle()
            if record.state is GradState.CONSUMED:
                view = self._view(handle, write=False)
                return self._with_factors(record.factors, view.clone()) if record.factors else view
            view = self._view(handle, write=write or bool(record.factors))
            if write or record.factors:
                record.norm = None
            self._apply_factors(handle, view)
            return view

    def lends_copies(self, handle: ParamHandle) -> bool:
        """Whether :meth:`value` gives a copy, of which changes have to be :meth:`put` home."""
        return self.peers.size > 1 or self._is_remote(handle)

    def _is_remote(self, handle: ParamHandle) -> bool:
        """Whether the gradient is at home where the device cannot compute with it."""
        return not self.device.is_host and handle.shard.arrays["grad"].tier is not Tier.DEVICE

    def _fetched(self, handle: ParamHandle) -> torch.Tensor:
        """A copy on the device, with every factor applied."""
        place = handle.shard.layout.placements[handle.index]
        with self._store.guarding():
            handle.shard.settle()
            flat = self._flat_view(handle, write=False)
            self._settle_landing(handle.shard)
            with self._store.traffic.copying("host->device", flat.nbytes, handle.name):
                value = torch.empty_like(flat, device=self.device.where).copy_(flat)
        return self._with_factors(handle.grad.factors, value).as_strided(place.shape, place.stride)

    def put(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Makes ``value`` the gradient."""
        if self.peers.size == 1 and self._is_remote(handle):
            home = self._view(handle, write=True)
            handle.grad.factors.clear()
            handle.grad.norm = None
            with self._store.traffic.copying("device->host", home.nbytes, handle.name):
                home.copy_(value)
            return
        if self.peers.size == 1:
            self.value(handle, write=True).copy_(value)
            return
        place = handle.shard.layout.placements[handle.index]
        flat = torch.empty(place.numel, dtype=handle.shard.spec.grad_dtype, device="cpu")
        flat.as_strided(place.shape, place.stride).copy_(value)
        begin, end = handle.shard.slice_part(handle.index)
        self._slice(handle, write=True).copy_(flat[begin - place.offset : end - place.offset])
        handle.grad.factors.clear()
        handle.grad.norm = None
        handle.grad.averaged = True

    def number(self, factor: torch.Tensor) -> float:
        """``factor.item()``: once, of one by which every gradient is multiplied."""
        known, version, value = self._factor
        if known() is not factor or version != factor._version:
            value = factor.item()
            self._factor = weakref.ref(factor), factor._version, value
        return value

    def norm(self, handle: ParamHandle, order: float) -> torch.Tensor:
        """The vector norm of the gradient: the one taken when it landed, where that is still true."""
        record = handle.grad
        if self.peers.size > 1:
            return self._norm_over_ranks(handle, order)
        self._norm_order = order
        if record.norm is not None and record.norm[0] == order and not record.viewed:
            record.landing.precede()
            return record.norm[1].to(handle.shard.spec.grad_dtype, copy=True)
        norm = torch.linalg.vector_norm(self.value(handle, write=False), order)
        record.norm = order, norm.clone()
        return norm

    def change_own(self, handle: ParamHandle, change: Callable[[torch.Tensor], None]) -> None:
        """Has ``change`` work in place on this rank's elements of the gradient."""
        if not self._is_remote(handle):
            change(self.own(handle))
            return
        self._settled_slice(handle)
        home = self._slice(handle, write=True)
        there = torch.empty_like(home, device=self.device.where).copy_(home)
        change(there)
        home.copy_(there)
        handle.grad.norm = None

    def own(self, handle: ParamHandle) -> torch.Tensor:
        """This rank's elements of the gradient, to be changed in place."""
        if self.peers.size == 1:
            return self.value(handle, write=True)
        home = self._settled_slice(handle)
        handle.grad.norm = None
        return self._slice(handle, write=True) if handle.grad.state is GradState.LANDED else home

    # --- gradients whose slices are on several ranks ---

    def whole(self, shard: ParamShard) -> torch.Tensor:
        """This rank's whole flat gradient, where it has one (ZeRO-1), on the device."""
        shard.settle()
        self._settle_landing(shard)
        return shard.arrays["grad"].flat.to(self.device.where)

    def _slice(self, handle: ParamHandle, *, write: bool, settle: bool = True) -> torch.Tensor:
        """This rank's elements of the gradient, in the order they lie: a flat view of their home."""
        shard = handle.shard
        if settle:
            self._settle_landing(shard)
        if write:
            shard.drop_draft()
        array = shard.arrays["grad"]
        flat = array.flat if array.tier is not Tier.NVME else self._open(shard, write=write).flat
        begin, end = shard.slice_part(handle.index)
        first = shard.own("grad")[0]
        return flat[begin - first : end - first]

    def _settled_slice(self, handle: ParamHandle) -> torch.Tensor:
        """The same, up to date, for reading."""
        record = handle.grad
        with self._store.guarding():
            handle.shard.settle()
            if record.state is GradState.CONSUMED:
                return self._with_factors(record.factors, self._slice(handle, write=False).clone())
            home = self._slice(handle, write=bool(record.factors))
            if record.factors:
                record.norm = None
            self._apply_factors(handle, home)
            return home

    def _gathered(self, handle: ParamHandle) -> torch.Tensor:
        shard, place = handle.shard, handle.shard.layout.placements[handle.index]
        out = torch.empty(place.numel, dtype=shard.spec.grad_dtype, device="cpu")
        spans = [shard.slice_part(handle.index, rank) for rank in range(self.peers.size)]
        pieces = [(begin - place.offset, end - place.offset) for begin, end in spans]
        begin, end = pieces[self.peers.rank]
        out[begin:end] = self._settled_slice(handle)
        self.peers.assemble(out, pieces, f"reading the gradient of {handle.name}")
        return out.to(self.device.where).as_strided(place.shape, place.stride)

    def _norm_over_ranks(self, handle: ParamHandle, order: float) -> torch.Tensor:
        """Norms of all gradients that have none yet are put together at once: everyone asks for the others' next."""
        self._norm_order = order
        record = handle.grad
        if record.stand_in_norm is None or record.stand_in_norm[0] != order or record.norm is None:
            handles = [h for h in handle.engine.group_of if h.grad.state is not GradState.ABSENT]
            parts = torch.stack([self._own_norm(h, order) for h in handles])
            everyones = self.peers.exchange(parts, f"norms of {len(handles)} gradients")
            for h, norm in zip(handles, torch.linalg.vector_norm(everyones, order, dim=0)):
                h.grad.stand_in_norm = order, norm.to(h.shard.spec.grad_dtype)
        return record.stand_in_norm[1].clone()

    def _own_norm(self, handle: ParamHandle, order: float) -> torch.Tensor:
        record = handle.grad
        if record.norm is None or record.norm[0] != order:
            record.norm = order, self._slice_norm(self._settled_slice(handle).to(self.device.where), order)
        record.landing.precede()
        return record.norm[1]

    @staticmethod
    def _slice_norm(values: torch.Tensor, order: float) -> torch.Tensor:
        if not values.numel():
            return torch.zeros((), dtype=torch.float32, device=values.device)
        return torch.linalg.vector_norm(values, order, dtype=torch.float32)

    # --- what the optimizer sees ---

    def close_shard(self, shard: ParamShard) -> list[native.Ticket]:
        """Sends an opened shard's gradients to disk. What has to be over before they can be read at home."""
        opened = self._opened.get(shard)
        if opened is not None:
            if opened.dirty:
                self._settle_landing(shard)
                array = shard.arrays["grad"]
                # The disk keeps the slot until it has written it. Interrupted before the next line, it is written again.
                self._store.engine.write(array.extent, 0, opened.slot.address, array.nbytes, lease=opened.slot)
                opened.dirty = False
            del self._opened[shard]
            opened.slot.release()
        landing = self._landing.get(shard)
        ticket = self.device.ticket([landing]) if landing is not None else None
        written = shard.arrays["grad"].extent.writes_under_way() if "grad" in shard.arrays else None
        return [each for each in (ticket, written) if each is not None]

    def landing_of(self, shard: ParamShard) -> list[Event]:
        """What has to be over before the device can read a shard's gradients at home."""
        return [self._landing[shard]] if shard in self._landing else []

    def close_all(self, shards: Iterable[ParamShard]) -> None:
        """Sends what is opened of ``shards`` to disk."""
        for shard in [shard for shard in shards if shard in self._opened]:
            self.close_shard(shard)

    # --- homes ---

    def _view(self, handle: ParamHandle, *, write: bool, settle: bool = True) -> torch.Tensor:
        shard = handle.shard
        if settle:
            self._settle_landing(shard)
        if write:
            shard.drop_draft()
        array = shard.arrays["grad"]
        flat = array.flat if array.tier is not Tier.NVME else self._open(shard, write=write).flat
        return shard.layout.placements[handle.index].view(flat)

    def _open(self, shard: ParamShard, *, write: bool) -> OpenedShard:
        opened = self._opened.get(shard)
        if opened is None:
            array = shard.arrays["grad"]
            with self._store.traffic.stalled("host->nvme", "gradients"):
                slot = self._store.take_lease(self._staging, array.nbytes, self._close_oldest)
            # Read even when nothing landed yet: parameters without a gradient keep defined bytes beside the others.
            with self._store.traffic.stalled("nvme->host", "gradients"):
                self._store.engine.read(array.extent, 0, slot.address, array.nbytes, lease=slot).wait()
            self._store.verify(array, slot.address, array.nbytes)
            flat = native.tensor_at(self._staging.region, slot.address, array.numel, array.dtype)
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

    def apply_factors(self, handle: ParamHandle) -> None:
        """Does the multiplications that were asked for."""
        self._apply_factors(handle, self._settled_slice(handle))

    def _apply_factors(self, handle: ParamHandle, home: torch.Tensor) -> None:
        factors = handle.grad.factors
        if factors:
            outside = handle not in self._changing  # of a backward, which has changed the gradient until its end
            self._changing.add(handle)
            self._with_factors(factors, home)
            factors.clear()
            if outside:
                self._changing.discard(handle)

    @staticmethod
    def _with_factors(factors: list[float], grad: torch.Tensor) -> torch.Tensor:
        for factor in factors:
            grad.mul_(factor)
        return grad
