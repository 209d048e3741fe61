"""GradValues: reads and changes gradients at home as torch would, whatever their home.

factor     a multiplication of the gradient that was asked for and not done yet: the optimizer kernel does it, rounding
           as the in-place multiplication would have
changing   gradients that the running backward, or a multiplication, has begun to change: torn when it is cut short
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..state.dtensors import counts_here, is_distributed
from ..state.handle import ParamHandle
from .homes import GradHomes
from .record import GradRecord, GradState


class GradValues(GradHomes):
    """Values, factors and norms of gradients. Used from the thread that runs backward or the step."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._changing: set[ParamHandle] = set()
        self._factor: tuple[Callable, int, float] = (lambda: None, 0, 1.0)  # the last tensor gradients were multiplied by
        self._norm_order: float | None = None  # of the norms that are asked for: they are taken as gradients land
        self._handles: list[ParamHandle] = []  # whose gradients these are

    def track(self, handle: ParamHandle) -> None:
        """Gives ``handle`` the record of a gradient that is absent."""
        handle.grad = GradRecord()
        self._handles.append(handle)

    def apply_factors(self, handle: ParamHandle) -> None:
        """Does the multiplications that were asked for."""
        self._apply_factors(handle, self._arrived_slice(handle))

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

    def value(self, handle: ParamHandle, *, write: bool) -> torch.Tensor:
        """Returns the gradient as a tensor over its home, with every factor applied. With other ranks it is a copy, made of all of
        their slices; where the device cannot compute with the home, a copy there. :meth:`put` takes changes of a copy home."""
        if self.ranks.size > 1:
            return self._gathered(handle)
        if self._is_remote(handle):
            return self._fetched(handle)
        record = handle.grad
        with self._store.guarding():
            handle.shard.wait()
            if record.state is GradState.CONSUMED:
                view = self._view(handle, write=False)
                return self._with_factors(record.factors, view.clone()) if record.factors else view
            view = self._view(handle, write=write or bool(record.factors))
            if write or record.factors:
                record.norm = None
            self._apply_factors(handle, view)
            return view

    def lends_copies(self, handle: ParamHandle) -> bool:
        """Tells whether :meth:`value` gives a copy, of which changes have to be :meth:`put` home."""
        return self.ranks.size > 1 or self._is_remote(handle)

    def _fetched(self, handle: ParamHandle) -> torch.Tensor:
        """A copy on the device, with every factor applied."""
        place = handle.shard.layout.placements[handle.index]
        with self._store.guarding():
            handle.shard.wait()
            flat = self._flat_view(handle, write=False)
            self._wait_landing(handle.shard)
            with self._store.traffic.copying("host->device", flat.nbytes, handle.name):
                value = torch.empty_like(flat, device=self.device.where).copy_(flat)
        return self._with_factors(handle.grad.factors, value).as_strided(place.shape, place.stride)

    def put(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Makes ``value`` the gradient."""
        if self.ranks.size == 1 and self._is_remote(handle):
            home = self._view(handle, write=True)
            handle.grad.factors.clear()
            handle.grad.norm = None
            with self._store.traffic.copying("device->host", home.nbytes, handle.name):
                home.copy_(value)
            return
        if self.ranks.size == 1:
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
        """Returns ``factor.item()``, taken once of a factor by which every gradient is multiplied."""
        known, version, value = self._factor
        if known() is not factor or version != factor._version:
            value = factor.item()
            self._factor = weakref.ref(factor), factor._version, value
        return value

    def norm(self, handle: ParamHandle, order: float) -> torch.Tensor:
        """Returns the vector norm of the gradient: the one taken when it landed, where that is still true."""
        record = handle.grad
        if self.ranks.size > 1:
            return self._norm_over_ranks(handle, order)
        self._norm_order = order
        if record.norm is not None and record.norm[0] == order and not record.viewed:
            record.landing.precede()
            return record.norm[1].to(handle.shard.spec.grad_dtype, copy=True)
        norm = self._norm_of(self.value(handle, write=False), order)
        record.norm = order, norm.clone()
        return norm.to(handle.shard.spec.grad_dtype)

    def _norm_of(self, values: torch.Tensor, order: float) -> torch.Tensor:
        """Takes a norm as torch does; in fp32 where it is put together with those of other ranks."""
        if not values.numel():  # of a part that has no element, of which a largest one is not defined
            return torch.zeros((), dtype=torch.float32, device=values.device)
        return torch.linalg.vector_norm(values, order, dtype=torch.float32 if self.ranks.is_cut else None)

    def total_norm(self, order: float) -> torch.Tensor:
        """Computes the norm of all gradients together, in fp32: the same bits on every rank.

        Each element counts once: of what the ranks of a mesh hold in common, the first one's.
        """
        self._norm_order = order
        handles = [handle for handle in self._handles if handle.grad.state is not GradState.ABSENT]
        total = self._norm_here(handles, order)
        return torch.linalg.vector_norm(self.collectives.exchange_over_stages(total, "the norm of all gradients"), order)

    def _norm_here(self, handles: list[ParamHandle], order: float) -> torch.Tensor:
        """The same of the ranks that have these parameters, or other parts of them."""
        if not handles:
            return torch.zeros((), dtype=torch.float32, device=self.device.where)
        nothing = torch.zeros((), dtype=torch.float32, device=self.device.where)
        # Not multiplied by whether it counts: infinity times nothing is not a number.
        parts = torch.stack([self._own_norm(h, order).to(torch.float32) if self.counts(h) else nothing for h in handles])
        everyones = self.collectives.exchange(parts, f"the norm of {len(handles)} gradients", over_tensors=True)
        return torch.linalg.vector_norm(everyones, order)

    def counts(self, handle: ParamHandle) -> bool:
        """Tells whether this rank's part of ``handle`` is the one that counts: of what ranks hold in common the first is."""
        if not handle.is_counted:
            return False
        if is_distributed(handle.param):
            return counts_here(handle.param)
        return self.ranks.part == 0

    def change_own(self, handle: ParamHandle, change: Callable[[torch.Tensor], None]) -> None:
        """Has ``change`` work in place on this rank's elements of the gradient."""
        if not self._is_remote(handle):
            change(self.own(handle))
            return
        self._arrived_slice(handle)
        home = self._slice(handle, write=True)
        there = torch.empty_like(home, device=self.device.where).copy_(home)
        change(there)
        home.copy_(there)
        handle.grad.norm = None

    def own(self, handle: ParamHandle) -> torch.Tensor:
        """Returns this rank's elements of the gradient, to be changed in place."""
        if self.ranks.size == 1:
            return self.value(handle, write=True)
        home = self._arrived_slice(handle)
        handle.grad.norm = None
        return self._slice(handle, write=True) if handle.grad.state is GradState.LANDED else home

    def _arrived_slice(self, handle: ParamHandle) -> torch.Tensor:
        """The same, up to date, for reading."""
        record = handle.grad
        with self._store.guarding():
            handle.shard.wait()
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
        spans = [shard.slice_part(handle.index, rank) for rank in range(self.ranks.size)]
        pieces = [(begin - place.offset, end - place.offset) for begin, end in spans]
        begin, end = pieces[self.ranks.rank]
        out[begin:end] = self._arrived_slice(handle)
        self.collectives.assemble(out, pieces, f"reading the gradient of {handle.name}")
        return out.to(self.device.where).as_strided(place.shape, place.stride)

    def _norm_over_ranks(self, handle: ParamHandle, order: float) -> torch.Tensor:
        """Norms of all gradients that have none yet are put together at once: everyone asks for the others' next."""
        self._norm_order = order
        record = handle.grad
        if record.stand_in_norm is None or record.stand_in_norm[0] != order or record.norm is None:
            handles = [h for h in self._handles if h.grad.state is not GradState.ABSENT]
            parts = torch.stack([self._own_norm(h, order) for h in handles])
            everyones = self.collectives.exchange(parts, f"norms of {len(handles)} gradients")
            for h, norm in zip(handles, torch.linalg.vector_norm(everyones, order, dim=0)):
                h.grad.stand_in_norm = order, norm.to(h.shard.spec.grad_dtype)
        return record.stand_in_norm[1].clone()

    def _own_norm(self, handle: ParamHandle, order: float) -> torch.Tensor:
        record = handle.grad
        if self.ranks.size == 1:
            self.norm(handle, order)
            return record.norm[1]
        if record.norm is None or record.norm[0] != order:
            record.norm = order, self._slice_norm(self._arrived_slice(handle).to(self.device.where), order)
        record.landing.precede()
        return record.norm[1]

    @staticmethod
    def _slice_norm(values: torch.Tensor, order: float) -> torch.Tensor:
        if not values.numel():
            return torch.zeros((), dtype=torch.float32, device=values.device)
        return torch.linalg.vector_norm(values, order, dtype=torch.float32)
