"""GradHomes: provides the bytes of gradients at home for computing.

opened     home on a disk, bytes now in a staging slot (:mod:`infinity.core.grads.opened`)
landing    transfer home still in the device's queue (:mod:`infinity.core.grads.landing`)
in pieces  home on a disk, and larger than the staging: bytes pass one piece at a time
remote     the home is memory that the device cannot compute with, or the bytes come in pieces
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ... import native
from ...errors import InternalError
from ..homes.store import ArrayStore
from ..machine.device import Device
from ..machine.tiers import Tier
from ..units.flat_param import FlatParam
from ..units.handle import ParamHandle
from .landing import LandingQueue
from .opened import OpenedGrads


class GradHomes:
    """The homes of all gradients: device memory, host memory or disk. Used from the thread that
    runs backward or the step."""

    def __init__(
        self, store: ArrayStore, staging: native.PinnedPool | None, *, in_flight_nbytes: int = 0
    ):
        self.device: Device = store.device
        self._store = store
        self.queue = LandingQueue(self.device, store.traffic, in_flight_nbytes)
        self._opened = OpenedGrads(store, staging, self.queue.wait)
        self.are_in_pieces = self._opened.are_in_pieces

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
        """Returns whether the device cannot compute with the gradient's home."""
        array = handle.flat_param.arrays["grad"]
        return self.are_in_pieces(handle.flat_param) or not (
            self.device.is_host or array.tier is Tier.DEVICE
        )

    def pieces(
        self,
        handle: ParamHandle,
        begin: int = 0,
        end: int | None = None,
        *,
        fresh: bool = False,
        write: bool = True,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields what this rank has of the gradient's elements ``begin`` to ``end``, in storage
        order, to be changed: at home, or piece by piece, each at home when the next is asked for.
        Each comes with its first element's number. ``fresh``: all will be overwritten. Not
        ``write``: they are read only."""
        flat_param = handle.flat_param
        offset = flat_param.layout.placements[handle.index].offset
        low, high = flat_param.layout.own_part("grad", handle.index)
        low, high = max(low, offset + begin), high if end is None else min(high, offset + end)
        high = max(low, high)
        first = flat_param.layout.home_range("grad")[0]
        if not self.are_in_pieces(flat_param):
            home = self.flat(flat_param, write=write, wait=True)
            yield low - offset, home[low - first : high - first]
            return
        array = flat_param.arrays["grad"]
        low, high = low - first, high - first
        for at, home in self._opened.pieces(array, low, high, fresh=fresh, write=write):
            yield at + first - offset, home

    def view(self, handle: ParamHandle, *, write: bool, wait: bool = True) -> torch.Tensor:
        """Returns the whole gradient of ``handle`` as a tensor over its home. ``write``: it is
        about to change. ``wait``: block until landing gradients have arrived."""
        flat_param = handle.flat_param
        placement = flat_param.layout.placements[handle.index]
        if self.are_in_pieces(flat_param):
            return self.flat_view(handle, write=write).as_strided(placement.shape, placement.stride)
        return placement.view(self.flat(flat_param, write=write, wait=wait))

    def flat_view(self, handle: ParamHandle, *, write: bool) -> torch.Tensor:
        """Returns the gradient's elements at home, flat, in storage order."""
        placement = handle.flat_param.layout.placements[handle.index]
        return self._elements(
            handle.flat_param, placement.offset, placement.end, write=write, wait=False
        )

    def shard(self, handle: ParamHandle, *, write: bool, wait: bool = True) -> torch.Tensor:
        """Returns this rank's elements of the gradient, in storage order: a flat view of their
        home."""
        flat_param = handle.flat_param
        begin, end = flat_param.layout.shard_part(handle.index)
        return self._elements(flat_param, begin, end, write=write, wait=wait)

    def _elements(
        self, flat_param: FlatParam, begin: int, end: int, *, write: bool, wait: bool
    ) -> torch.Tensor:
        """Returns elements of the whole flat gradient at home; copies of them if they pass in
        pieces, which are not to be written."""
        first = flat_param.layout.home_range("grad")[0]
        if self.are_in_pieces(flat_param):
            if write:
                raise InternalError(f"the gradient of {flat_param.names[0]} is not there whole")
            return self._store.read(flat_param.arrays["grad"], begin - first, end - first)
        return self.flat(flat_param, write=write, wait=wait)[begin - first : end - first]

    def flat(
        self, flat_param: FlatParam, *, write: bool, wait: bool, defines: bool = True
    ) -> torch.Tensor:
        """Returns the flat gradient at home. ``defines``: rows that have no gradient become
        zeros."""
        if wait and self.queue.landing:
            self.queue.wait(flat_param)
        array = flat_param.homes.arrays["grad"]
        flat = (
            array.flat
            if array.tier is not Tier.NVME
            else self._opened.flat(flat_param, write=write)
        )
        for handle in flat_param.handles if defines and flat_param.homes.rows is not None else ():
            record = handle.grad
            if record is not None and not record.are_others_zero:
                rows = self.rows_view(handle)
                for row in set(range(len(rows))).difference(record.rows or ()):
                    rows[row].zero_()
                record.are_others_zero = True
            if record is not None and write:
                record.rows = None
        return flat

    def rows_view(self, handle: ParamHandle, *, wait: bool = True) -> torch.Tensor:
        """Returns the gradient of rows at home, ``[rows, elements]``, of which single rows are
        about to be set: the others are as they are."""
        flat = self.flat(handle.flat_param, write=True, wait=wait, defines=False)
        placement = handle.flat_param.layout.placements[handle.index]
        return flat[placement.offset : placement.end].view(handle.flat_param.homes.rows.count, -1)

    def whole(self, flat_param: FlatParam) -> torch.Tensor:
        """Returns this rank's whole flat gradient on the device, if its home is whole (ZeRO-1)."""
        flat_param.homes.wait_running()
        return self.flat(flat_param, write=True, wait=True).to(self.device.where)

    def close_flat_param(self, flat_param: FlatParam) -> list[native.Ticket]:
        """Sends a flat param's opened gradients to disk. Returns tickets that must complete before
        they can be read at home."""
        self._opened.close(flat_param)
        landing = self.queue.of(flat_param)
        ticket = self.device.ticket(landing) if landing else None
        written = (
            flat_param.arrays["grad"].extent.writes_under_way()
            if "grad" in flat_param.arrays
            else None
        )
        return [pending for pending in (ticket, written) if pending is not None]

    def close_all(self, flat_params: Iterable[FlatParam]) -> None:
        """Sends gradients home that were held back, and the opened ones of ``flat_params`` to
        disk."""
        self.queue.begin()
        for flat_param in flat_params:
            self._opened.close(flat_param)
