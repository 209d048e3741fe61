"""Processors: how many threads a rank starts, of what its machine, its neighbours and its launcher
leave it."""

from __future__ import annotations

import logging

import pytest

from infinity.core.machine import processors


@pytest.fixture
def machine(monkeypatch):
    """Sets where this rank and the others on its machine may run; alone again afterwards."""

    def set_up(mine: set[int], *others: set[int], quota: int | None = None) -> None:
        monkeypatch.setattr(processors, "allowed", lambda: mine)
        monkeypatch.setattr(processors, "available", lambda: min(len(mine), quota or len(mine)))
        processors.share_with(others)

    for name in ("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield set_up
    processors.share_with([])


ALL, LEFT, RIGHT = set(range(112)), set(range(56)), set(range(56, 112))


@pytest.mark.parametrize(
    ("mine", "others", "part"),
    [
        (ALL, [], 112),
        (ALL, [ALL] * 7, 14),
        (LEFT, [LEFT] * 3 + [RIGHT] * 4, 14),
        ({0, 1}, [{2, 3}, {4, 5}], 2),
        (LEFT, [ALL], 28),
        ({0}, [{0}] * 7, 1),
    ],
)
def test_ranks_share_the_processors_that_several_may_run_on(machine, mine, others, part):
    """One rank, eight on all, eight on two sockets, each on its own, and more ranks than
    processors."""
    machine(mine, *others)
    assert processors.own_part() == part


def test_ranks_share_a_quota(machine):
    machine(ALL, *[ALL] * 3, quota=16)
    assert (
        processors.own_part() == 4
        and processors.for_pages() == 4
        and processors.for_checksums() == 4
    )


def test_torchruns_one_thread_is_not_for_updates_and_a_line_says_so(machine, monkeypatch, caplog):
    """The twins: one thread that somebody else asked for stays one, and nothing is said of it; nor
    where the part is one."""
    machine(ALL, *[ALL] * 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert processors.for_updates(1) == 1 and not caplog.records
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with caplog.at_level(logging.WARNING):
        assert processors.for_updates(1) == 14
        assert [record.args for record in caplog.records] == [
            (14,)
        ] and "OMP_NUM_THREADS=1" in caplog.text
        monkeypatch.setenv("RANK", "3")
        assert processors.for_updates(1) == 14 and len(caplog.records) == 1
        monkeypatch.setenv("RANK", "0")
        machine({0, 1}, {0, 1})
        assert processors.for_updates(1) == 1 and len(caplog.records) == 1


def test_threads_that_torch_was_told_are_kept(machine, monkeypatch):
    machine(ALL, *[ALL] * 7)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert processors.for_updates(4) == 4 and processors.for_updates(64) == 14
