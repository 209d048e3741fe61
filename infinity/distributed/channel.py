"""Channel: brings the ranks of one process group together, and tells them where they are not at the same place.

What a rank says at a meeting is what it is about to do, and after how many steps and backwards. Ranks that come to different collectives
would mix up their bytes or end in the transport's abort: a meeting before them makes that an error that names both, and so does the agreed
sequence of a pass (see `lockstep`). A rank that fails says so at its next meeting, and all others raise its reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InfinityError, PeerError, UsageError
from .lockstep import Lockstep
from .meeting import Meeting
from .pending import ranks_lost
from .shared_homes import SharedHomes
from .transfer import Transfer, all_gather
from .tree import Tree

SAID_NBYTES = 448  # what a rank is about to do, or why it failed
FAILED = "failed: "
ORIGIN = re.compile(r", from infinity-[0-9a-f-]+\)")  # the load that a rank's values are from, where it says so
HEARING_SECONDS = 5.0  # that a failed rank waits for another one to come to a meeting


class Channel:
    """Brings the ranks of one process group together. Used from one thread at a time."""

    def __init__(self, group: dist.ProcessGroup, tree: Tree, *, reductions: dist.ProcessGroup | None = None, alarms: Any = None):
        self.group = group  # for what the host has
        self.tree = tree  # for meetings
        self.bulk = group  # for gathers of what the device has
        self.reductions = reductions or group  # for gradients, whose bytes do not wait for a gather's
        self.lockstep = Lockstep()
        self.homes: SharedHomes | None = None  # of weights that all of these ranks can read
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)  # in the world
        self.flags_nbytes = 32  # what a meeting has room for: the same on all ranks
        self._alarms = alarms  # a store of this channel's own
        self._ended = False  # the ranks are no longer at the same place, or some are gone
        self._meeting: Meeting | None = None  # the last one
        self._farewell: Meeting | None = None  # at which this rank said that it failed

    def carry(self, bulk: dist.ProcessGroup, reductions: dist.ProcessGroup | None = None) -> None:
        """Has gathers pass over ``bulk`` and gradients over ``reductions``, groups that reach the device's memory."""
        self.bulk, self.reductions = bulk, reductions or bulk

    def share(self, homes: SharedHomes | None) -> None:
        """Has gathers read weights in ``homes`` that lie there, instead of sending them; None: no more."""
        self.homes = homes

    def close(self) -> None:
        """Lets the groups go: each has threads and descriptors, which must not wait until the garbage collector finds what refers to this. Nobody
        meets here afterwards. A second call does nothing."""
        self._ended, self._meeting, self._farewell = True, None, None
        self.lockstep.close()
        if self.homes is not None:
            self.homes.close()
        self.tree.close()
        for name in ("group", "bulk", "reductions"):
            setattr(self, name, None)

    # --- meetings ---

    def announce(
        self,
        what: str,
        flags: Sequence[int] = (),
        *,
        values: Sequence[int] = (),
        settling: bool = False,
        then: Callable[[torch.Tensor], None] = lambda found: None,
        transfer: Transfer | None = None,
    ) -> Meeting:
        """Says that this rank is about to do ``what``, with ``flags`` (0 to 255 each). What the others say is known when the meeting is
        waited for; the next one waits for it, too. ``values``: int64, at most ``MOST_VALUES``, of which the spans are known then. ``settling``:
        only to complete what another rank has started. ``then``: given the flags as soon as they are known. ``transfer``: follows, between
        some or all of these ranks."""
        if self._ended:
            raise PeerError(f"rank {dist.get_rank()} cannot go on at '{what}': this job failed before. Start it again.")
        self.finish_meeting()
        return self._begin(Meeting(self, what, flags, values=values, settling=settling, then=then, transfer=transfer))

    def _begin(self, meeting: Meeting) -> Meeting:
        self._meeting = meeting  # before others hear of it: what was begun is carried to its end
        meeting.begin()
        return meeting

    def rendezvous(self, what: str, flags: Sequence[int] = (), **how: Any) -> torch.Tensor:
        """Waits for all ranks to come to ``what``. Returns the largest of everyone's ``flags``: uint8 [flags].

        Raises UsageError when another rank comes to something else, PeerError when one failed or is gone. Both are raised
        on all ranks, which are at the same place afterwards. ``how``: as :meth:`announce` takes it.
        """
        return self.announce(what, flags, **how).wait()

    def pass_on(self, what: str, transfer: Transfer) -> Any:
        """Meets for ``what``, and returns what ``transfer`` brings then. Raises as
        :meth:`rendezvous`."""
        self.announce(what, transfer=transfer).wait()
        return transfer.wait()

    def spans(
        self, what: str, values: Sequence[int], *, then: Callable[[list[tuple[int, int]]], None] = lambda spans: None
    ) -> list[tuple[int, int]]:
        """Waits for all ranks to come to ``what``. Returns the least and the largest of each of everyone's ``values``. Raises what
        :meth:`rendezvous` does. ``then``: given these spans as soon as they are known."""
        # Whatever strikes this call: until the meeting is over, it is the last one.
        meeting = self.announce(what, values=values, then=lambda found: then(self._meeting.spans))
        meeting.wait()
        return meeting.spans

    def finish_meeting(self) -> None:
        """Waits for the last meeting to its end, if nobody has; one that no other rank has heard of
        is none. Raises what :meth:`rendezvous` does."""
        if self._meeting is not None and not self._meeting.is_over:
            meeting = self._meeting
            if not meeting.is_begun:
                self._meeting = None
                return
            try:
                meeting.wait()
            except PeerError:
                if self._ended or not meeting.is_farewell:
                    raise  # else this rank's own word, which it knows

    def strike(self) -> None:
        """Notes that an exception ended what this rank was at, and carries what it had begun here
        to its end: others go by it."""
        self.lockstep.strike()
        if not self._ended:
            with contextlib.suppress(InfinityError):  # of what was given up
                self.finish_meeting()
        self.lockstep.strike()  # a meeting at which ranks part clears it, and others may wait for what comes behind that

    def fail(self, error: BaseException) -> None:
        """Comes to the next meeting with ``error`` instead: all others raise it there."""
        if getattr(error, "heard_on", None) is not self and not self._ended:
            with contextlib.suppress(InfinityError):  # another one's, or they are gone already
                self._begin_farewell(error).wait()

    def warn(self, error: BaseException) -> None:
        """Sends ``error`` without waiting for the others, which raise it where they come next, as
        this rank does until it can go on."""
        with contextlib.suppress(RuntimeError):  # of the transport, or of the meeting before
            last = self._meeting
            is_said = last is not None and last.is_farewell and last.is_begun and not last.is_over
            waits = is_said and not last.poll()
            if not self._ended and not waits:
                self._begin_farewell(error)

    def tell(self, error: BaseException) -> None:
        """Sends ``error`` without waiting for the others. This rank cannot go on afterwards."""
        if not self._ended:
            with contextlib.suppress(InfinityError):
                self._farewell = self._begin_farewell(error)
            self._ended = True

    def _begin_farewell(self, error: BaseException) -> Meeting:
        with contextlib.suppress(InfinityError):
            self.finish_meeting()
        return self._begin(Meeting(self, f"{FAILED}{type(error).__name__}: {error}", failed=True))

    @property
    def has_ended(self) -> bool:
        """Whether this rank can meet nobody here any more."""
        return self._ended

    def is_heard(self) -> bool:
        """Tells whether the others have come to the meeting at which this rank told that it failed, or are gone."""
        if self._farewell is not None:
            try:
                if not self._farewell.poll():
                    return False
                self._farewell.wait()
            except (InfinityError, RuntimeError):
                pass
            self._farewell = None
        return True

    # --- what meetings ask ---

    def raise_alarm(self, number: int) -> None:
        """Calls the ranks that wait for a collective to the meeting with this ``number``, to which this rank comes next."""
        if self._alarms is not None:
            with contextlib.suppress(RuntimeError):  # a store that is gone: so is the job
                self._alarms.set(str(number), "")

    def hears_alarm(self) -> bool:
        """Tells whether another rank waits at the next meeting, because it has parted."""
        try:
            return self._alarms is not None and self._alarms.check([str(self.tree.begun)])
        except RuntimeError:
            return False

    def complete(self, transfer: Transfer, what: str) -> Any:
        """Waits for the result of ``transfer``. Raises PeerError where a rank is gone."""
        try:
            return transfer.wait()
        except RuntimeError as error:
            raise self.lost(what, error) from error

    def come_together(self, last: int, described: Sequence[Sequence[int]], number: int) -> None:
        """Completes what any rank has started, up to the collective with the number ``last``: the last ones are ``described``. Ends the agreement
        on a sequence. ``number``: of the meeting."""
        try:
            self.lockstep.part(last, described)
        except RuntimeError as error:
            raise self.lost("completing what other ranks have started", error) from error
        if self.rank == 0 and self._alarms is not None:
            with contextlib.suppress(RuntimeError):
                self._alarms.delete_key(str(number))

    def refusal(self, what: str, texts: Sequence[str]) -> InfinityError:
        """Makes the error of a meeting at which this rank was at ``what`` and the ranks have told
        each other ``texts``, on every rank."""
        error: InfinityError | None = None
        for peer, theirs in zip(self.ranks, texts):
            if theirs.startswith(FAILED):
                error = error or PeerError(f"rank {peer} {theirs}")
        for peer, theirs in zip(self.ranks, texts):
            if theirs != _cut(what):
                whole = max(len(what.encode()), len(theirs.encode())) < SAID_NBYTES  # the origin is at the end of what is said
                apart = whole and ORIGIN.findall(theirs) != ORIGIN.findall(what)
                error = error or UsageError(
                    f"rank {dist.get_rank()} is at '{what}' while rank {peer} is at '{theirs}': all ranks must run the same "
                    "modules in the same order, and make the same calls that need every rank (step, state_dict, "
                    f"clip_grad_norm_, saving, loading).{' Their values are from different loads: load a checkpoint on all.' * apart}"
                )
        error = error or UsageError(
            f"rank {dist.get_rank()} is at '{what}', as all ranks are, but other ranks came there another way."
        )
        error.heard_on = self
        return error

    def lost(self, what: str, error: RuntimeError) -> PeerError:
        """Makes the error for a transport that has given up."""
        self._ended = True
        return ranks_lost(what, error)

    def tell_in_words(self, what: str) -> Transfer:
        """Makes the transfer in which all ranks tell each other ``what`` they are at: a list, in
        their order."""
        words = torch.zeros(SAID_NBYTES, dtype=torch.uint8, device="cpu")
        encoded = bytearray(_cut(what).encode())
        words[: len(encoded)] = torch.frombuffer(encoded, dtype=torch.uint8)
        everyones = torch.empty(self.size, SAID_NBYTES, dtype=torch.uint8, device="cpu")
        group = self.group
        return Transfer(lambda: [all_gather(group, everyones.view(-1), words)], result=lambda: [_text(row) for row in everyones])


def _cut(what: str) -> str:
    """``what``, as far as there is room; of a longer one the end is told by a digest."""
    encoded = what.encode()
    if len(encoded) <= SAID_NBYTES:
        return what
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return f"{encoded[: SAID_NBYTES - 20].decode(errors='ignore')}...{digest}"


def _text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
