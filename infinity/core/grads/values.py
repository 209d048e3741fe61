"""GradValues: reads and changes gradients at home as torch would, whatever their home."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Sequence

import torch

from ... import native
from ...ranks.collectives import Collectives
from ..homes.store import ArrayStore
from ..units.forms import division_of, is_common
from ..units.handle import ParamHandle
from .changes import GradChanges, multiply
from .homes import GradHomes
from .norms import LandingNorms
from .record import GradRecord, GradState

NORM_NUMEL = 1024 * 1024  # elements of a part of a gradient that is never whole


class GradValues:
    """Values and norms of gradients. Used from the thread that runs backward or the step."""

    def __init__(self, homes: GradHomes, store: ArrayStore, collectives: Collectives):
        self.homes, self.device = homes, homes.device
        self.collectives, self.ranks = collectives, collectives.ranks
        self.changes, self.norms = GradChanges(), LandingNorms(collectives.ranks)
        self._store = store
        # Cache of number(): tensor, version, value
        self._factor: tuple[Callable, int, float] = (lambda: None, 0, 1.0)
        self.handles: list[ParamHandle] = []  # the tracked parameters

    def track(self, handle: ParamHandle) -> None:
        """Gives ``handle`` the record of an absent gradient."""
        handle.grad = GradRecord()
        self.handles.append(handle)

    def prepare_factor(self, handle: ParamHandle, factor: float) -> None:
        """Prepares the gradient for one more pending ``factor``: applies the others if there is no
        room for it. In an update by rows, rows of zeros become rows as others if the product of
        zero and the factor is another value."""
        if len(handle.grad.factors) == native.MAX_GRAD_FACTORS:
            self._arrived_shard(handle, write=True)  # applies them
        if not 0 < factor < math.inf and handle.grad.rows is not None:
            self.homes.view(handle, write=True)

    def value(self, handle: ParamHandle, *, write: bool) -> torch.Tensor:
        """Returns the gradient as a tensor over its home, with every factor applied.

        With several ranks it is a copy, gathered from all shards: every rank calls this. If the
        device cannot compute with the home, it is a copy on the device. :meth:`put` sends changes
        of a copy home.
        """
        if handle.flat_param.ranks.size > 1:
            return self._gathered(handle)
        if self.homes.is_remote(handle):
            return self._fetched(handle)
        record = handle.grad
        with self._store.guard:
            handle.flat_param.homes.wait_running()
            if record.state is GradState.CONSUMED and not write:
                view = self.homes.view(handle, write=False)
                return multiply(view.clone(), record.factors) if record.factors else view
            view = self.homes.view(handle, write=write or bool(record.factors))
            if write or record.factors:
                record.norm = None
            self.changes.apply_factors(handle, [view])
            return view

    def lends_copies(self, handle: ParamHandle) -> bool:
        """Returns whether :meth:`value` returns a copy, whose changes need :meth:`put`."""
        return handle.flat_param.ranks.size > 1 or self.homes.is_remote(handle)

    def _fetched(self, handle: ParamHandle) -> torch.Tensor:
        """Returns a copy on the device, with every factor applied."""
        placement = handle.flat_param.layout.placements[handle.index]
        with self._store.guard:
            handle.flat_param.homes.wait_running()
            flat = self.homes.flat_view(handle, write=False)
            self.homes.queue.wait(handle.flat_param)
            with self._store.traffic.copying("host->device", flat.nbytes, handle.name):
                is_copy = self.homes.are_in_pieces(handle.flat_param)
                value = flat.to(self.device.where, copy=not is_copy)
        return multiply(value, handle.grad.factors).as_strided(placement.shape, placement.stride)

    def note_edit(self, handle: ParamHandle, by: torch.Tensor | float) -> None:
        """Notes a user's change of a gradient, which the other ranks must make, too. ``by``: a
        factor, or the new values."""
        if not self.ranks.alone:
            handle.grad.note_edit(
                by, is_own=isinstance(by, torch.Tensor) and not is_common(handle.param)
            )

    def put(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Copies ``value`` to the gradient's home."""
        is_alone = handle.flat_param.ranks.size == 1
        placement = handle.flat_param.layout.placements[handle.index]
        if value.stride() != placement.stride:
            dtype = handle.flat_param.spec.grad_dtype
            value = torch.empty_strided(placement.shape, placement.stride, dtype=dtype).copy_(value)
        flat = value.as_strided((placement.numel,), (1,))
        nbytes = flat.nbytes * (is_alone and self.homes.is_remote(handle))
        with self._store.traffic.copying("device->host", nbytes, handle.name):
            for begin, home in self.homes.pieces(handle, fresh=True):
                home.copy_(flat[begin:][: home.numel()])
        handle.grad.factors.clear()
        handle.grad.norm = None
        handle.grad.averaged |= not is_alone

    def number(self, factor: torch.Tensor) -> float:
        """Returns ``factor.item()``. The last one is cached, because every gradient is multiplied
        by it."""
        ref, version, value = self._factor
        if ref() is not factor or version != factor._version:
            value = factor.item()
            self._factor = weakref.ref(factor), factor._version, value
        return value

    def norm(self, handle: ParamHandle, order: float) -> torch.Tensor:
        """Returns the vector norm of the gradient: the one taken when it landed, if that is still
        valid."""
        record = handle.grad
        if self.ranks.size > 1:
            return self._norm_over_ranks(handle, order)
        self.norms.ask(order)
        if record.norm is not None and record.norm[0] == order:
            record.landing.precede()
            return record.norm[1].to(handle.flat_param.spec.grad_dtype, copy=True)
        if handle.flat_param.is_whole:
            norm = self.norms.of(self.value(handle, write=False), order)
        else:
            norm = self._norm_of_parts(handle, order)
        record.norm = order, norm.clone()
        return norm.to(handle.flat_param.spec.grad_dtype)

    def _norm_of_parts(self, handle: ParamHandle, order: float) -> torch.Tensor:
        """Computes the norm of a gradient of which only a part is ever on the device: from those
        of equal parts, for any home."""
        handle.flat_param.homes.wait_running()
        where, factors, norms = self.device.where, handle.grad.factors, []
        for begin in range(0, numel := handle.param.numel(), NORM_NUMEL):
            end = min(numel, begin + NORM_NUMEL)
            with self._store.guard:
                for _, home in self.homes.pieces(handle, begin, end, write=False):
                    part = multiply(home.to(where, copy=bool(factors)), factors)
                    norms.append(self.norms.of_shard(part, order))
        nothing = torch.zeros((), device=where)  # at home on this rank
        return torch.linalg.vector_norm(torch.stack(norms or [nothing]), order)

    def are_finite(self, handles: Sequence[ParamHandle]) -> bool:
        """Returns whether norms taken as the gradients landed show that all elements are finite.
        Else it is unknown: norms are taken from the next landing on. Waits for the device if its
        gradients are at home elsewhere."""
        if not self.ranks.alone or not all(map(self.homes.is_remote, handles)):
            return False
        if self.norms.order is None:
            self.norms.ask(2.0)
        records = [handle.grad for handle in handles]
        if any(record.norm is None or record.norm[0] <= 0 or record.factors for record in records):
            return False
        for record in records:
            record.landing.precede()
        return bool(torch.stack([record.norm[1].float() for record in records]).isfinite().all())

    def total_norm(self, order: float, *, among: Container[ParamHandle]) -> torch.Tensor:
        """Computes the norm of the gradients of ``among`` together, in fp32: the same bits on every
        rank. Every rank calls this.

        Each element counts once: of elements that ranks have in common, only the first rank's.
        """
        self.norms.ask(order)
        handles = [
            handle
            for handle in self.handles
            if handle.grad.state is not GradState.ABSENT and handle in among
        ]
        everyones = (
            self._norms_here(handles, order)
            if handles
            else torch.zeros(0, dtype=torch.float32, device=self.device.where)
        )
        if (stages := self.ranks.pp_group) is None:
            return torch.linalg.vector_norm(everyones, order)
        # First per parameter, then over all norms in sorted order: equal bits for any split into
        # stages.
        norms_here = torch.linalg.vector_norm(everyones, order, dim=0).tolist() if handles else []
        lists = self.collectives.collect(norms_here, "the norm of all gradients", [stages])
        norms = torch.tensor(
            [norm for theirs in lists for norm in theirs if norm],
            dtype=torch.float32,
            device="cpu",
        )
        total = (
            torch.linalg.vector_norm(norms.sort().values, order) if len(norms) else torch.zeros(())
        )
        return total.to(self.device.where)

    def _norms_here(self, handles: list[ParamHandle], order: float) -> torch.Tensor:
        """Returns the norms of each gradient's parts on the ranks that have a part of it: [ranks,
        gradients]."""
        nothing = torch.zeros((), dtype=torch.float32, device=self.device.where)
        # Select, do not multiply by 0/1: inf · 0 is NaN.
        parts = torch.stack(
            [
                self._own_norm(h, order).to(torch.float32) if self.counts(h) else nothing
                for h in handles
            ]
        )
        channels = filter(None, (self.ranks.shard_group, self.ranks.tp_group))
        return self.collectives.collect(parts, f"the norm of {len(handles)} gradients", channels)

    def counts(self, handle: ParamHandle) -> bool:
        """Returns whether this rank's local part of ``handle`` counts: of parts in common only the
        first does."""
        if not handle.is_counted:
            return False
        copy = division_of(handle.param).copy
        return (self.ranks.tp_rank if copy is None else copy) == 0

    def change_own(self, handle: ParamHandle, change: Callable[[torch.Tensor], None]) -> None:
        """Runs ``change`` in place on this rank's elements of the gradient."""
        if not self.lends_copies(handle):
            change(self.value(handle, write=True))
            return
        home = self._arrived_shard(handle, write=True)
        if not self.homes.is_remote(handle):
            change(self.homes.shard(handle, write=True))
            handle.grad.norm = None
            return
        there = torch.empty_like(home, device=self.device.where).copy_(home)
        change(there)
        remaining = there
        for _, home in self.homes.pieces(handle, fresh=True):
            home.copy_(remaining[: home.numel()])
            remaining = remaining[home.numel() :]
        handle.grad.norm = None

    def _arrived_shard(self, handle: ParamHandle, *, write: bool = False) -> torch.Tensor:
        """Returns this rank's elements of the gradient, with every factor applied; for reading, or
        the home itself (``write``)."""
        record = handle.grad
        with self._store.guard:
            handle.flat_param.homes.wait_running()
            if record.state is GradState.CONSUMED and not write:
                return multiply(self.homes.shard(handle, write=False).clone(), record.factors)
            if record.factors:
                record.norm = None
                parts = (part for _, part in self.homes.pieces(handle))
                self.changes.apply_factors(handle, parts)
            return self.homes.shard(handle, write=False)

    def _gathered(self, handle: ParamHandle) -> torch.Tensor:
        flat_param, placement = handle.flat_param, handle.flat_param.layout.placements[handle.index]
        out = torch.empty(placement.numel, dtype=flat_param.spec.grad_dtype, device="cpu")
        spans = [
            flat_param.layout.shard_part(handle.index, rank)
            for rank in range(flat_param.ranks.size)
        ]
        pieces = [(begin - placement.offset, end - placement.offset) for begin, end in spans]
        begin, end = pieces[flat_param.ranks.rank]
        out[begin:end] = self._arrived_shard(handle)
        flat_param.collectives.assemble(out, f"reading the gradient of {handle.name}", pieces)
        return out.to(self.device.where).as_strided(placement.shape, placement.stride)

    def _norm_over_ranks(self, handle: ParamHandle, order: float) -> torch.Tensor:
        """Exchanges the missing norms of all gradients at once, because a caller asks for the
        others next."""
        self.norms.ask(order)
        record = handle.grad
        if record.proxy_norm is None or record.proxy_norm[0] != order or record.norm is None:
            handles = [h for h in self.handles if h.grad.state is not GradState.ABSENT]
            parts = torch.stack([self._own_norm(h, order) for h in handles])
            said, row = f"norms of {len(handles)} gradients", [self.ranks.shard_group]
            everyones = self.collectives.collect(parts, said, row)
            norms = torch.linalg.vector_norm(everyones, order, dim=0)
            # Combined over the ranks with the same experts
            if (experts := self.ranks.expert_group) is not None:
                of_parts = torch.linalg.vector_norm(everyones[list(experts.places)], order, dim=0)
                is_part = torch.tensor(
                    [h.flat_param.ranks.ep_size > 1 for h in handles], device=norms.device
                )
                norms = torch.where(is_part, of_parts, norms)
            for h, norm in zip(handles, norms):
                h.grad.proxy_norm = order, norm.to(h.flat_param.spec.grad_dtype)
        return record.proxy_norm[1].clone()

    def _own_norm(self, handle: ParamHandle, order: float) -> torch.Tensor:
        record = handle.grad
        if self.ranks.size == 1:
            self.norm(handle, order)
            return record.norm[1]
        if record.norm is None or record.norm[0] != order:
            if handle.flat_param.is_whole:
                shard = self._arrived_shard(handle).to(self.device.where)
                record.norm = order, self.norms.of_shard(shard, order)
            else:
                record.norm = order, self._norm_of_parts(handle, order)
        record.landing.precede()
        return record.norm[1]

    def zero(self, handle: ParamHandle) -> None:
        """Zeroes the gradient. The next step applies the zeros."""
        record = handle.grad
        if record.state is GradState.TORN:
            record = handle.grad = GradRecord(proxy=record.proxy, shown=record.shown)
        handle.flat_param.homes.wait_running()
        for _, home in self.homes.pieces(handle, fresh=True):
            home.zero_()
        record.factors.clear()
        record.norm, record.proxy_norm = (
            (math.inf, torch.zeros((), device=self.device.where)),
            None,
        )
        record.averaged = False
        record.move(GradState.LANDED)

    def scale(self, handle: ParamHandle, factor: float) -> None:
        """Multiplies the gradient by ``factor``: noted here, applied by the step's kernel."""
        record = handle.grad
        if factor == 1.0:
            return
        self.note_edit(handle, factor)
        record.norm = None
        self.prepare_factor(handle, factor)
        record.factors.append(factor)
