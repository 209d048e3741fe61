"""OpenedGrads: gives access to gradients whose home is a disk, in slots of the gradient staging
pool.

opened     the flat param's gradients are in a slot, where they are read and written
in pieces  they are larger than the pool: they pass through it one piece at a time
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ... import native
from ..homes.arrays import StateArray, whole_blocks
from ..homes.store import ArrayStore
from ..machine.sizes import round_down, round_up
from ..machine.tiers import Tier
from ..units.flat_param import FlatParam
from ..units.handle import handle_of
from ..units.staged_reads import PIECE_NBYTES
from .record import GradState

TILE = 64 * 1024  # elements: whole tiles of any update


@dataclass(eq=False)
class OpenedFlatParam:
    """A flat param's gradients in a staging slot."""

    slot: native.Lease
    flat: torch.Tensor
    dirty: bool = False


def spans_at_home(flat_param: FlatParam) -> list[tuple[int, int]] | None:
    """Returns the elements of a flat param's gradient that a disk has; None: all. None of a flat
    param without a gradient, and of rows the tiles of those that got one."""
    handles = [handle for handle in map(handle_of, flat_param.params) if handle is not None]
    there = [h for h in handles if h.grad is None or h.grad.state is not GradState.ABSENT]
    rows, numel = flat_param.homes.rows, flat_param.layout.numel
    if there and rows is None:
        return None
    spans = []
    for handle in there:
        placement = flat_param.layout.placements[handle.index]
        size = placement.numel // rows.count
        whole = handle.grad is None or handle.grad.are_others_zero or handle.grad.rows is None
        for row in range(rows.count) if whole else sorted(handle.grad.rows):
            begin, end = placement.offset + row * size, placement.offset + (row + 1) * size
            spans.append((round_down(begin, TILE), min(numel, round_up(end, TILE))))
    return spans


class OpenedGrads:
    """Shards' gradients in staging. The least recently used go to disk when another needs a
    slot."""

    def __init__(
        self,
        store: ArrayStore,
        staging: native.PinnedPool | None,
        wait_landing: Callable[[FlatParam], None],
    ):
        self._store, self._staging = store, staging
        self._wait_landing = wait_landing  # blocks until no transfer writes to a slot
        # Least recently used first
        self._opened: OrderedDict[FlatParam, OpenedFlatParam] = OrderedDict()

    def flat(self, flat_param: FlatParam, *, write: bool) -> torch.Tensor:
        """Returns this rank's gradient elements of ``flat_param``, valid until it is closed.

        ``write``: they are about to change. May block on a read from disk. A flat param whose
        gradients are all absent is zeroed and not read.
        """
        opened = self._opened.get(flat_param)
        if opened is None:
            array = flat_param.arrays["grad"]
            with self._store.traffic.stalled("host->nvme", "gradients"):
                slot = self._store.take_lease(self._staging, array.nbytes, self._close_oldest)
            flat = native.tensor_at(self._staging.region, slot.address, array.numel, array.dtype)
            spans = spans_at_home(flat_param)
            if spans is not None:
                flat.zero_()  # what has no gradient gets defined bytes
            with self._store.traffic.stalled("nvme->host", "gradients"):
                for begin, end in whole_blocks(array, spans):
                    self._store.start_read(array, begin, slot, end - begin, at=begin).wait()
            opened = self._opened[flat_param] = OpenedFlatParam(slot, flat)
        opened.dirty |= write
        self._opened.move_to_end(flat_param)
        return opened.flat

    def are_in_pieces(self, flat_param: FlatParam) -> bool:
        """Tells whether the gradients of ``flat_param`` pass in pieces."""
        array = flat_param.homes.arrays["grad"]
        return array.tier is Tier.NVME and array.nbytes > self._staging.capacity_nbytes

    def pieces(
        self, array: StateArray, begin: int, end: int, *, fresh: bool, write: bool
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields elements ``begin`` to ``end`` of gradients that pass in pieces, each with its
        first one's number. What a piece has become is at home when the next one is asked for.
        ``fresh``: all will be overwritten, so that nothing is read. Not ``write``: nothing is."""
        size, block = array.dtype.itemsize, native.CHECKSUM_NBYTES
        most = min(PIECE_NBYTES, self._staging.capacity_nbytes)
        start, stop = begin * size, end * size
        for first, last in whole_blocks(array, [(begin, end)] if begin < end else []):
            for at in range(first, last, most):
                nbytes = min(most, last - at)
                slot = self._store.take_lease(self._staging, nbytes, self._close_oldest)
                parts = {(at, at + nbytes)}
                if fresh:  # only blocks of which a part stays
                    parts = {(at, at + min(block, nbytes))} if at < start else set()
                    if stop < at + nbytes:
                        parts.add((round_down(stop, block), at + nbytes))
                for offset, end in parts:
                    self._store.start_read(array, offset, slot, end - offset, at=offset - at).wait()
                low, high = max(at, start), min(at + nbytes, stop)
                yield (
                    low // size,
                    native.tensor_at(
                        self._staging.region,
                        slot.address + low - at,
                        (high - low) // size,
                        array.dtype,
                    ),
                )
                if write:
                    self._store.start_write(array, at, slot, nbytes)
                slot.release()

    def stage_in(self, staging: native.PinnedPool | None) -> None:
        """Opens gradients in ``staging`` from now on. None may be open."""
        self._staging = staging

    def close(self, flat_param: FlatParam) -> None:
        """Starts writing the gradients of ``flat_param`` to disk, if they changed, and releases
        their slot."""
        opened = self._opened.get(flat_param)
        if opened is None:
            return
        if opened.dirty:
            self._wait_landing(flat_param)
            array = flat_param.arrays["grad"]
            # The write keeps the slot until it completes. If interrupted before the next line, it
            # is repeated.
            for begin, end in whole_blocks(array, spans_at_home(flat_param)):
                self._store.start_write(array, begin, opened.slot, end - begin, at=begin)
        del self._opened[flat_param]
        opened.slot.release()

    def _close_oldest(self) -> bool:
        """Closes the least recently used flat param. Returns False if none is open."""
        oldest = next(iter(self._opened), None)
        if oldest is not None:
            self.close(oldest)
        return oldest is not None

    def settle(self) -> None:
        """Closes all opened flat params, and blocks until every slot is free."""
        for flat_param in list(self._opened):
            self.close(flat_param)
        if self._staging is not None:
            self._store.drain(self._staging)
