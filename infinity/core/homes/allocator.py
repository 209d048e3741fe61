"""ArrayAllocator: allocates flat arrays at their homes: memory, or space in swap files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import native
from ..machine import processors
from ..machine.accelerator import no_room
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.sizes import round_up
from ..machine.tiers import Tier
from .arrays import StateArray
from .swap_space import SwapSpace


class ArrayAllocator:
    """Allocates arrays at their homes: the plan's before :meth:`open`, and more later if there is
    room."""

    def __init__(self, space: SwapSpace, ledger: Ledger, device: Device):
        self.space, self._ledger, self._device = space, ledger, device
        self._is_open = False
        self._absent: list[native.Region] = []  # pages not yet populated
        self._pages: native.Pages | None = None  # being populated

    def allocate(
        self,
        tier: Tier,
        dtype: torch.dtype,
        numel: int,
        purpose: str,
        **how: Any,
    ) -> StateArray:
        """Allocates a zeroed array of ``numel`` elements at home on ``tier``. ``how`` host memory
        is allocated, as :meth:`make_region` takes it. Raises CapacityError over the tier's
        budget."""
        nbytes = numel * dtype.itemsize
        # Memory comes in pages
        charge = self._ledger.reserve(tier, round_up(nbytes, native.BLOCK_NBYTES), purpose)
        if tier is Tier.NVME:
            return StateArray(tier, dtype, numel, self.space.plan(nbytes), None, charge)
        region = None
        if tier is Tier.DEVICE and not self._device.is_host:
            flat = self._device.zeros(numel, dtype, purpose)
        else:
            region = self.make_region(nbytes, **how)
            flat = native.tensor_at(region, region.address, numel, dtype)
        return StateArray(
            tier,
            dtype,
            numel,
            native.Extent.in_memory(flat.data_ptr(), nbytes, region),
            flat,
            charge,
            region,
        )

    def make_region(
        self,
        nbytes: int,
        *,
        copied: bool = True,
        make: Callable[..., native.Region] = native.Region,
    ) -> native.Region:
        """Allocates page-aligned memory by ``make``. ``copied``: registered with the device, which
        copies it.

        Every page is populated on return. Before :meth:`open` on the host only after
        :meth:`await_pages`: the kernel clears pages while values are read and copied. A device
        registers only populated pages.
        """
        later = not self._is_open and self._device.is_host
        region = make(nbytes, huge_pages=True, touch_threads=0 if later else processors.for_pages())
        if later:
            self._absent.append(region)
        if copied:
            self._device.pin(region)
        return region

    def open(self) -> None:
        """Begins to populate the pages of all regions so far. Later arrays are not planned."""
        self._is_open = True
        self._pages = native.Pages(self._absent, processors.for_pages())
        self._absent = []

    def await_pages(self) -> None:
        """Blocks until every page is populated. Raises the error of the thread that populates
        them."""
        if self._pages is not None:
            self._pages.wait()
            self._pages = None

    def allocate_more(
        self, tier: Tier, nbytes: int, purpose: str, *, folder: str | None = None
    ) -> StateArray:
        """Allocates ``nbytes`` bytes as :meth:`allocate` does, also after :meth:`open`; the plan
        grows by as much. On disk as :meth:`SwapSpace.allocate`."""
        if tier is Tier.NVME:
            return self.space.allocate(nbytes, purpose, folder)
        array = self.allocate(tier, torch.uint8, nbytes, purpose)
        self._ledger.accounts[tier].planned_nbytes += round_up(nbytes, native.BLOCK_NBYTES)
        return array

    def make_room(self, tier: Tier, nbytes: int, purpose: str) -> None:
        """Makes room for arrays of ``nbytes`` in all, before the first of them is allocated, so
        that the error names all, and beside all that is planned. Charges disk space alone. Raises
        CapacityError."""
        if tier is Tier.NVME:
            self.space.make_room(nbytes, purpose)
        elif (room := self._ledger.room(tier, planned=True)) is not None and nbytes > room:
            raise self._ledger.refusal(tier, nbytes, purpose, "planned")

    def allocate_later(
        self, tier: Tier, dtype: torch.dtype, numel: int, purpose: str
    ) -> StateArray:
        """Allocates an array as :meth:`allocate` does, after :meth:`open`. :meth:`free_more` frees
        it."""
        array = self.allocate_more(tier, numel * dtype.itemsize, purpose)
        array.dtype, array.numel = dtype, numel
        if array.flat is not None:
            array.flat = array.flat.view(dtype)
        return array

    def free_more(self, array: StateArray, *, after: Sequence[native.Ticket] = ()) -> None:
        """Frees an array of :meth:`allocate_more`. Space on disk is reused once the transfers
        ``after`` complete."""
        if array.tier is Tier.NVME:
            self.space.free(array, after)
        else:
            array.charge.release()
            self._ledger.accounts[array.tier].planned_nbytes -= round_up(
                array.nbytes, native.BLOCK_NBYTES
            )
            array.flat = array.extent = None

    def empty(self, array: StateArray) -> None:
        """Frees the memory of ``array``, whose contents are elsewhere. Its address stays."""
        if array.region is not None:
            array.region.discard()
        else:
            array.flat.untyped_storage().resize_(0)

    def refill(self, array: StateArray) -> None:
        """Allocates the memory of an array that was emptied. Idempotent. Raises CapacityError if
        the device has no room."""
        if array.region is None:
            try:
                array.flat.untyped_storage().resize_(array.nbytes)
            except torch.OutOfMemoryError as error:
                raise no_room(self._device, "state that comes back", error) from error
        elif not array.region.pinned:
            array.region.populate(processors.for_pages())
            self._device.pin(array.region)

    def close(self) -> None:
        """Stops populating pages. Repeat if interrupted."""
        if self._pages is not None:
            self._pages.stop()
            self._pages = None
        self._absent = []
