"""Channel: the sync points of the ranks of one process group, which find ranks that are not at the
same point.

At a sync point each rank announces its next operation and its counts of steps and backwards. It is
announced when it begins, and checked when it is waited for. In between a rank can do any
independent work. Its message: numbers (see `Number`), reduced to their minimum and maximum, so that
one comparison finds any difference; flags, reduced to their maximum.

[Note: why ranks meet before a collective] Ranks that call different collectives would mix up their
bytes or abort in the transport. A sync point before it turns that into an error that names both. So
does the verified sequence of a pass (see `collective_trace`). A rank that fails reports it at its
next sync point, and all others raise its reason.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InfinityError, PeerError, UsageError
from . import failure_report
from .collective_trace import CollectiveTrace, number_of
from .listener import Listener
from .pending import ranks_lost
from .transfer import Transfer, all_gather, give_up
from .tree import Tree

SAID_NBYTES = 448  # an operation's name, or the reason of a failure
FAILED = "failed: "
ORIGIN = re.compile(r", from infinity-[0-9a-f-]+\)")  # the load that a rank's values are from
MOST_VALUES = 8  # int64 values per sync point
HEARING_SECONDS = 5.0  # that a failed rank waits for another rank to come to a sync point
Spans = list[tuple[int, int]]  # the minimum and the maximum of each of the ranks' values


def _locked(method: Callable) -> Callable:
    """Makes a method of a channel keep its listener away."""

    @functools.wraps(method)
    def locked(self: Channel, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


class Channel:
    """The sync points of one process group. Used from one thread at a time, beside its
    listener."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tree: Tree,
        *,
        reductions: dist.ProcessGroup | None = None,
        alarms: Any = None,
    ):
        self.group = group  # for host memory
        self.tree = tree  # for sync points
        self.bulk = group  # for gathers of device memory
        self.reductions = reductions or group  # for gradients: they do not wait behind gathers
        self.collective_trace = CollectiveTrace()
        self.peer_memory: Any = None  # of weights that all these ranks can read; None: none
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)  # global ranks
        self.flags_nbytes = 16  # flags that fit a sync point: the same on all ranks
        self.alarms = alarms  # this channel's own store
        self._ended = ""  # why no sync point is possible: the ranks have diverged, or some are gone
        self.has_lost = False  # a rank is gone, or did not come
        self._sync_point: SyncPoint | None = None  # the last one
        self.lock = self.collective_trace.lock
        self._listener: Listener | None = None
        self._heard: InfinityError | None = None  # of a sync point that the listener has made

    def carry(self, bulk: dist.ProcessGroup, reductions: dist.ProcessGroup | None = None) -> None:
        """Sends gathers over ``bulk`` and gradients over ``reductions``, groups that reach the
        device's memory."""
        self.bulk, self.reductions = bulk, reductions or bulk

    def share(self, peer_memory: Any) -> None:
        """Lets gathers read weights from ``peer_memory``, and send none. None: stops that."""
        self.peer_memory = peer_memory

    def close(self) -> None:
        """Releases the groups now: their threads and descriptors must not wait for the garbage
        collector. No sync point is possible afterwards. Idempotent."""
        self._ended, self._sync_point = "the model was unwrapped", None
        if self._listener is not None:
            self._listener.close()
        self.collective_trace.close()
        if self.peer_memory is not None:
            self.peer_memory.close()
        self.tree.close()
        self.group = self.bulk = self.reductions = None

    # --- sync points ---

    @_locked
    def start_sync(
        self,
        what: str,
        flags: Sequence[int] = (),
        *,
        values: Sequence[int] = (),
        settling: bool = False,
        then: Callable[[Spans], None] = lambda spans: None,
        transfer: Transfer | None = None,
    ) -> SyncPoint:
        """Starts a sync point: announces that this rank is about to do ``what``, with ``flags`` (0
        to 255 each). Waits for the sync point before it, not for this one.

        values      int64, at most ``MOST_VALUES``; all ranks learn the minimum and maximum of each
        settling    only to complete what another rank has started
        then        called with the spans of the values as soon as they are known
        transfer    follows, between some or all of these ranks
        """
        if self._ended:
            raise PeerError(
                f"rank {dist.get_rank()} cannot go on at '{what}': this job failed before"
                f" ({self._ended}). Start it again."
            )
        if not settling:
            self.raise_heard()
        self.finish_sync()
        return self._begin(
            SyncPoint(
                self, what, flags, values=values, settling=settling, then=then, transfer=transfer
            )
        )

    def _begin(self, sync_point: SyncPoint) -> SyncPoint:
        self._sync_point = (
            sync_point  # before other ranks can observe it: a started sync point is completed
        )
        sync_point.begin()
        return sync_point

    @_locked
    def barrier(self, what: str, flags: Sequence[int] = (), **how: Any) -> torch.Tensor:
        """Blocks until all ranks come to ``what``. Returns the maximum of the ranks' ``flags``:
        uint8 [flags].

        Raises UsageError if another rank comes to something else, PeerError if one failed or is
        gone. Both are raised on all ranks, which are at the same point afterwards. ``how``: as
        :meth:`start_sync` takes it.
        """
        return self.start_sync(what, flags, **how).wait()

    @_locked
    def pass_on(self, what: str, transfer: Transfer) -> Any:
        """Meets for ``what``, then returns the result of ``transfer``. Raises as
        :meth:`barrier`."""
        self.barrier(what, transfer=transfer)
        return transfer.wait()

    @_locked
    def spans(
        self,
        what: str,
        values: Sequence[int],
        *,
        then: Callable[[Spans], None] = lambda spans: None,
    ) -> Spans:
        """Blocks until all ranks come to ``what``. Returns the minimum and maximum of each of the
        ranks' ``values``. Raises as :meth:`barrier`. ``then``: called with the spans as soon as
        they are known."""
        sync_point = self.start_sync(what, values=values, then=then)
        sync_point.wait()
        return sync_point.spans

    @_locked
    def finish_sync(self) -> None:
        """Blocks until the last sync point is over. Drops one that no other rank can have observed.
        Raises as :meth:`barrier`."""
        if self._sync_point is not None and not self._sync_point.is_over:
            sync_point = self._sync_point
            if not sync_point.is_begun:
                self._sync_point = None
                return
            try:
                sync_point.wait()
            except PeerError:
                if self._ended or not sync_point.is_failure_report:
                    raise  # this rank's own failure is not raised here

    @_locked
    def strike(self) -> None:
        """Notes that an exception interrupted this rank, and completes the sync point that it had
        started: other ranks act on it."""
        self._heard = None  # the exception is raised in its place
        self.collective_trace.strike()
        if not self._ended:
            with contextlib.suppress(InfinityError):  # an error of the interrupted operation
                self.finish_sync()
        # A sync point at which ranks diverge clears it; others may wait after it
        self.collective_trace.strike()

    @_locked
    def fail(self, error: BaseException) -> None:
        """Reports ``error`` at the next sync point: all other ranks raise it there. Blocks until
        they have come."""
        if getattr(error, "heard_on", None) is not self and not self._ended:
            # Another rank's failure, or they are gone already
            with contextlib.suppress(InfinityError):
                self._begin_failure_report(error).wait()

    @_locked
    def report(self, error: BaseException, *, ends: bool = False) -> None:
        """Reports ``error`` without waiting for the other ranks, which raise it at their next sync
        point. This rank raises, too, until it can go on; with ``ends`` it cannot any more."""
        if self._ended:
            return
        with contextlib.suppress(InfinityError, RuntimeError):  # of the sync point before, too
            if self.is_heard():
                self._begin_failure_report(error)
        if ends:
            self._ended = f"{type(error).__name__}: {error}"

    def _begin_failure_report(self, error: BaseException) -> SyncPoint:
        with contextlib.suppress(InfinityError):
            self.finish_sync()
        return self._begin(SyncPoint(self, f"{FAILED}{type(error).__name__}: {error}", failed=True))

    @property
    def has_ended(self) -> bool:
        """True once no sync point is possible here: closed, failed, or ranks lost."""
        return bool(self._ended)

    @_locked
    def is_heard(self) -> bool:
        """Returns whether the others have come to the sync point at which this rank reported its
        failure, or are gone."""
        last = self._sync_point
        if last is not None and last.is_failure_report and last.is_begun and not last.is_over:
            with contextlib.suppress(InfinityError, RuntimeError):
                if not last.poll():
                    return False
                last.wait()
        return True

    # --- the listener ---

    def listen(self, device: torch.device, describe: Callable[[], str]) -> None:
        """Starts the listener, which announces what ``describe`` returns. Idempotent."""
        if self._listener is None and not self._ended:
            self._listener = Listener(self.meet_others, device, describe)

    def raise_heard(self) -> None:
        """Raises the error of a sync point that the listener has made, once. This rank and the
        others are at the same point."""
        if self._heard is not None:
            error, self._heard = self._heard, None
            raise error

    def meet_others(self, announcement: str) -> InfinityError | None:
        """Makes the sync point at which others wait, in place of a training thread that is away.
        Returns the error of ranks that are gone, while collectives run and until the training
        thread has raised it. Called by the listener."""
        if self.lock.acquire(blocking=False):
            try:
                last = self._sync_point
                if self._ended:
                    pass
                elif last is not None and last.is_begun and not last.is_over:
                    if last.is_failure_report and last.poll():
                        self.finish_sync()  # others wait for what it starts
                elif self._heard is None and self.is_waited_for:
                    self.meet_if_called(announcement)
            except InfinityError as error:
                self._heard = error
            except RuntimeError as error:
                self._heard = self.lost(announcement, error)
            finally:
                self.lock.release()
        return self._heard if self.has_lost and self.is_waited_for else None

    def meet_if_called(self, announcement: str, *, settling: bool = False) -> None:
        """Makes the sync point at which ranks that have diverged wait, if there are any. Raises as
        :meth:`barrier`; with a device PeerError, too, if a rank has ended."""
        if self.sees_alarm():
            self.barrier(announcement, settling=settling)
        elif self._listener is not None and failure_report.ended(self.ranks):
            # Of a device's collective no transport tells it
            raise self.lost(announcement, RuntimeError("the process of a rank has ended"))

    @property
    def is_waited_for(self) -> bool:
        """Whether a collective runs that this rank has started."""
        return self.collective_trace.is_under_way

    # --- the interface for sync points ---

    def sees_alarm(self) -> bool:
        """Returns whether another rank, which has diverged, waits at the next sync point."""
        try:
            return self.alarms is not None and self.alarms.check([str(self.tree.begun)])
        except RuntimeError:
            return False

    def complete(self, transfer: Transfer, what: str) -> Any:
        """Waits for the result of ``transfer``. Raises PeerError if a rank is gone."""
        try:
            return transfer.wait()
        except RuntimeError as error:
            raise self.lost(what, error) from error

    def refusal(self, what: str, texts: Sequence[str]) -> InfinityError:
        """Makes the error of a sync point, on every rank. ``what``: this rank's announcement,
        ``texts``: those of all ranks."""
        error: InfinityError | None = None
        for peer, theirs in zip(self.ranks, texts):
            if theirs.startswith(FAILED):
                error = error or PeerError(f"rank {peer} {theirs}")
        for peer, theirs in zip(self.ranks, texts):
            if theirs != _cut(what):
                # A truncated text lacks the origin, which is at the end.
                whole = max(len(what.encode()), len(theirs.encode())) < SAID_NBYTES
                other = whole and ORIGIN.findall(theirs) != ORIGIN.findall(what)
                loads = " Their values are from different loads: load a checkpoint on all." * other
                error = error or UsageError(
                    f"rank {dist.get_rank()} is at '{what}' while rank {peer} is at '{theirs}': all"
                    " ranks must run the same modules in the same order, and make the same calls"
                    " that need every rank (step, state_dict, clip_grad_norm_, saving, loading)."
                    f"{loads}"
                )
        error = error or UsageError(
            f"rank {dist.get_rank()} is at '{what}', as all ranks are, but other ranks came there"
            " another way."
        )
        error.heard_on = self
        return error

    def lost(self, what: str, error: RuntimeError) -> PeerError:
        """Makes the error for a failed transport, and marks the channel as ended."""
        lost = ranks_lost(what, error)
        self._ended, self.has_lost = f"{lost}", True
        give_up()
        return lost


class Number(IntEnum):
    """What each rank announces at a sync point: int64, before its values."""

    FAILED = 0  # 1: this rank failed, and reports why
    SETTLING = 1  # 1: it cleans up after an exception, and meets again
    DIVERGED = 2  # 1: it left the verified sequence, or was interrupted. 0: it may use what it has
    STARTED = 3  # collectives that it has started
    DIGEST = 4  # of its announcement


COUNT = len(Number) + MOST_VALUES
NUMBERS_NBYTES = 8 * 2 * COUNT  # each negated, too, for the minimum


@dataclass(eq=False)
class Round:
    """One exchange of a sync point. A sync point with a rank that cleans up after an exception has
    another."""

    number: int  # among the merges of the tree
    announcement: str  # the numbers have its digest
    merge: Transfer
    missing: Transfer | None = None  # describes collectives that some rank has not started
    texts: Transfer | None = None  # if announcements differ


class SyncPoint:
    """One sync point. Every rank of the channel makes the same ones, in one order. After an
    interrupt :meth:`wait` resumes."""

    def __init__(
        self,
        channel: Channel,
        what: str,
        flags: Sequence[int] = (),
        *,
        values: Sequence[int] = (),
        failed: bool = False,
        settling: bool = False,
        then: Callable[[Spans], None] = lambda spans: None,
        transfer: Transfer | None = None,
    ):
        self._channel, self._what, self._flags, self._values = channel, what, flags, values
        self.is_failure_report = failed  # this rank reports a failure at it
        self._settling, self._then = settling, then
        self._transfer = transfer  # follows if all announced the same
        self._rounds: list[Round] = []
        self.spans: Spans = []  # of the ranks' values, once all are known to be there
        self._result: torch.Tensor | None = None

    def begin(self) -> None:
        """Sends this rank's announcement."""
        channel, failed, what = self._channel, self.is_failure_report, self._what
        trace, number = channel.collective_trace, channel.tree.begun
        trace.settle()
        if (diverged := trace.has_diverged or failed) and channel.alarms is not None:
            # Calls the ranks that wait for a collective to this sync point, their next one
            with contextlib.suppress(RuntimeError):  # if the store is gone, so is the job
                channel.alarms.set(str(number), "")
        if trace.is_open and not failed:
            what = f"{what}, having begun {trace.reach} collectives of the pass"
        said = number_of(what)
        numbers = [failed, self._settling, diverged, trace.total, said, *self._values]
        numbers += [0] * (COUNT - len(numbers))
        numbers += [-number for number in numbers]
        nbytes = NUMBERS_NBYTES + channel.flags_nbytes
        message = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        message[:NUMBERS_NBYTES].view(torch.int64).copy_(torch.tensor(numbers, device="cpu"))
        self._flags_of(message).copy_(torch.tensor(self._flags, dtype=torch.uint8, device="cpu"))
        merge = channel.tree.merge(message, _merged)
        self._rounds.append(Round(number, what, merge))
        merge.begin()

    def wait(self) -> torch.Tensor:
        """Blocks until the sync point is over. Returns the maximum of the ranks' flags, uint8
        [flags]. Raises UsageError if another rank is at something else, PeerError if one failed or
        is gone. Both are raised on all ranks, which are at the same point afterwards."""
        with self._channel.lock:
            while self._result is None:
                self._go_on(self._rounds[-1])
            if self._transfer is not None:
                self._channel.complete(self._transfer, self._what)
                self._transfer = None
            return self._flags_of(self._result)

    def _go_on(self, last: Round) -> None:
        """Handles the result of a round. Idempotent."""
        channel, what = self._channel, self._what
        message = channel.complete(last.merge, what)
        most, least = message[:NUMBERS_NBYTES].view(torch.int64).view(2, COUNT).tolist()
        spans = [(-low, high) for low, high in zip(least, most)]
        first, started = spans[Number.STARTED]
        all_diverged, has_diverged = spans[Number.DIVERGED]
        if has_diverged:
            # Every rank starts the collectives that any has started: others describe what it lacks
            if first < started and last.missing is None:
                described = channel.collective_trace.described(first + 1, started)
                last.missing = channel.tree.merge(described, _most)
            missing = channel.complete(last.missing, what).tolist() if last.missing else []
            try:
                channel.collective_trace.part(started, missing)
            except RuntimeError as error:
                raise channel.lost("completing what other ranks have started", error) from error
            if channel.rank == 0 and channel.alarms is not None:
                with contextlib.suppress(RuntimeError):
                    channel.alarms.delete_key(str(last.number))
        channel.collective_trace.forget(started)
        # A collective completed with dummy data must not be used. Every rank that would use it gets
        # the error here.
        is_torn = has_diverged and not all_diverged and first < started
        low, high = spans[Number.DIGEST]
        settles = most[Number.SETTLING]
        if most[Number.FAILED] or (not settles and (low != high or is_torn)):
            if last.texts is None:
                sent = torch.zeros(SAID_NBYTES, dtype=torch.uint8, device="cpu")
                encoded = bytearray(_cut(last.announcement).encode())
                sent[: len(encoded)] = torch.frombuffer(encoded, dtype=torch.uint8)
                received = sent.new_empty(channel.size, SAID_NBYTES)
                group = channel.group
                last.texts = Transfer(
                    lambda: [all_gather(group, received.view(-1), sent)],
                    result=lambda: [_text(row) for row in received],
                )
            error = channel.refusal(last.announcement, channel.complete(last.texts, what))
            self._transfer = None
            self._end(message)
            raise error
        if settles and not self._settling:
            return self.begin()
        if not settles:
            self.spans = spans[len(Number) :][: len(self._values)]
            self._then(self.spans)
        self._end(message)
        return None

    def _end(self, message: torch.Tensor) -> None:
        # The channel has its last sync point, and the process the channel until the engine is gone
        self._result, self._then = message, _nothing

    def _flags_of(self, message: torch.Tensor) -> torch.Tensor:
        return message[NUMBERS_NBYTES:][: len(self._flags)]

    @property
    def is_begun(self) -> bool:
        """Whether another rank may have observed it."""
        return bool(self._rounds) and self._rounds[0].merge.is_begun

    @property
    def is_over(self) -> bool:
        """Whether its result and its transfer are complete, or an error was raised."""
        return self._result is not None and self._transfer is None

    def poll(self) -> bool:
        """Returns whether all ranks have come. Does not block."""
        with self._channel.lock:
            return self._rounds[-1].merge.poll()


def _nothing(spans: Spans) -> None:
    """Does nothing at a sync point that is over."""


def _most(described: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([*described]).amax(0)


def _merged(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    merged = messages[0].clone()
    numbers, flags = merged[:NUMBERS_NBYTES].view(torch.int64), merged[NUMBERS_NBYTES:]
    for message in messages[1:]:
        torch.maximum(numbers, message[:NUMBERS_NBYTES].view(torch.int64), out=numbers)
        torch.maximum(flags, message[NUMBERS_NBYTES:], out=flags)
    return merged


def _cut(what: str) -> str:
    """Truncates ``what`` to the room there is. The end of a longer text becomes a digest."""
    encoded = what.encode()
    if len(encoded) <= SAID_NBYTES:
        return what
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return f"{encoded[: SAID_NBYTES - 20].decode(errors='ignore')}...{digest}"


def _text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
