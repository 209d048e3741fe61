"""Channel: exchanges a few bytes between all ranks of a process group before each collective.

What a rank says is what it is about to do, and after how many steps and backwards. Ranks that come to different collectives
would mix up their bytes or end in the transport's abort: a rendezvous makes that an error that names both. A rank that fails
says so at its next rendezvous, and all others raise its reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import InfinityError, PeerError, UsageError
from . import farewell

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
SAID_NBYTES = 448  # what a rank is about to do, or why it failed
FAILED = "failed: "
HEARING_SECONDS = 5.0  # that a failed rank waits for another one to come to a rendezvous


@dataclass(eq=False)
class Pending:
    """A collective under way. ``wait`` raises PeerError when a rank is gone."""

    works: list
    what: str
    finish: Callable[[], None] | None = None
    release: Callable[[], None] = lambda: None  # of its memory, once nothing moves any more
    least_offered: int = 0  # reductions that all ranks of the row offered to start, at its rendezvous

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
            self.works = []
            if self.finish is not None:
                finish, self.finish = self.finish, None
                finish()
        except RuntimeError as error:
            raise (error if isinstance(error, InfinityError) else ranks_lost(self.what, error)) from error
        finally:
            self.works = []
            self.release()

    def drop(self) -> None:
        """Waits until nothing moves any more; what came is not used."""
        self.finish = None
        try:
            self.wait()
        except PeerError:
            pass


def ranks_lost(what: str, error: BaseException) -> PeerError:
    if known := farewell.reasons():
        return PeerError(f"rank {dist.get_rank()} lost its peers at '{what}': {known}")
    text = str(error).strip().splitlines() or [type(error).__name__]
    silent = farewell.silent()
    heard = f" Nothing was heard from {silent}." if silent else ""
    return PeerError(
        f"rank {dist.get_rank()} lost its peers at '{what}': {text[0]} A rank has ended, or did not come within the process "
        f"group's timeout: its own output tells why.{heard}"
    )


class Channel:
    """Brings the ranks of one process group together. Used from one thread at a time."""

    def __init__(self, group: dist.ProcessGroup, *, reductions: dist.ProcessGroup | None = None):
        self.group = group  # for rendezvous, and for what the host has
        self.bulk = group  # for gathers of what the device has
        self.reductions = reductions or group  # for gradients, whose bytes do not wait for a gather's
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)  # in the world
        self.flags_nbytes = 8  # what a rendezvous has room for: the same on all ranks
        self._ended = False  # the ranks are no longer at the same place, or some are gone
        self._unheard: tuple | None = None  # the transport still reads it

    def carry(self, bulk: dist.ProcessGroup, reductions: dist.ProcessGroup | None = None) -> None:
        """Has gathers pass over ``bulk`` and gradients over ``reductions``, groups that reach the device's memory."""
        self.bulk, self.reductions = bulk, reductions or bulk

    def rendezvous(self, what: str, flags: Sequence[int] = ()) -> torch.Tensor:
        """Waits for all ranks to come to ``what``. Returns everyone's ``flags`` (0 to 255 each): uint8 [ranks, flags].

        Raises UsageError when another rank comes to something else, PeerError when one failed or is gone. Both are raised
        on all ranks, which are at the same place afterwards.
        """
        if self._ended:
            raise PeerError(f"rank {dist.get_rank()} cannot go on at '{what}': this job failed before. Start it again.")
        messages = self._exchange(what, flags)
        texts = [_text(row[:SAID_NBYTES]) for row in messages]
        for peer, theirs in zip(self.ranks, texts):
            if theirs.startswith(FAILED):
                raise self._heard(PeerError(f"rank {peer} {theirs}"))
        for peer, theirs in zip(self.ranks, texts):
            if theirs != _cut(what):
                error = UsageError(
                    f"rank {dist.get_rank()} is at '{what}' while rank {peer} is at '{theirs}': all ranks must run the same "
                    "modules in the same order, and make the same calls that need every rank (step, state_dict, "
                    "clip_grad_norm_, saving, loading)."
                )
                raise self._heard(error)
        return messages[:, SAID_NBYTES : SAID_NBYTES + len(flags)]

    def _heard(self, error: InfinityError) -> InfinityError:
        error.heard_on = self
        return error

    def fail(self, error: BaseException) -> None:
        """Comes to the next rendezvous with ``error`` instead: all others raise it there."""
        if getattr(error, "heard_on", None) is not self and not self._ended:
            try:
                self._exchange(_failure(error), ())
            except PeerError:
                pass  # they are gone already

    def tell(self, error: BaseException) -> None:
        """Sends ``error`` without waiting for the others. This rank cannot go on afterwards."""
        if not self._ended:
            try:
                self._exchange(_failure(error), (), wait=False)
            except PeerError:
                pass
            self._ended = True

    @property
    def has_ended(self) -> bool:
        """Whether this rank can meet nobody here any more."""
        return self._ended

    @property
    def was_heard(self) -> bool:
        """Whether the others have come to the rendezvous at which this rank told that it failed, or are gone."""
        return self._unheard is None or self._unheard[0].is_completed()

    def lost(self, what: str, error: RuntimeError) -> PeerError:
        """Makes the error for a transport that has given up."""
        self._ended = True
        return ranks_lost(what, error)

    def _exchange(self, what: str, flags: Sequence[int], *, wait: bool = True) -> torch.Tensor:
        messages = torch.zeros(SAID_NBYTES + self.flags_nbytes, dtype=torch.uint8, device="cpu")
        encoded = bytearray(_cut(what).encode())
        messages[: len(encoded)] = torch.frombuffer(encoded, dtype=torch.uint8)
        if len(flags):
            messages[SAID_NBYTES : SAID_NBYTES + len(flags)] = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        everyones = torch.empty(self.size, messages.numel(), dtype=torch.uint8, device="cpu")
        try:
            work = all_gather(everyones.view(-1), messages, group=self.group, async_op=True)
            if wait:
                work.wait()
            else:
                self._unheard = work, everyones, messages
        except RuntimeError as error:
            raise self.lost(what, error) from error
        return everyones


def _failure(error: BaseException) -> str:
    return f"{FAILED}{type(error).__name__}: {error}"


def _cut(what: str) -> str:
    """``what``, as far as there is room; of a longer one the end is told by a digest."""
    encoded = what.encode()
    if len(encoded) <= SAID_NBYTES:
        return what
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return f"{encoded[: SAID_NBYTES - 20].decode(errors='ignore')}...{digest}"


def _text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
