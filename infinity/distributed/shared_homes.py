"""SharedHomes: lets the ranks of one machine read each other's weights at home, where a gather would send every byte to every rank.

What is agreed on stays as it is: a gather through shared memory is one of the collectives of its row, in their order, met for or in lockstep. Only
its bytes take another way: each rank says where its part lies, and copies the others'. The part does not change until all have copied it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import native
from ..errors import StorageError
from ..machine import processors
from ..machine.device import Ticketed
from ..machine.kernel import running_kernel
from .data_ranks import DataRanks
from .exchanges import Exchanges


class Gathering(dist.Work):
    """A gather under way, as torch's collectives are."""

    def __init__(self, ticket: native.Ticket):
        super().__init__()
        self.ticket = ticket

    def is_completed(self) -> bool:
        """Tells whether all ranks have everyone's part, or it failed."""
        return self.ticket.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until then, for ``timeout`` at most. Raises RuntimeError after it, and where a rank is gone."""
        if timeout is not None and not self.ticket.wait_for(timeout.total_seconds()):
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")
        self.ticket.wait()
        return True


class SharedHomes:
    """The weights of this rank that the other ranks of its row can read, and theirs. Used from the thread that runs the model."""

    def __init__(self, patience_seconds: float):
        self.row = native.SharedRow(processors.for_pages())
        self._patience_seconds = patience_seconds
        self._under_way: deque[tuple[native.Ticket, torch.Tensor]] = deque()  # what a thread of the core writes to

    def connect(self, exchanges: Exchanges, regions: Sequence[Sequence[native.Region | None]]) -> str:
        """Makes the others' weights readable here, and this rank's there, once they are allocated. Every rank of the row comes with the ``regions``
        of each of its shards. Returns why that cannot be, the same on all of them, and then nothing is shared; empty where it can."""
        among = [exchanges.ranks.row] if exchanges.ranks.row is not None else []
        ours = [all(region is not None and self.row.owns(region) for region in of_shard) for of_shard in regions]
        everyones = exchanges.collect((running_kernel(), ours, self.row.self()), "where weights lie", among)
        refusal = ""
        if len({kernel for kernel, _, _ in everyones}) > 1 or not everyones[0][0]:
            refusal = "the ranks do not see each other's processes"
        elif any(theirs != ours for _, theirs, _ in everyones):
            refusal = "the ranks have other weights in memory"
        else:
            try:
                self.row.connect([named for _, _, named in everyones], exchanges.ranks.rank)
            except StorageError as error:
                refusal = str(error)
        refusals = exchanges.collect(refusal, "whether weights are shared", among)
        refusal = next((each for each in refusals if each), "")
        if refusal:
            self.close()
        return refusal

    def has(self, region: native.Region | None) -> bool:
        """Tells whether all ranks of the row can read ``region``, which is this rank's, and it theirs."""
        return region is not None and self.row.shares(region)

    def gather(self, region: native.Region, whole: torch.Tensor, nbytes: int, what: str) -> Gathering:
        """Starts a gather of every rank's ``nbytes`` bytes into ``whole``, which has this rank's already, as the beginning of ``region`` has.
        ``what``: the same on all ranks, which start the same gathers in the same order."""
        while self._under_way and self._under_way[0][0].done:
            self._under_way.popleft()
        said = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")
        ticket = self.row.gather(said, region.address, nbytes, whole.data_ptr(), self._patience_seconds)
        self._under_way.append((ticket, whole))
        return Gathering(ticket)

    def close(self) -> None:
        """Ends what is under way, with an error. A second call does nothing."""
        self.row.close()
        self._under_way.clear()


def lent(works: Sequence[dist.Work]) -> Ticketed | None:
    """Makes the event after which no other rank reads this one's home for a collective of ``works``; None where none does."""
    return next((Ticketed(work.ticket) for work in works if isinstance(work, Gathering)), None)


def why_not(ranks: DataRanks, *, computes_on_host: bool) -> str:
    """Says why the ranks of a row cannot read each other's weights; empty where nothing is known against it."""
    if ranks.row is None:
        return "this rank's weights are whole"
    if not computes_on_host:
        return (
            "the model computes on a GPU: each would read all weights over its own link, of which a gather sends most between GPUs"
        )
    if ranks.compresses:
        return "compress_gathers=True: what passes is not what lies at home"
    if len({rank // ranks.local_size for rank in ranks.row.ranks}) > 1:
        return "the ranks that share the weights are on several machines"
    return ""
