"""Gathers of a device: the host orders its compute after them, and learns later how they ended."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import infinity
from infinity.core.machine.traffic import Traffic
from infinity.errors import PeerError
from infinity.ranks.bulk import MOST_ORDERED, Bulk
from infinity.ranks.collective_trace import Collective, CollectiveTrace
from infinity.ranks.parallel_dims import ParallelDims
from infinity.ranks.pending import Pending


class Work:
    """A collective on a device: its wait orders streams, and it ends after some questions."""

    def __init__(self, questions: int, error: Exception | None = None):
        self.left, self.error, self.ordered = questions, error, 0

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self, *_: object) -> None:
        self.ordered += 1
        if self.left < 0 and self.error is not None:
            raise self.error


NEVER = 1 << 40


@pytest.fixture
def bulk(monkeypatch):
    monkeypatch.setattr("infinity.ranks.pending.ranks_lost", _lost)
    monkeypatch.setattr("infinity.ranks.transfer._gave_up", None)
    return Bulk(ParallelDims(), Traffic(), SimpleNamespace())


def _lost(what: str, error: BaseException) -> PeerError:
    return PeerError(f"{what}: {error}")


def gather(bulk: Bulk, work: Work, finish=None) -> Pending:
    return Pending([work], "a gather", finish, is_on_host=False, defer=bulk._note_ordered)


def test_the_host_goes_on_while_few_gathers_run(bulk):
    """As many as the bulk may be ahead of are ordered though none ends; their finish, which
    launches on the ordered stream, runs at once."""
    works, finished = [Work(NEVER) for _ in range(MOST_ORDERED)], []
    for number, work in enumerate(works):
        gather(bulk, work, lambda number=number: finished.append(number)).wait()
    assert [work.ordered for work in works] == [1] * MOST_ORDERED
    assert finished == list(range(MOST_ORDERED))


def test_the_oldest_gather_is_waited_for_when_more_run(bulk):
    """The twin: one more blocks until the first is over, and no other."""
    works = [Work(5), *(Work(NEVER) for _ in range(MOST_ORDERED))]
    for work in works:
        gather(bulk, work).wait()
    assert works[0].left < 0
    assert all(work.left > 0 for work in works[1:])


def test_all_gathers_are_over_where_a_pass_ends(bulk):
    works = [Work(5) for _ in range(MOST_ORDERED)]
    for work in works:
        gather(bulk, work).wait()
    bulk.wait_for_ordered()
    assert all(work.left < 0 for work in works)


def test_a_gather_that_is_dropped_is_waited_for_at_once(bulk):
    work = Work(5)
    gather(bulk, work, lambda: pytest.fail("its data is not used")).drop()
    assert work.left < 0


def test_what_an_exception_left_is_polled_where_it_is_a_devices(bulk, monkeypatch):
    """A handle that was lost between its launch and its note, of a collective that still runs: its
    own waits, with a limit, would abort it. Twin: one in host memory gets them."""
    trace, waits = CollectiveTrace(), []

    class Limited(Work):
        def wait(self, *limit: object) -> None:
            waits.append(limit)
            self.left = -1

    channel = SimpleNamespace(collective_trace=trace, lock=nullcontext(), raise_heard=lambda: None)
    channel.meet_if_called = lambda *_, **__: None
    bulk._dp_group = channel
    for is_on_host in (False, True):
        numbers = (0, 0, 0, 0, 0, is_on_host)
        trace.start(Collective("a gather", 8, numbers), lambda: Limited(3), lambda: 0)
    bulk._drop_lost()
    assert waits == [(), (timedelta(milliseconds=500),)]


@pytest.mark.parametrize("what", ["an error of the transport", "an alarm of another rank"])
def test_a_late_failure_is_raised_where_the_host_waits(what, bulk, monkeypatch):
    """It was ordered while nothing was known."""
    transfer = "infinity.ranks.transfer"
    monkeypatch.setattr(f"{transfer}.HEARING_INTERVAL", timedelta(0))
    monkeypatch.setattr(f"{transfer}.patience_seconds", lambda: 60.0)  # there are no ranks here
    is_alarm = what.startswith("an alarm")
    work = Work(NEVER if is_alarm else 3, None if is_alarm else RuntimeError(what))
    pending = gather(bulk, work)
    if is_alarm:
        pending.poll = alarm(work, what)
    pending.wait()
    with pytest.raises(PeerError, match=what):
        bulk.wait_for_ordered()


def alarm(work: Work, what: str):
    def poll(settling: bool) -> None:
        work.left = 0  # the sync point completes what any rank has started
        raise PeerError(what)

    return poll


def test_a_transport_of_the_host_blocks(bulk):
    """It has no stream that could be ordered."""
    pending = bulk._pending([Work(3)], "a gather", lambda: None, torch.device("cpu"))
    assert pending.defer is None


@pytest.mark.parametrize("fails", [True, False])
def test_a_forward_that_fails_waits_for_no_gather(fails, monkeypatch):
    """Other ranks may not start what it would wait for. Twin: one that ends waits."""
    waits = []
    monkeypatch.setattr(Bulk, "wait_for_ordered", lambda self: waits.append(self))

    class Model(torch.nn.Linear):
        def forward(self, x):
            waits.clear()  # its own weights are there
            if fails:
                raise ValueError("mine")
            return super().forward(x)

    model = Model(4, 4)
    model, _ = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )
    try:
        model(torch.ones(1, 4))
    except ValueError:
        assert fails
    assert bool(waits) != fails
