"""Bulk: moves the bytes of weights and gradients between the data ranks.

Bytes travel in their own dtype, weights perhaps in an encoding. Sums are taken in
fp32, in rank order, and rounded once. The transport never adds, so the result does not depend on
its algorithm.

ordered gathers   of a device (:mod:`.pending`): the host is some of them ahead, so that it can
                  launch compute while they run. It waits for all where a pass ends
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from .. import native
from ..core.machine.device import Ticketed, note_used
from ..core.machine.traffic import Traffic
from .collective_trace import Collective
from .kinds import Kind, bytes_of, count_begun, describe
from .kinds import begin as begin_kind
from .parallel_dims import ParallelDims
from .pass_agreement import PassAgreement, Progress, Weighing
from .pending import Pending, ranks_lost

MOST_ORDERED = 4  # gathers that the host may be ahead of
GATHERS = {  # as what traffic counts them
    Kind.GATHER: "all-gather",
    Kind.GATHER_IN_NODE: "all-gather in node",
    Kind.READ: "shared memory",
}


class Bulk(PassAgreement):
    """The collectives of a pass. No-ops in a job of one rank. Used from the thread that runs the
    model."""

    def __init__(self, ranks: ParallelDims, traffic: Traffic, progress: Progress):
        super().__init__(ranks, traffic, progress)
        self._ordered: deque[Pending] = deque()
        self._whole: Bulk | None = None  # for divided experts: of all data ranks

    # --- weights ---

    def gather(
        self,
        flat: torch.Tensor,
        what: str,
        *,
        regions: Sequence[native.Region | None] = (),
        in_node: bool = False,
    ) -> Pending | None:
        """Gathers every rank's shard into ``flat``, which has this one's. None: nothing to wait
        for.

        ``regions``: the memory that starts with that shard, now or after an update; if all ranks
        share it, they read the bytes there. ``in_node``: only among this machine's ranks, whose
        shards are larger.
        """
        if in_node:
            raw, node = bytes_of(flat), self.ranks.node_group
            shard = raw.view(node.size, -1)[node.rank]
            return self._gather(Kind.GATHER_IN_NODE, raw, shard, f"gathering {what} in the node")
        if self.ranks.size == 1:
            return None
        what = f"gathering {what}"
        encoding = self.ranks.encoding
        if encoding is not None and flat.is_floating_point():
            rows = flat.view(self.ranks.size, -1)
            return encoding.gather(rows, self.ranks.rank, what, partial(self._gather, Kind.GATHER))
        raw = bytes_of(flat)
        shard = raw.view(self.ranks.size, -1)[self.ranks.rank]
        if regions and (memory := self.ranks.shard_group.peer_memory) and memory.have(regions):
            begin = partial(memory.read, regions[0], raw, shard.numel(), what)
            return self._gather(Kind.READ, raw, shard, f"{what} where it lies", begin=begin)
        return self._gather(Kind.GATHER, raw, shard, what)

    def _gather(
        self,
        kind: Kind,
        whole: torch.Tensor,
        shard: torch.Tensor,
        what: str,
        then: Callable[[], None] | None = None,
        begin: Callable[[], dist.Work] | None = None,
    ) -> Pending:
        work, start = self._go_on_with(what, kind, shard, whole, begin=begin, meets=True)

        def finish() -> None:
            then()
            note_used(whole, shard)  # decoded on another stream than the transport's

        pending = self._pending([work], what, None if then is None else finish, whole.device)
        if not pending.is_on_host:
            start, pending.defer = None, self._note_ordered
        nbytes = whole.numel() - shard.numel()
        pending.count = partial(self.traffic.received, GATHERS[kind], nbytes, what, start)
        return pending

    def _note_ordered(self, pending: Pending) -> None:
        self._ordered.append(pending)
        while self._ordered and (len(self._ordered) > MOST_ORDERED or self._ordered[0].is_over):
            self._ordered.popleft().wait()

    def wait_for_ordered(self) -> None:
        """Blocks until the ordered gathers are over. Raises PeerError if one has failed, UsageError
        if other ranks have diverged meanwhile."""
        while self._ordered:
            self._ordered.popleft().wait()
        if self._dp_group is not None:
            self._dp_group.raise_heard()

    def _pending(
        self,
        works: list,
        what: str,
        finish: Callable[[], None] | None,
        device: torch.device,
    ) -> Pending:
        pending = Pending(works, what, finish, is_on_host=device.type == "cpu")
        if (dp_group := self._dp_group) is not None:

            def poll(settling: bool) -> None:
                dp_group.meet_if_called(f"{what} {self._progress}", settling=settling)

            def forget() -> None:
                with dp_group.lock:
                    dp_group.collective_trace.under_way()

            pending.poll, pending.forget, pending.check = poll, forget, dp_group.raise_heard
            if not pending.is_on_host:
                progress = self._progress  # the listener must not keep the channel
                dp_group.listen(device, lambda: f"waiting for the device {progress}")
        # Other ranks read this one's home until then.
        tickets = (getattr(work, "ticket", None) for work in works)
        pending.borrowed = next(
            (Ticketed(ticket) for ticket in tickets if ticket is not None), None
        )
        return pending

    # --- gradients ---

    def reduce(
        self,
        flat: torch.Tensor,
        what: str,
        done: Callable[[torch.Tensor, list[bool]], None],
        *,
        flags: Sequence[bool] = (),
        meets: bool = False,
    ) -> Pending:
        """Averages this rank's shard of all ranks' ``flat``, weighed by :attr:`weighing`.
        The wait passes it, fp32, to ``done``, with those of ``flags`` that any rank has set, also
        one with other experts. ``meets``: meets the ranks first, unless this is the next collective
        of a verified pass. Without it they have met for this one.
        """
        if meets and not self.is_next(what):
            self._meet_for(what)
        works, received, size = [], flat, self.ranks.size
        flag_bytes = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        whole = self._whole or self
        everyones = flag_bytes.new_empty(whole.ranks.size, flag_bytes.numel())
        if size > 1:
            received = torch.empty_like(flat)
            work, start = self._go_on_with(what, Kind.REDUCE, flat, received)
            works.append(work)
        elif self.ranks.ep_size > 1:
            self._go_on_with(what, Kind.NOTHING, flat, flat)  # keeps its place in the order
        if flags:
            said = f"{what}: who has them"
            telling, since = whole._go_on_with(said, Kind.TELL, flag_bytes, everyones.view(-1))
            of_host = self._pending([telling], said, None, flag_bytes.device)

        def finish() -> None:
            if flags:
                of_host.wait()
                self.traffic.received("flags", everyones.nbytes - flag_bytes.nbytes, what, since)
            if size > 1:
                self.traffic.received(
                    "reduce-scatter", flat.nbytes - flat.nbytes // size, what, start
                )
            average = self.average(received.view(size, -1), what)
            done(average, everyones.amax(0).bool().tolist() if flags else [])

        return self._pending(works, what, finish, flat.device)

    def average(self, parts: torch.Tensor, what: str) -> torch.Tensor:
        """Averages ``parts``, a row of each rank of the shard group, in fp32 and over replicas,
        too."""
        total = self.row_sum(parts)
        if (replicas := self.ranks.replicate_group) is not None:
            what = f"{what} over replicas"
            everyones = total.new_empty(replicas.size, total.numel())
            work, start = self._go_on_with(
                what, Kind.GATHER_OVER_REPLICAS, bytes_of(total), bytes_of(everyones.view(-1))
            )
            self._pending([work], what, None, total.device).wait()
            self.traffic.received(
                "all-gather over replicas", everyones.nbytes - total.nbytes, what, start
            )
            total = _ordered_sum(everyones)
        return total.div_(self.ranks.data_size)

    @property
    def weighing(self) -> Weighing | None:
        """How averages weigh the data ranks' gradients; None: all alike."""
        return self._progress.weighing

    def weigh_by(self, weighing: Weighing | None) -> None:
        """Sets how later averages weigh gradients, as ``weighing`` has it then. This rank announces
        it at every sync point. Every rank calls this, between two steps."""
        self._progress.weighing = weighing

    def row_sum(self, parts: torch.Tensor) -> torch.Tensor:
        """Sums ``parts``, a row of each rank of the shard group, in fp32, by the ranks' weights."""
        if self.weighing is None or (weights := self.weighing.weights) is None:
            return _ordered_sum(parts)
        ranks = self.ranks
        return _ordered_sum(parts, weights[ranks.data_rank - ranks.rank :][: ranks.size])

    def _go_on_with(
        self,
        what: str,
        kind: Kind,
        sent: torch.Tensor,
        received: torch.Tensor,
        *,
        begin: Callable[[], dist.Work] | None = None,
        meets: bool = False,
    ) -> tuple[dist.Work, float]:
        """Starts a collective. Returns it, and when it started. Meets first if a verified pass
        continues with another one, and with ``meets`` in a pass that is not verified."""
        dp_group, trace = self._dp_group, self._dp_group.collective_trace
        collective = Collective(what, sent.nbytes, describe(self.ranks, kind, sent, received))
        begin = begin or partial(begin_kind, self.ranks, kind, sent, received)
        count = partial(count_begun, self.ranks, kind, sent.device)
        with dp_group.lock:  # the channel's listener does nothing meanwhile
            dp_group.raise_heard()
            self._enter()
            if (meets or trace.is_verified) and trace.next != collective:
                self._meet_for(what)
            start = time.perf_counter()
            try:
                return trace.start(collective, begin, count), start
            except RuntimeError as error:
                raise ranks_lost(what, error) from error

    def _drop_lost(self) -> None:
        """Waits for all transfers. After an interrupt the last one may or may not have started."""
        self._ordered.clear()  # the collective trace has their works
        lost: list[tuple[dist.Work, bool]] = []
        if self._dp_group is not None:
            with self._dp_group.lock:
                lost += self._dp_group.collective_trace.under_way()
        if self.ranks.shard_group is not None and self.ranks.shard_group.peer_memory is not None:
            lost += [(work, True) for work in self.ranks.shard_group.peer_memory.under_way()]
        for work, is_on_host in lost:
            pending = self._pending([work], "what an exception left", None, torch.device("cpu"))
            pending.is_on_host = is_on_host
            pending.drop()


def _ordered_sum(parts: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Returns the fp32 sum of the rows, first to last. ``weights``: factors of the rows."""
    total = parts[0].to(torch.float32, copy=True)
    if weights is not None:
        total.mul_(weights[0])
    for row, part in enumerate(parts[1:], start=1):
        total.add_(part, alpha=1.0 if weights is None else weights[row])
    return total
