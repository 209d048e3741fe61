"""Transfers: what ranks pass to each other is carried to its end, whatever strikes between two of
its lines, and no wait is without end.

**strike**: an exception at one line of this package, between what was begun and the next use, which
goes on from there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lines import is_line
from ranks import launch_without

from infinity.core.run.journal import Journal
from infinity.errors import PeerError
from infinity.ranks import transfer
from infinity.ranks.transfer import Transfer, wait_for
from infinity.ranks.tree import Tree

FOLDER = str(Path(transfer.__file__).parent)


class Work:
    """An operation of a transport that is over at once, unless it is to fail or never to end."""

    def __init__(self, log: list[str], name: str, how: str = "ends"):
        log.append(name)
        self.how, self.waits = how, 0

    def is_completed(self) -> bool:
        return self.how == "ends"

    def wait(self, limit: timedelta | None = None) -> None:
        self.waits += 1
        if self.how == "fails":
            raise RuntimeError("connection closed by peer")
        if self.how == "never" and limit is not None:
            time.sleep(limit.total_seconds())
            raise RuntimeError("timed out")


class Lines:
    """Raises Ctrl-C at the n-th line that runs of the modules of transfers and merges."""

    def __init__(self, n: int):
        self.left = n

    def run(self, work: Callable[[], Any]) -> Any:
        sys.settrace(
            lambda frame, *_: self._line if frame.f_code.co_filename.startswith(FOLDER) else None
        )
        try:
            return work()
        finally:
            sys.settrace(None)

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        if is_line(frame, event):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


def two_phases(log: list[str]) -> Transfer:
    return Transfer(
        lambda: [lambda: Work(log, "up"), lambda: Work(log, "down")],
        lambda: [lambda: Work(log, "out")],
        result=lambda: 7,
    )


@pytest.mark.parametrize("n", range(1, 30))
def test_a_transfer_that_is_struck_goes_on_from_what_was_begun(n):
    """At each line in turn: every operation is begun once, in its order, and the result is
    there."""
    log: list[str] = []
    made = two_phases(log)
    try:
        Lines(n).run(made.wait)
    except KeyboardInterrupt:
        assert made.is_begun is bool(log)
    assert made.wait() == made.wait() == 7 and log == ["up", "down", "out"]


def test_a_transfer_in_a_running_generator_is_lost():
    """The twin: what was begun is known to a frame alone, and an exception closes it."""
    log: list[str] = []

    def phases():
        yield Work(log, "up")
        raise KeyboardInterrupt

    running = phases()
    next(running)
    with pytest.raises(KeyboardInterrupt):
        next(running)
    with pytest.raises(StopIteration):
        next(running)


class Group:
    """A parent's group with one child, whose message is known."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def gather(self, outputs: list, inputs: list, options: Any) -> Work:
        for out in outputs[0]:
            out.fill_(3)
        return Work(self.log, "gather")

    def scatter(self, outputs: list, inputs: list, options: Any) -> Work:
        return Work(self.log, "scatter")


@pytest.mark.parametrize("n", range(1, 40))
def test_merges_are_counted_as_others_hear_of_them(n, monkeypatch):
    """A merge that is struck before its first operation is none, and the next one has its number;
    else it is carried on."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    group = Group()
    tree = Tree(group, None)

    def merge() -> torch.Tensor:
        made = tree.merge(torch.ones(4), lambda parts: parts[0] + parts[1])
        made.begin()
        return made.wait()

    try:
        Lines(n).run(merge)
    except KeyboardInterrupt:
        assert tree.begun == bool(group.log)
    before = tree.begun
    assert torch.equal(merge(), torch.full((4,), 6.0)) and tree.begun == before + 1


def test_a_wait_ends_with_the_timeout(monkeypatch):
    """For what never ends, where the transport itself knows no limit."""
    monkeypatch.setattr(transfer, "HEARING_INTERVAL", timedelta(milliseconds=5))
    monkeypatch.setattr(transfer, "_gave_up", None)
    monkeypatch.setattr(transfer, "patience_seconds", lambda: -transfer.GRACE_SECONDS + 0.02)
    work, heard = Work([], "never", "never"), []
    with pytest.raises(RuntimeError, match="timed out after"):
        wait_for(work, lambda: heard.append(1))
    assert work.waits > 1 and heard


def test_a_rank_that_did_not_come_is_not_waited_for_anew(monkeypatch):
    """After a wait whose limit ended, or a rank that is known to be gone. Twin: all ranks have met
    again since."""
    monkeypatch.setattr(transfer, "_gave_up", None)
    monkeypatch.setattr(transfer, "patience_seconds", lambda: 3600.0)
    monkeypatch.setattr(transfer, "HEARING_INTERVAL", timedelta(milliseconds=2))
    monkeypatch.setattr(transfer, "GRACE_SECONDS", 0.01)
    transfer.give_up()
    for is_on_host in (True, False):
        with pytest.raises(RuntimeError, match="timed out after"):
            wait_for(Work([], "never", "never"), is_on_host=is_on_host)
    transfer.expect_ranks()
    asked = []

    def meet() -> None:
        asked.append(1)
        if len(asked) > 20:
            raise PeerError("an alarm")

    with pytest.raises(PeerError):
        wait_for(Work([], "never", "never"), meet)


@pytest.mark.parametrize("how", ["ends", "later", "fails"])
def test_a_devices_work_gets_no_wait_with_a_limit(how):
    """NCCL answers the end of a limit by aborting the group's collectives. Twin: one in host memory
    gets some."""

    class OfDevice(Work):
        limits, questions = (), 0

        def is_completed(self) -> bool:
            self.questions += 1
            return self.how != "later" or self.questions > 3

        def wait(self, limit: timedelta | None = None) -> None:
            self.limits += (limit,)
            super().wait(limit)

    work = OfDevice([], how, how)
    try:
        wait_for(work, is_on_host=False)
        assert how != "fails"
    except RuntimeError as error:
        assert "closed by peer" in str(error) and how == "fails"
    assert work.limits == (None,)
    wait_for(host := OfDevice([], "ends"))
    assert host.limits == (transfer.HEARING_INTERVAL,)


def test_a_work_that_fails_and_never_says_that_it_is_over_ends_the_wait():
    """As works of torch's reduce_scatter on the host do. Twin: one that ends."""
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait_for(failing := Work([], "fails", "fails"))
    assert failing.waits == 1
    wait_for(Work([], "ends"))


def test_what_follows_a_rank_that_left_in_a_backward_ends(tmp_path):
    """The backward, and whatever is called next."""
    jobs: dict[str, dict] = {"left_in_a_backward": {}}
    found, ends = launch_without(
        tmp_path, 2, jobs, script="parting_jobs.py", environment={"RANK_TIMEOUT": "15"}
    )
    assert found["left_in_a_backward"][0] == ["PeerError", "done", "PeerError", "done"], ends[0][1][
        -3000:
    ]


def test_a_change_is_written_down_as_soon_as_ranks_are_known_to_agree():
    """Ctrl-C behind the meeting: the change stands in the journal. Twin: before it, nothing
    does."""
    for agrees in (True, False):
        journal, made = Journal(), []

        def meet(then: Callable[[], None], agrees: bool = agrees) -> None:
            if agrees:
                then()
                then()  # what was done may be done again
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            journal.carry_out(lambda made=made: made.append(1), meet)
        journal.finish()
        assert made == [1] * agrees
