"""Two ranks that are threads of this process: a meeting place in place of process groups.

Words used here:

**pair**: what both threads meet at; it refuses ranks that are at different things.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from infinity.errors import PeerError, UsageError
from infinity.ranks.collective_trace import CollectiveTrace

SECONDS = 60  # that a rank waits for the other


class Pair:
    """Two threads' meeting place."""

    def __init__(self) -> None:
        self._barrier, self._said = threading.Barrier(2, timeout=SECONDS), [None, None]
        self.meetings: list[str] = []

    def exchange(self, rank: int, what: str, value: Any) -> list:
        """What both ranks have said, in their order. Raises where they are at different things."""
        self._said[rank] = (what, value)
        self._barrier.wait()
        said = list(self._said)
        if rank == 0:
            self.meetings.append(what)
        self._barrier.wait()
        assert said[0][0] == said[1][0], said
        return [value for _, value in said]

    def give_up(self) -> None:
        """Lets the other rank wait no longer."""
        self._barrier.abort()


class PairChannel:
    """What stands for a channel between the two, and for its groups."""

    def __init__(self, pair: Pair, rank: int):
        self.pair, self.rank, self.size, self.ranks, self.flags_nbytes = pair, rank, 2, [0, 1], 8
        self.group = self.bulk = self.reductions = self
        self.collective_trace = CollectiveTrace()
        self.lock = self.collective_trace.lock

    def barrier(
        self,
        what: str,
        flags: tuple = (),
        *,
        then: Callable[[list], None] = lambda spans: None,
    ) -> torch.Tensor:
        both = self.pair.exchange(self.rank, "barrier", (what, [int(flag) for flag in flags]))
        if any(said.startswith("failed: ") for said, _ in both):
            raise PeerError(next(said for said, _ in both if said.startswith("failed: ")))
        if both[0][0] != both[1][0]:
            raise UsageError(f"'{both[0][0]}' and '{both[1][0]}'")
        found = torch.tensor([flags for _, flags in both], dtype=torch.uint8).amax(0)
        then([])
        return found

    def spans(
        self, what: str, values: list[int], *, then: Callable[[list], None] = lambda spans: None
    ) -> list[tuple[int, int]]:
        self.barrier(what)
        both = self.pair.exchange(self.rank, "spans", list(values))
        found = [(min(pair), max(pair)) for pair in zip(*both)]
        then(found)
        return found

    def start_sync(
        self,
        what: str,
        *,
        values: tuple = (),
        then: Callable[[list], None] = lambda spans: None,
    ) -> Any:
        self.spans(what, values, then=then)
        return SimpleNamespace(wait=lambda: None)

    def pass_on(self, what: str, transfer: Any) -> Any:
        self.barrier(what)
        return transfer.wait()

    def _allgather_base(self, whole: torch.Tensor, mine: torch.Tensor, options: Any) -> Any:
        return all_gather(whole, mine, group=self, async_op=True)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        (tensor,) = tensors
        found = self.pair.exchange(self.rank, f"broadcast of {options.rootRank}", tensor.clone())[
            options.rootRank
        ]
        return SimpleNamespace(wait=lambda *_: tensor.copy_(found), is_completed=lambda: True)

    def finish_sync(self) -> None:
        pass

    def raise_heard(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.pair.exchange(self.rank, "barrier", (f"failed: {error}", []))


def all_gather(
    whole: torch.Tensor, mine: torch.Tensor, *, group: PairChannel, async_op: bool = False
) -> Any:
    both = torch.cat(group.pair.exchange(group.rank, "all_gather", mine.clone()))
    return (
        SimpleNamespace(wait=lambda *_: whole.copy_(both), is_completed=lambda: True)
        if async_op
        else whole.copy_(both)
    )


def all_to_all_single(
    received: torch.Tensor, sent: torch.Tensor, *, group: PairChannel, async_op: bool
) -> Any:
    both = group.pair.exchange(group.rank, "all_to_all", sent.clone())
    mine = torch.cat([each.view(2, -1)[group.rank] for each in both])
    return SimpleNamespace(wait=lambda *_: received.copy_(mine), is_completed=lambda: True)


def run_pair(make: Callable[[Pair, int], Any], work: Callable[[Any], Any]) -> list:
    """Runs ``work(make(pair, rank))`` on both ranks. What each returned; raises what either
    raised."""
    pair, failed, returned = Pair(), [], [None, None]
    made = [make(pair, rank) for rank in range(2)]

    def thread(rank: int) -> None:
        try:
            returned[rank] = work(made[rank])
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)
            pair.give_up()

    threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(2 * SECONDS)
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return returned
