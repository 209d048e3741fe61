"""Collectives: moves bytes between the data ranks, and finds out where they do not do the same.

offered    reductions that a rank could start by now; said at a gather's rendezvous, whose least is known to all
trace      the units that a rank expects to use in this pass; its digest is said as the pass begins
agreed     of a pass: all ranks of the row run its collectives in the order of the last one like it, and do not meet (see `lockstep`)

Every collective of a row is the next one of an agreed pass, or comes behind a rendezvous on one channel, whatever group its bytes take, so that
no two ranks can wait for each other in different places. Bytes travel in the dtype they have, or as 8-bit codes where weights are compressed; sums are
taken in fp32, in the order of the ranks, and rounded once. The transport never adds, so that the result does not depend on its
algorithm: but for Config(reduction="fast"), where it adds in the dtype that gradients have, in an order of its own.
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
from .channel import Channel
from .data_ranks import DataRanks
from .exchanges import Exchanges, bytes_of
from .lockstep import Collective
from .pending import Pending, all_gather
from .quantize import decode_blocks, encode_blocks
from .shared_homes import SharedHomes, lent

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
MOST_OFFERED = 254  # what fits a byte beside BACKWARD_OVER; the rest is offered at the next rendezvous
BACKWARD_OVER = 255
DIGEST_NBYTES = 4  # of a trace, among the flags of a pass's meeting
SAID_NBYTES = (
    DIGEST_NBYTES + lockstep.DIGEST_NBYTES
)  # of these flags, which go with their complements: the largest and the smallest are known


class Collectives(Exchanges):
    """Runs what the data ranks of one job do together. In a job of one rank every collective is nothing to do.

    Used from the thread that runs the model.
    """

    def __init__(self, ranks: DataRanks | None = None, traffic: Traffic | None = None):
        super().__init__(ranks)
        self.traffic = traffic if traffic is not None else Traffic()
        self._traces_agree = False
        self._passes = 0  # that have begun since the last backward or step
        self._is_after_step = True  # no backward has run since the last one
        self._found_after_step: list[int] = []  # units that the first forward after a step found gathered
        self._shared: SharedHomes | None = None

    def share_homes(self, homes: SharedHomes) -> None:
        """Has the weights that are allocated from now on lie in ``homes``, which end with this."""
        self._shared = homes

    @property
    def shared_row(self) -> native.SharedRow | None:
        """Where weights lie that the row's ranks share."""
        return self._shared.row if self._shared is not None else None

    def close(self) -> None:
        """Ends what was made for this job."""
        if self._shared is not None:
            self._shared.close()
        super().close()

    def note_progress(self, *, steps: int, backwards: int) -> None:
        """Sets what this rank says at every meeting of how far it is."""
        super().note_progress(steps=steps, backwards=backwards)
        self._passes, self._is_after_step = 0, backwards == 0
        if self.ranks.experts is not None:
            self.of_experts.note_progress(steps=steps, backwards=backwards)

    @cached_property
    def of_experts(self) -> Collectives:
        """The same for the parameters of divided experts: they pass between the ranks that have them, and all data ranks meet as before."""
        return self if self.ranks.experts is None else Collectives(self.ranks.as_experts_see, self.traffic)

    # --- passes ---

    def begin_pass(self, trace: Iterable[int], resident: Iterable[int], *, training: bool) -> None:
        """Begins a pass that expects to use the units of ``trace``, in their order, and finds those of ``resident`` gathered. Every data
        rank comes here; whether all expect the same is known when the first of them asks."""
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
            place.announce(f"a forward {self._progress}", self._flags_of(key), then=partial(self._begin, key))

    def _flags_of(self, key: bytes) -> list[int]:
        """Makes the flags that say what a pass known by ``key`` expects, and how the last one went."""
        said = key[:DIGEST_NBYTES] + self.ranks.data.lockstep.digest_of(key)
        return [*said, *(255 - byte for byte in said)]

    def _begin(self, key: bytes, found: torch.Tensor, *, foreseen: bool = False) -> None:
        """Begins a pass, of which everybody's flags have been ``found``: agreed where all said the same. One that is only ``foreseen`` begins
        where it is agreed."""
        most, least = found[:SAID_NBYTES], 255 - found[SAID_NBYTES:]
        same = (most == least).tolist()
        agreed = all(same) and bool(most[DIGEST_NBYTES:].any())
        if agreed or not foreseen:
            self._traces_agree = all(same[:DIGEST_NBYTES])
            self.ranks.data.lockstep.begin(key, agreed=agreed, foreseen=foreseen)

    def meet_for_step(self, what: str, *, over_stages: str | None, trace: Iterable[int]) -> None:
        """Waits until every rank is at the step ``what``, of which other stages are told ``over_stages``; None: they do not meet. With it goes how a forward after a step
        went last time, of which the units of ``trace`` are expected: where all say the same of that, it has begun, and does not meet."""
        for place in self.ranks.places:
            if place is self.ranks.stages and over_stages is None:
                continue
            said = f"{over_stages if place is self.ranks.stages else what} {self._progress_on(place)}"
            if place is not self.ranks.data:
                place.rendezvous(said)
                continue
            key = _key_of(trace, self._found_after_step, 1)
            # Ranks whose last pass went another way may not find the same units gathered: what one says here is nobody's word.
            flags = self._flags_of(key) if place.lockstep.was_followed else [255] * (2 * SAID_NBYTES)
            place.announce(said, flags, then=partial(self._begin, key, foreseen=True)).wait()

    def _enter_pass(self) -> None:
        """Waits for the data ranks to begin the pass, if it has just begun."""
        if self.ranks.data is not None:
            self.ranks.data.finish_meeting()

    def end_pass(self) -> None:
        """Ends the pass: what comes now is not part of the next one like it."""
        if self.ranks.data is not None:
            self._enter_pass()
            self.ranks.data.lockstep.end()

    @property
    def is_agreed(self) -> bool:
        """Whether this rank is in an agreed pass that is not over: another collective is to come."""
        self._enter_pass()
        return self.ranks.data is not None and self.ranks.data.lockstep.is_open

    @property
    def was_agreed(self) -> bool:
        """Whether the pass is agreed, or was until nothing more was to come: nobody meets in it."""
        self._enter_pass()
        return self.ranks.data is not None and self.ranks.data.lockstep.is_agreed

    def is_next(self, what: str) -> bool:
        """Tells whether the agreed pass goes on with ``what``."""
        self._enter_pass()
        following = self.ranks.data.lockstep.next if self.ranks.data is not None else None
        return following is not None and following.what == what

    @property
    def traces_agree(self) -> bool:
        """Whether all data ranks expect to use the same units in this pass.

        The same on all these ranks, whatever each of them went through before.
        """
        self._enter_pass()
        return self._traces_agree

    # --- weights ---

    def gather(self, flat: torch.Tensor, what: str, *, offered: int = 0, home: native.Region | None = None) -> Pending | None:
        """Fills ``flat``, of which this rank's slice is filled already, with every rank's. None: nothing to wait for.

        ``home``: the memory at whose beginning that slice lies, too; where the ranks share it, its bytes come from there. ``offered``: reductions that this rank could start; the least of all ranks is the result's ``least_offered``.
        """
        if self.ranks.size == 1:
            return None
        what = f"gathering {what}"
        if self.ranks.compresses and flat.is_floating_point():
            mine = encode_blocks(flat.view(self.ranks.size, -1)[self.ranks.rank])
            everyones = mine.new_empty(self.ranks.size * mine.numel())
            return self._gather(
                self.ranks.row, everyones, mine, what, offered, lambda: decode_blocks(everyones, flat, self.ranks.size)
            )
        raw = bytes_of(flat)
        mine = raw.view(self.ranks.size, -1)[self.ranks.rank]
        return self._gather(self.ranks.row, raw, mine, what, offered, home=home)

    def gather_in_node(self, flat: torch.Tensor, what: str, *, offered: int = 0) -> Pending:
        """Does the same among this machine's ranks, whose slices of ``flat`` are larger."""
        raw = bytes_of(flat)
        mine = raw.view(self.ranks.node.size, -1)[self.ranks.node.rank]
        return self._gather(self.ranks.node, raw, mine, f"gathering {what} in the node", offered)

    def _gather(
        self,
        channel: Channel,
        whole: torch.Tensor,
        mine: torch.Tensor,
        what: str,
        offered: int,
        then: Callable[[], None] | None = None,
        home: native.Region | None = None,
    ) -> Pending:
        self._enter_pass()
        place, group, least, shared = self.ranks.data, channel.bulk, None, self._shared

        def begin(given: torch.Tensor, taken: torch.Tensor) -> dist.Work:
            if home is not None and shared is not None and shared.has(home):
                return shared.gather(home, taken, given.nbytes, what)
            return all_gather(taken, given, group=group, async_op=True)

        collective = Collective(what, whole.numel(), _stand_in(mine, whole, begin))
        if place.lockstep.next != collective:
            least = 255 - int(place.rendezvous(f"{what} {self._progress}", [255 - min(offered, MOST_OFFERED)]).max())
        place.lockstep.note(collective)
        start = time.perf_counter()
        work = self._do(lambda: begin(mine, whole), what)

        def finish() -> None:
            edge = "all-gather" if channel is self.ranks.row else "all-gather in node"
            self._count(edge, whole.numel() - mine.numel(), what, start)
            if then is not None:
                then()
                for tensor in (whole, mine):  # coded, of another stream than the one that decodes
                    if tensor.device.type != "cpu":
                        tensor.record_stream(torch.accelerator.current_stream(tensor.device))

        return self._pending([work], what, finish, whole.device, least)

    def _pending(
        self, works: list, what: str, finish: Callable[[], None], device: torch.device, least_offered: int | None = None
    ) -> Pending:
        def hear(settling: bool) -> None:
            if self.ranks.data is not None and self.ranks.data.hears_alarm():
                self.ranks.data.rendezvous(f"{what} {self._progress}", settling=settling)

        on_host = device.type == "cpu"
        return Pending(works, what, finish, least_offered=least_offered, hear=hear, lent=lent(works), is_on_host=on_host)

    # --- gradients ---

    def offer(self, count: int | None) -> int | None:
        """Meets the data ranks in mid-backward. Returns the least number of reductions that any rank could start.

        ``count``: of this rank; None when its backward is over. The result is None when that of every rank is.
        """
        flag = BACKWARD_OVER if count is None else min(count, MOST_OFFERED)
        self._enter_pass()
        least = 255 - int(self.ranks.data.rendezvous(f"in a backward {self._progress}", [255 - flag]).max())
        return None if least == BACKWARD_OVER else least

    def reduce(self, flat: torch.Tensor, what: str, done: Callable[[torch.Tensor], None]) -> Pending:
        """Averages this rank's slice of every rank's ``flat``: when waited for, ``done`` is given it, in fp32.

        Everyone has to have met before (:meth:`agree`), or it is what an agreed pass goes on with.
        """
        start = time.perf_counter()
        raw, works, is_fast = bytes_of(flat), [], self.ranks.reduction == "fast"
        received = flat
        if self.ranks.size > 1:
            group = self.ranks.row.reductions
            received = flat.new_empty(flat.numel() // self.ranks.size) if is_fast else torch.empty_like(flat)

            def begin(given: torch.Tensor, taken: torch.Tensor) -> dist.Work:
                if is_fast:
                    return reduce_scatter(taken, given, group=group, async_op=True)
                return dist.all_to_all_single(bytes_of(taken), bytes_of(given), group=group, async_op=True)

            self._go_on_with(what, flat, received, begin)
            works.append(self._do(lambda: begin(flat, received), what))
        elif self.ranks.divided > 1:
            self._go_on_with(what, flat, flat, _nothing)  # has its place in the order, as every unit

        def finish() -> None:
            moved = raw.numel() - raw.numel() // self.ranks.size
            total = received.float() if is_fast else _ordered_sum(received.view(self.ranks.size, -1))
            if self.ranks.replicas is not None:
                everyones = self._gather_over_replicas(total, what)
                total = _ordered_sum(everyones)
                moved += everyones.nbytes - total.nbytes
            self._count("reduce-scatter", moved, what, start)
            done(total.div_(self.ranks.data_size))

        return self._pending(works, what, finish, flat.device)

    @property
    def can_share_flags(self) -> bool:
        """Whether a row's ranks are all that :meth:`share_flags` has to reach."""
        return self.ranks.size > 1 and self.ranks.replicas is None and self.ranks.tensor is None

    def share_flags(self, flags: Sequence[bool], what: str, done: Callable[[list[bool]], None]) -> Pending:
        """Tells the row's ranks this one's ``flags``, while other things go on: when waited for, ``done`` is given which of them any rank has
        set. Everyone has to have met before, as for :meth:`reduce`."""
        group, mine = self.ranks.row.group, torch.tensor(flags, dtype=torch.uint8, device="cpu")
        everyones = mine.new_empty(self.ranks.size * mine.numel())

        def begin(given: torch.Tensor, taken: torch.Tensor) -> dist.Work:
            return all_gather(taken, given, group=group, async_op=True)

        def finish() -> None:
            done(everyones.view(self.ranks.size, -1).amax(0).bool().tolist())

        self._go_on_with(what, mine, everyones, begin)
        return self._pending([self._do(lambda: begin(mine, everyones), what)], what, finish, mine.device)

    def _gather_over_replicas(self, total: torch.Tensor, what: str) -> torch.Tensor:
        channel, what = self.ranks.replicas, f"{what} over replicas"
        everyones = total.new_empty(channel.size, total.numel())

        def begin(given: torch.Tensor, taken: torch.Tensor) -> dist.Work:
            return all_gather(taken, given, group=channel.bulk, async_op=True)

        mine, whole = bytes_of(total), bytes_of(everyones.view(-1))
        self._go_on_with(what, mine, whole, begin)
        self._pending([self._do(lambda: begin(mine, whole), what)], what, lambda: None, total.device).wait()
        return everyones

    def _go_on_with(
        self,
        what: str,
        given: torch.Tensor,
        taken: torch.Tensor,
        begin: Callable[[torch.Tensor, torch.Tensor], dist.Work],
    ) -> None:
        """Notes a collective that begins now. Meets, where the agreed pass does not go on with it."""
        self._enter_pass()
        passing, collective = self.ranks.data.lockstep, Collective(what, given.nbytes, _stand_in(given, taken, begin))
        if passing.is_agreed and passing.next != collective:
            self.ranks.data.rendezvous(f"{what} {self._progress}")
        passing.note(collective)

    def _count(self, edge: str, nbytes: int, what: str, start: float) -> None:
        now = time.perf_counter()
        counted = self.traffic.collectives[edge]
        counted.nbytes += nbytes
        counted.busy_seconds += now - start
        self.traffic.mark(edge, what, start, now)


class _Over(dist.Work):
    """What passes no bytes, since no other rank has these tensors."""

    def wait(self, *_: object) -> bool:
        return True


def _nothing(given: torch.Tensor, taken: torch.Tensor) -> dist.Work:
    return _Over()


def _key_of(trace: Iterable[int], resident: list[int], number: int) -> bytes:
    """Makes what passes that go the same way are known by; its first bytes are the trace's. ``number``: among the training passes since the last
    backward or step; 0 for another pass."""
    digest = hashlib.blake2b(np.fromiter(trace, np.int64).tobytes(), digest_size=DIGEST_NBYTES).digest()
    return digest + repr((resident, number)).encode()


def _stand_in(
    given: torch.Tensor, taken: torch.Tensor, begin: Callable[[torch.Tensor, torch.Tensor], dist.Work]
) -> Callable[[], dist.Work]:
    """Makes what begins the same collective with tensors like these, which nobody looks at. It holds neither of them."""
    sizes, dtype, where = (given.numel(), taken.numel()), given.dtype, given.device

    def stand_in() -> dist.Work:
        mine, whole = (torch.zeros(size, dtype=dtype, device=where) for size in sizes)
        return begin(mine, whole)

    return stand_in


def _ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """The fp32 sum of the rows, first to last."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total
