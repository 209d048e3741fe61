"""OpenedGrads: gives access to gradients whose home is a disk, in slots of the gradient staging
pool.

opened     the shard's gradients are in a slot, where they are read and written
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import native
from ..state.handle import handle_of
from ..state.shard import ParamShard
from ..storage.store import ShardStore
from .record import GradState


@dataclass(eq=False)
class OpenedShard:
    """A shard's gradients in a staging slot."""

    slot: native.Lease
    flat: torch.Tensor
    dirty: bool = False


def _is_empty(shard: ParamShard) -> bool:
    """Returns whether no parameter of ``shard`` has a gradient at home."""
    grads = [handle.grad for handle in map(handle_of, shard.params) if handle is not None]
    return all(grad is not None and grad.state is GradState.ABSENT for grad in grads)


class OpenedGrads:
    """Shards' gradients in staging. The least recently used go to disk when another needs a
    slot."""

    def __init__(
        self,
        store: ShardStore,
        staging: native.PinnedPool | None,
        wait_landing: Callable[[ParamShard], None],
    ):
        self._store, self._staging = store, staging
        self._wait_landing = wait_landing  # blocks until no transfer writes to a slot
        # Least recently used first
        self._opened: OrderedDict[ParamShard, OpenedShard] = OrderedDict()

    def flat(self, shard: ParamShard, *, write: bool) -> torch.Tensor:
        """Returns this rank's gradient elements of ``shard``, valid until it is closed.

        ``write``: they are about to change. May block on a read from disk. A shard whose gradients
        are all absent is zeroed and not read.
        """
        opened = self._opened.get(shard)
        if opened is None:
            array = shard.arrays["grad"]
            with self._store.traffic.stalled("host->nvme", "gradients"):
                slot = self._store.take_lease(self._staging, array.nbytes, self._close_oldest)
            flat = native.tensor_at(self._staging.region, slot.address, array.numel, array.dtype)
            if _is_empty(shard):
                flat.zero_()  # parameters without a gradient get defined bytes
            else:
                with self._store.traffic.stalled("nvme->host", "gradients"):
                    self._store.start_read(array, 0, slot, array.nbytes).wait()
            opened = self._opened[shard] = OpenedShard(slot, flat)
        opened.dirty |= write
        self._opened.move_to_end(shard)
        return opened.flat

    def stage_in(self, staging: native.PinnedPool | None) -> None:
        """Opens gradients in ``staging`` from now on. None may be open."""
        self._staging = staging

    def close(self, shard: ParamShard) -> None:
        """Starts writing the gradients of ``shard`` to disk, if they changed, and releases their
        slot."""
        opened = self._opened.get(shard)
        if opened is None:
            return
        if opened.dirty:
            self._wait_landing(shard)
            array = shard.arrays["grad"]
            # The write keeps the slot until it completes. If interrupted before the next line, it
            # is repeated.
            self._store.start_write(array, 0, opened.slot, array.nbytes)
        del self._opened[shard]
        opened.slot.release()

    def _close_oldest(self) -> bool:
        """Closes the least recently used shard. Returns False if none is open."""
        oldest = next(iter(self._opened), None)
        if oldest is not None:
            self.close(oldest)
        return oldest is not None

    def settle(self) -> None:
        """Closes all opened shards, and blocks until every slot is free."""
        for shard in list(self._opened):
            self.close(shard)
        if self._staging is not None:
            self._store.drain(self._staging)
