"""Lander: adds a gradient to its home: in place, or in the copy queue to the host beside the
compute.

home       a tensor over the bytes at home; a function if they are first brought into memory
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..homes.store import ArrayStore
from ..machine import storage_guard
from ..machine.tiers import Tier
from ..units.handle import ParamHandle
from .changes import GradChanges, multiply
from .homes import GradHomes
from .norms import LandingNorms

TakeNorm = Callable[[torch.Tensor, float], torch.Tensor]


class Lander:
    """Sends gradients and averages home. Used from the thread that runs backward or the step."""

    def __init__(
        self, homes: GradHomes, store: ArrayStore, changes: GradChanges, norms: LandingNorms
    ):
        self._grad_homes, self._device, self._store, self._changes, self._norms = (
            homes,
            homes.device,
            store,
            changes,
            norms,
        )

    def land(self, handle: ParamHandle, grad: torch.Tensor, *, adds: bool) -> None:
        """Sets the gradient of ``handle`` to ``grad``, or adds ``grad`` to it (``adds``)."""
        flat_param = handle.flat_param
        if flat_param.homes.update is not None:
            flat_param.homes.wait_running()
        tier = flat_param.homes.arrays["grad"].tier
        overlaps = self._device.overlaps and tier is not Tier.DEVICE
        if overlaps and storage_guard.references(grad) != 1:
            grad = grad.clone()  # a Function may write to memory that it shares before it is sent
        if tier is Tier.NVME and self._grad_homes.are_in_pieces(flat_param):
            self.land_span(handle, 0, self._flat(handle, grad), adds=adds)
        elif flat_param.homes.rows is not None and not (adds and handle.grad.rows is None):
            self._land_rows(handle, grad, self._norms.of, adds=adds)
        elif overlaps:
            placement = flat_param.layout.placements[handle.index]

            def take_norm(total: torch.Tensor, order: float) -> torch.Tensor:
                return self._norms.of(total.as_strided(placement.shape, placement.stride), order)

            home = self._grad_homes.flat_view(handle, write=True)
            self.enqueue(handle, home, self._flat(handle, grad), take_norm, adds=adds)
        else:
            home = self._grad_homes.flat(flat_param, write=True, wait=True)
            home = flat_param.layout.placements[handle.index].view(home)
            self._here(handle, home, grad, self._norms.of, adds=adds)

    def land_rows(
        self, handle: ParamHandle, ids: torch.Tensor, rows: torch.Tensor, *, adds: bool
    ) -> None:
        """Adds ``rows`` at ``ids`` to the gradient of ``handle``, or to zeros (not ``adds``).
        Blocks until what landed before has arrived."""
        with self._store.traffic.copying("device->host", rows.nbytes, handle.name):
            handle.flat_param.homes.wait_running()
            if adds:
                self._apply_factors(handle)
            else:
                for _, home in self._grad_homes.pieces(handle, fresh=True):
                    home.zero_()
            if self._grad_homes.are_in_pieces(handle.flat_param):
                for index, row in zip(ids.tolist(), rows):
                    self.land_span(handle, index * len(row), row, adds=True)
            else:
                home = self._grad_homes.view(handle, write=True)
                home.index_add_(0, ids.to(home.device), rows.to(home.device, home.dtype))
        handle.grad.norm = None

    def land_span(
        self, handle: ParamHandle, begin: int, values: torch.Tensor, *, adds: bool
    ) -> None:
        """Sets the gradient's elements from ``begin`` to flat ``values``, in storage order, or adds
        them. Blocks until they are home."""
        flat_param, start = handle.flat_param, time.perf_counter()
        flat_param.homes.wait_running()
        if adds:
            self._apply_factors(handle)
        end = begin + values.numel()
        for at, home in self._grad_homes.pieces(handle, begin, end, fresh=not adds):
            part = values[at - begin :][: home.numel()]
            home.add_(part.to(home.device)) if adds else home.copy_(part)
        handle.grad.norm = None
        nbytes = values.numel() * flat_param.spec.grad_dtype.itemsize
        self._store.traffic.copied_here("device->host", nbytes, handle.name, start)
        if self._device.is_host:
            self._device.note_freed(values.nbytes)  # by the caller

    def _apply_factors(self, handle: ParamHandle) -> None:
        self._changes.apply_factors(handle, (home for _, home in self._grad_homes.pieces(handle)))

    def _land_rows(
        self, handle: ParamHandle, grad: torch.Tensor, take_norm: TakeNorm, *, adds: bool
    ) -> None:
        """Lands a gradient of rows: those that are not zero. The others' bytes at home stay
        undefined until somebody wants them. The norm of a sum is taken if it is asked for."""
        record, flat_param = handle.grad, handle.flat_param
        rows, before = _rows_of(handle, grad), record.rows if adds else frozenset()
        order = None if adds else self._norms.order
        overlaps = self._device.overlaps and flat_param.arrays["grad"].tier is not Tier.DEVICE
        values = grad.to(flat_param.spec.grad_dtype) if overlaps or not adds else grad
        there = self._grad_homes.rows_view(handle, wait=not overlaps)
        row_values, factors = values.reshape(len(there), -1), list(record.factors)
        norm = torch.empty((), dtype=torch.float32, device=self._device.where)

        def send() -> None:
            for row in sorted(rows | before):
                self._send_row(
                    there[row], row_values[row], factors if row in before else None, adds=adds
                )
            if order is not None:
                norm.copy_(take_norm(values, order))

        nbytes = there[:1].nbytes * len(rows | before)
        if overlaps:
            record.landing = self._grad_homes.queue.send(
                flat_param, send, nbytes, handle.name, values, norm
            )
        else:
            with self._store.traffic.copying("device->host", nbytes, handle.name):
                send()
            if self._device.is_host:
                self._device.note_freed(grad.nbytes)  # by the caller
        record.factors.clear()
        record.norm = None if order is None else (order, norm)
        record.rows, record.are_others_zero = rows | before, adds and record.are_others_zero

    def _send_row(
        self,
        home: torch.Tensor,
        value: torch.Tensor,
        factors: list[float] | None,
        *,
        adds: bool,
    ) -> None:
        """Sets the row's gradient at ``home`` to ``value``, or adds it as to a whole gradient.
        ``factors``: of what is there; None: nothing is."""
        if not adds:
            home.copy_(value, non_blocking=True)
            return
        if factors is None:
            total = torch.zeros_like(home, device=self._device.where)
        else:
            total = home if self._device.is_host else home.to(self._device.where, non_blocking=True)
            multiply(total, factors)
        total.add_(value)
        if total is not home:
            home.copy_(total, non_blocking=True)

    def land_shard(
        self, handle: ParamHandle, shard: torch.Tensor, begin: int, *, adds: bool
    ) -> None:
        """Sets this rank's shard of the gradient from element ``begin`` to ``shard``, or adds it
        (``adds``). ``shard`` is flat, in storage order."""
        is_remote = self._grad_homes.is_remote(handle)
        flat_param = handle.flat_param
        flat_param.homes.wait_running()
        first, last = flat_param.layout.shard_part(handle.index)
        if self._grad_homes.are_in_pieces(flat_param) or shard.numel() < last - first:
            first -= flat_param.layout.placements[handle.index].offset
            self.land_span(handle, first + begin, shard, adds=adds)
            return
        if flat_param.homes.rows is not None and not (adds and handle.grad.rows is None):
            self._land_rows(handle, shard, self._norms.of_shard, adds=adds)
        elif is_remote:
            home = self._grad_homes.shard(handle, write=True, wait=False)
            self.enqueue(handle, home, shard, self._norms.of_shard, adds=adds)
        else:
            home = self._grad_homes.shard(handle, write=True)
            self._here(handle, home, shard, self._norms.of_shard, adds=adds)
        if is_remote:
            # Not held back: averages also land outside of a backward, where none would be torn.
            self._grad_homes.queue.begin()

    def _here(
        self,
        handle: ParamHandle,
        there: torch.Tensor,
        value: torch.Tensor,
        take_norm: TakeNorm,
        *,
        adds: bool,
    ) -> None:
        """Lands ``value`` at home, ``there``. Also takes the requested norm while the bytes are in
        cache, which saves a second read, perhaps from disk."""
        record, order, start = handle.grad, self._norms.order, time.perf_counter()
        if adds:
            self._changes.apply_factors(handle, [there])
            there.add_(value)
        else:
            there.copy_(value)
        record.norm = None if order is None else (order, take_norm(there, order))
        nbytes = there.nbytes if self._device.is_host else 0  # 0: it stays on the device
        self._store.traffic.copied_here("device->host", nbytes, handle.names[0], start)
        if self._device.is_host:
            self._device.note_freed(value.nbytes)  # by the caller

    def enqueue(
        self,
        handle: ParamHandle,
        home: torch.Tensor,
        value: torch.Tensor,
        take_norm: TakeNorm,
        *,
        adds: bool,
    ) -> None:
        """Lands ``value`` in the copy queue to the host, beside the compute. The sum and the norm
        are computed on the device, so both are the same for every home."""
        record, flat_param, where = handle.grad, handle.flat_param, self._device.where
        factors = list(record.factors)
        order = self._norms.order
        norm = torch.empty((), dtype=torch.float32, device=where) if order is not None else None

        def send() -> None:
            total = value
            if adds:
                total = (
                    home
                    if self._device.is_host
                    else torch.empty_like(home, device=where).copy_(home, non_blocking=True)
                )
                multiply(total, factors).add_(value)
            if total is not home:
                home.copy_(total, non_blocking=True)
            if norm is not None:
                norm.copy_(take_norm(total, order))

        read = [value] if norm is None else [value, norm]
        record.landing = self._grad_homes.queue.send(
            flat_param, send, home.nbytes, handle.name, *read
        )
        record.factors.clear()
        record.norm = None if norm is None else (order, norm)

    def _flat(self, handle: ParamHandle, grad: torch.Tensor) -> torch.Tensor:
        """Returns the elements of ``grad`` flat, in the order and dtype of the home."""
        placement = handle.flat_param.layout.placements[handle.index]
        dtype = handle.flat_param.spec.grad_dtype
        if grad.stride() != placement.stride or grad.dtype != dtype:
            laid_out = torch.empty_strided(
                placement.shape, placement.stride, dtype=dtype, device=self._device.where
            )
            grad = laid_out.copy_(grad)
        return grad.detach().as_strided((placement.numel,), (1,))


def _rows_of(handle: ParamHandle, grad: torch.Tensor) -> frozenset[int]:
    """Returns the rows whose gradient has another bit than those of zeros."""
    rows = grad.detach().reshape(handle.flat_param.homes.rows.count, -1).contiguous()
    if rows.storage_offset() * rows.itemsize % torch.int64.itemsize:
        rows = rows.clone()  # a part of another gradient, which cannot be read as words
    some = rows.view(torch.int64).any(dim=1)  # much faster than by its values
    return frozenset(torch.nonzero(some).flatten().tolist())
