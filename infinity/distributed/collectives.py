"""Collectives: moves bytes between the data ranks, and detects ranks that diverge.

trace      the units that a rank expects to use in this pass; its digest is compared at the start
agreed     of a pass: all ranks of the shard group run its collectives in the order of the last
           one like it, without meeting (see `lockstep`)

Every collective of a shard group is either the next one of an agreed pass, or follows a rendezvous.
All rendezvous use one channel, whatever group the bytes take, so no two ranks can wait for each
other at different points.

Bytes travel in their own dtype, or as 8-bit codes if weights are compressed. Sums are taken in
fp32, in rank order, and rounded once. The transport never adds, so the result does not depend on
its algorithm. Exception: with Config(reduction="fast") it adds in the gradients' dtype and its own
order.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import numpy as np
import torch
import torch.distributed as dist

from .. import native
from ..machine.traffic import Traffic
from . import lockstep
from .comparing import Comparison, Inputs, compare
from .data_ranks import DataRanks
from .exchanges import Exchanges, Progress, in_turn
from .kinds import Kind, StandIns, bytes_of, count_begun, describe
from .kinds import begin as begin_kind
from .lockstep import Collective, Lockstep
from .pending import Pending
from .quantize import decode_blocks, encode_blocks
from .shared_homes import lent

DIGEST_NBYTES = 4  # of a trace, among a pass's flags
# Of these flags, each with its complement: the maximum yields both extremes
SAID_NBYTES = DIGEST_NBYTES + lockstep.DIGEST_NBYTES


def _flags_of(lockstep: Lockstep, key: bytes) -> list[int]:
    """Makes the flags of the pass ``key``: the digests of its trace and of how the last such pass
    went."""
    said = key[:DIGEST_NBYTES] + lockstep.digest_of(key)
    return [*said, *(255 - byte for byte in said)]


class Collectives(Exchanges):
    """No-ops in a job of one rank. Used from the thread that runs the model."""

    def __init__(
        self,
        ranks: DataRanks | None = None,
        traffic: Traffic | None = None,
        progress: Progress | None = None,
    ):
        super().__init__(ranks, progress)
        self.traffic = traffic if traffic is not None else Traffic()
        self._traces_agree = False
        self._passes = 0  # started since the last backward or step
        self._is_after_step = True  # no backward since the last step
        self._found_after_step: list[int] = []  # gathered units at the first forward after a step
        if self.ranks.data is not None and self.ranks.divided == 1:
            self.ranks.data.lockstep.stand_ins = StandIns(
                lambda of_experts: (self.of_experts if of_experts else self).ranks
            )

    def note_progress(self, *, steps: int, backwards: int) -> None:
        """Sets the progress that this rank announces at every meeting."""
        super().note_progress(steps=steps, backwards=backwards)
        self._passes, self._is_after_step = 0, backwards == 0

    @cached_property
    def of_experts(self) -> Collectives:
        """For divided experts: bytes pass between ranks with the same ones; all data ranks meet."""
        if self.ranks.experts is None:
            return self
        return Collectives(self.ranks.as_experts_see, self.traffic, self._reached)

    # --- passes ---

    def begin_pass(self, trace: Iterable[int], resident: Iterable[int], *, training: bool) -> None:
        """Starts a pass that expects to use the units of ``trace`` in order, and finds ``resident``
        gathered. Every data rank calls this. A later collective waits for the comparison."""
        place = self.ranks.data
        if place is None:
            return
        self._passes += training
        found = sorted(resident)
        key = _key_of(trace, found, self._passes if training else 0)
        if training and self._passes == 1 and self._is_after_step:
            self._found_after_step = found
        self._enter_pass()
        if not place.lockstep.enter(key):
            place.announce(
                f"a forward {self._progress}",
                _flags_of(place.lockstep, key),
                then=partial(self._begin, key),
            )

    def _begin(self, key: bytes, found: torch.Tensor, *, predicted: bool = False) -> None:
        """Starts a pass from all ranks' flags. It is agreed if they match. A predicted pass
        (``predicted``) starts only if agreed."""
        same = (found[:SAID_NBYTES] == 255 - found[SAID_NBYTES:]).tolist()
        agreed = all(same) and bool(found[DIGEST_NBYTES:SAID_NBYTES].any())
        if agreed or not predicted:
            self._traces_agree = all(same[:DIGEST_NBYTES])
            self.ranks.data.lockstep.begin(key, agreed=agreed, predicted=predicted)

    def meet_for_step(
        self,
        inputs: Inputs,
        *,
        over_stages: Inputs | None,
        trace: Iterable[int],
        in_common: Comparison,
        then: Callable[[], None],
    ) -> None:
        """Blocks until all ranks are at the step of ``inputs``. Stages compare ``over_stages`` if
        given.

        Also compares the trace predicted for the next forward (``trace``). If all match, that
        forward needs no barrier. ``then``: called as soon as all ranks are known to be there, even
        if this one is interrupted.
        """
        meetings: list[Callable] = []
        if over_stages is not None and self.ranks.stages is not None:
            meetings.append(
                partial(
                    compare,
                    partial(self.spans_over, self.ranks.stages),
                    over_stages.of_stages,
                    over_stages,
                )
            )
        if self.ranks.tensor is not None:
            meetings.append(
                partial(
                    compare, partial(self.spans_over, self.ranks.tensor), inputs.common, in_common
                )
            )
        if self.ranks.data is not None:
            key = _key_of(trace, self._found_after_step, 1)
            meetings.append(partial(self._meet_data_ranks, f"{inputs.common}{inputs.own}", key))
        in_turn(meetings, then)  # data ranks last: others' errors are raised before they meet

    def _meet_data_ranks(
        self, what: str, key: bytes, then: Callable[[], None] = lambda: None
    ) -> None:
        """Meets the data ranks before a step. A forward of the key ``key`` may follow."""
        place = self.ranks.data
        # After a divergence gathered units may differ over ranks: this rank does not vote.
        flags = (
            _flags_of(place.lockstep, key)
            if place.lockstep.was_followed
            else [255] * (2 * SAID_NBYTES)
        )

        def go_on(found: torch.Tensor) -> None:
            self._begin(key, found, predicted=True)
            then()

        place.rendezvous(f"{what} {self._progress}", flags, then=go_on)

    def _enter_pass(self) -> None:
        """Completes the meeting of a pass that has just started."""
        if self.ranks.data is not None:
            self.ranks.data.finish_meeting()

    def end_pass(self) -> None:
        """Ends the pass: later collectives do not belong to it."""
        if self.ranks.data is not None:
            self._enter_pass()
            self.ranks.data.lockstep.end()

    def meet_before(self, what: str) -> None:
        """Meets the data ranks before the collective ``what``, unless it is next in an agreed
        pass."""
        if not self.is_next(what):
            self._meet_for(what)

    def is_next(self, what: str) -> bool:
        """Returns whether the collective ``what`` is next in an agreed pass."""
        self._enter_pass()
        following = self.ranks.data.lockstep.next
        return following is not None and following.what == what

    @property
    def traces_agree(self) -> bool:
        """Whether all data ranks expect to use the same units in this pass. Equal on all ranks."""
        self._enter_pass()
        return self._traces_agree

    # --- weights ---

    def gather(
        self,
        flat: torch.Tensor,
        what: str,
        *,
        homes: Sequence[native.Region | None] = (),
    ) -> Pending | None:
        """Gathers every rank's slice into ``flat``, which has this one's. None: nothing to wait
        for.

        ``homes``: the memory that starts with that slice, now or after an update; if all ranks
        share it, they read the bytes there.
        """
        if self.ranks.size == 1:
            return None
        what = f"gathering {what}"
        if self.ranks.compresses and flat.is_floating_point():
            mine = encode_blocks(flat.view(self.ranks.size, -1)[self.ranks.rank])
            everyones = mine.new_empty(self.ranks.size * mine.numel())
            return self._gather(
                Kind.GATHER,
                everyones,
                mine,
                what,
                lambda: decode_blocks(everyones, flat, self.ranks.size),
            )
        raw = bytes_of(flat)
        mine = raw.view(self.ranks.size, -1)[self.ranks.rank]
        if homes and (shared := self.ranks.row.homes) is not None and shared.have(homes):
            begin = partial(shared.read, homes[0], raw, mine.numel(), what)
            return self._gather(Kind.READ, raw, mine, f"{what} where it lies", begin=begin)
        return self._gather(Kind.GATHER, raw, mine, what)

    def gather_in_node(self, flat: torch.Tensor, what: str) -> Pending:
        """Gathers among this machine's ranks, whose slices of ``flat`` are larger."""
        raw = bytes_of(flat)
        mine = raw.view(self.ranks.node.size, -1)[self.ranks.node.rank]
        return self._gather(Kind.GATHER_IN_NODE, raw, mine, f"gathering {what} in the node")

    def _gather(
        self,
        kind: Kind,
        whole: torch.Tensor,
        mine: torch.Tensor,
        what: str,
        then: Callable[[], None] | None = None,
        begin: Callable[[], dist.Work] | None = None,
    ) -> Pending:
        self._enter_pass()
        collective = Collective(what, whole.numel(), describe(self.ranks, kind, mine, whole))
        if self.ranks.data.lockstep.next != collective:
            self._meet_for(what)
        start = time.perf_counter()
        work = self._start(collective, kind, mine, whole, begin)

        def finish() -> None:
            edge = "all-gather in node" if kind is Kind.GATHER_IN_NODE else "all-gather"
            self.traffic.received(edge, whole.numel() - mine.numel(), what, start)
            if then is not None:
                then()
                for tensor in (whole, mine):  # decoded on another stream than the transport's
                    if tensor.device.type != "cpu":
                        tensor.record_stream(torch.accelerator.current_stream(tensor.device))

        return self._pending([work], what, finish, whole.device)

    def _pending(
        self,
        works: list,
        what: str,
        finish: Callable[[], None],
        device: torch.device,
    ) -> Pending:
        place = self.ranks.data

        def hear(settling: bool) -> None:
            if place is not None and place.hears_alarm():
                place.rendezvous(f"{what} {self._progress}", settling=settling)

        def forget() -> None:
            if place is not None:
                place.lockstep.under_way()

        pending = Pending(
            works,
            what,
            finish,
            hear=hear,
            forget=forget,
            is_on_host=device.type == "cpu",
        )
        pending.lent = lent(works)
        return pending

    # --- gradients ---

    def reduce(
        self, flat: torch.Tensor, what: str, done: Callable[[torch.Tensor], None]
    ) -> Pending:
        """Averages this rank's slice of all ranks' ``flat``. The wait passes it, fp32, to ``done``.

        Precondition: after :meth:`agree`, or the next collective of an agreed pass.
        """
        start = time.perf_counter()
        raw, works, is_fast = bytes_of(flat), [], self.ranks.reduction == "fast"
        received = flat
        if self.ranks.size > 1:
            received = (
                flat.new_empty(flat.numel() // self.ranks.size)
                if is_fast
                else torch.empty_like(flat)
            )
            works.append(self._go_on_with(what, Kind.REDUCE, flat, received))
        elif self.ranks.divided > 1:
            self._go_on_with(what, Kind.NOTHING, flat, flat)  # keeps its place in the order

        def finish() -> None:
            moved = raw.numel() - raw.numel() // self.ranks.size
            total = (
                received.float() if is_fast else _ordered_sum(received.view(self.ranks.size, -1))
            )
            if self.ranks.replicas is not None:
                everyones = self._gather_over_replicas(total, what)
                total = _ordered_sum(everyones)
                moved += everyones.nbytes - total.nbytes
            self.traffic.received("reduce-scatter", moved, what, start)
            done(total.div_(self.ranks.data_size))

        return self._pending(works, what, finish, flat.device)

    @property
    def can_share_flags(self) -> bool:
        """Whether :meth:`share_flags`, in the shard group, reaches every rank."""
        return self.ranks.size > 1 and self.ranks.replicas is None and self.ranks.tensor is None

    def share_flags(
        self, flags: Sequence[bool], what: str, done: Callable[[list[bool]], None]
    ) -> Pending:
        """Sends ``flags`` to the shard group's ranks, without blocking. The wait calls ``done``
        with the flags that any rank has set. Precondition: as for :meth:`reduce`."""
        mine = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        everyones = mine.new_empty(self.ranks.size * mine.numel())

        def finish() -> None:
            done(everyones.view(self.ranks.size, -1).amax(0).bool().tolist())

        return self._pending(
            [self._go_on_with(what, Kind.TELL, mine, everyones)], what, finish, mine.device
        )

    def _gather_over_replicas(self, total: torch.Tensor, what: str) -> torch.Tensor:
        what = f"{what} over replicas"
        everyones = total.new_empty(self.ranks.replicas.size, total.numel())
        work = self._go_on_with(
            what, Kind.GATHER_OVER_REPLICAS, bytes_of(total), bytes_of(everyones.view(-1))
        )
        self._pending([work], what, lambda: None, total.device).wait()
        return everyones

    def _go_on_with(
        self, what: str, kind: Kind, given: torch.Tensor, taken: torch.Tensor
    ) -> dist.Work:
        """Starts a collective. Meets first if the agreed pass continues with another one."""
        self._enter_pass()
        passing, collective = (
            self.ranks.data.lockstep,
            Collective(what, given.nbytes, describe(self.ranks, kind, given, taken)),
        )
        if passing.is_agreed and passing.next != collective:
            self._meet_for(what)
        return self._start(collective, kind, given, taken)

    # --- shared by both ---

    def _meet_for(self, what: str) -> None:
        """Meets the data ranks. Each rank's next operation is to start a collective."""
        place = self.ranks.data
        place.announce(
            f"{what} {self._progress}", then=lambda found: place.lockstep.expect()
        ).wait()

    def _start(
        self,
        collective: Collective,
        kind: Kind,
        given: torch.Tensor,
        taken: torch.Tensor,
        begin: Callable[[], dist.Work] | None = None,
    ) -> dist.Work:
        begin = begin or partial(begin_kind, self.ranks, kind, given, taken)
        count = partial(count_begun, self.ranks, kind, given.device)
        return self._do(
            lambda: self.ranks.data.lockstep.start(collective, begin, count), collective.what
        )

    def strike(self) -> None:
        """Notes that an exception interrupted this rank, and waits for all transfers."""
        super().strike()
        self.drop_lost()

    def drop_lost(self) -> None:
        """Waits for all transfers. After an interrupt the last one may or may not have started."""
        lost = self.ranks.data.lockstep.under_way() if self.ranks.data is not None else []
        if self.ranks.row is not None and self.ranks.row.homes is not None:
            lost += self.ranks.row.homes.under_way()
        for work in lost:
            self._pending(
                [work], "what an exception left", lambda: None, torch.device("cpu")
            ).drop()


def _key_of(trace: Iterable[int], resident: list[int], number: int) -> bytes:
    """Makes the key of passes that go the same way; it starts with the trace's digest. ``number``:
    among the training passes since the last backward or step; 0 for another pass."""
    digest = hashlib.blake2b(
        np.fromiter(trace, np.int64).tobytes(), digest_size=DIGEST_NBYTES
    ).digest()
    return digest + repr((resident, number)).encode()


def _ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 sum of the rows, first to last."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total
