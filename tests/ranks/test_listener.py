"""Listener: other ranks get an answer while the training thread waits for its device."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.errors import PeerError, UsageError
from infinity.ranks import channel as channels
from infinity.ranks import listener
from infinity.ranks.channel import Channel
from infinity.ranks.collective_trace import Collective
from infinity.ranks.listener import Listener


class Met:
    """A channel whose collectives run until the test ends them."""

    def __init__(self, error: Exception | None):
        self.error = error
        self.announced: list[str] = []
        self.is_asked = threading.Event()

    def meet_others(self, announcement: str) -> Exception | None:
        self.announced.append(announcement)
        if len(self.announced) > 3:
            self.is_asked.set()
        return self.error


@pytest.fixture
def listening(monkeypatch):
    """Makes a listener that looks often. What would end the process is noted."""
    ends: list[Exception] = []
    monkeypatch.setattr(listener, "INTERVAL_SECONDS", 0.005)
    monkeypatch.setattr(listener, "LONGEST_SECONDS", 0.01)
    monkeypatch.setattr(listener, "_end_process", ends.append)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    made: list[Listener] = []

    def make(met: Any) -> list[Exception]:
        made.append(Listener(met.meet_others, torch.device("cpu"), lambda: "waiting"))
        return ends

    yield make
    for each in made:
        each.close()
        each._thread.join(10)
        assert not each._thread.is_alive()


def test_a_listener_announces_and_ends_with_its_channel(listening):
    met = Met(None)
    listening(met)
    assert met.is_asked.wait(10) and set(met.announced) == {"waiting"}
    thread = next(each for each in threading.enumerate() if each.name == "infinity listener")
    kept = weakref.ref(met)
    del met
    thread.join(10)
    assert kept() is None and not thread.is_alive()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_process_ends_if_its_device_waits_for_ranks_that_are_gone(is_lost, listening):
    """Nothing else ends the collective. Twin: the ranks are there."""
    error = PeerError("gone") if is_lost else None
    ends = listening(met := Met(error))
    assert met.is_asked.wait(10)
    for _ in range(1000 * is_lost):
        if ends:
            break
        threading.Event().wait(0.01)
    assert ends[:1] == [error] * is_lost


class Running:
    def is_completed(self) -> bool:
        return False


@pytest.fixture
def channel(monkeypatch) -> Channel:
    """A channel without ranks, behind a collective of a device, that others have called."""
    made = Channel.__new__(Channel)
    made.__dict__.update(
        lock=threading.RLock(),
        collective_trace=channels.CollectiveTrace(),
        ranks=[0, 1],
        has_lost=False,
        _ended=False,
        _heard=None,
        _sync_point=None,
        _listener=object(),
    )
    made.collective_trace.start(Collective("a gather", 8), Running, lambda: 0)
    monkeypatch.setattr(Channel, "sees_alarm", lambda self: True)
    monkeypatch.setattr(channels, "give_up", lambda: None)
    return made


def meets(channel: Channel, monkeypatch, error: Exception) -> list[str]:
    said: list[str] = []

    def barrier(self: Channel, what: str, *, settling: bool = False) -> None:
        said.append(what)
        raise error

    monkeypatch.setattr(Channel, "barrier", barrier)
    return said


def test_the_training_thread_raises_what_its_listener_has_met_with_once(channel, monkeypatch):
    """Before anything else is started. Twin: an exception of its own is raised in its place."""
    said = meets(channel, monkeypatch, UsageError("apart"))
    assert channel.meet_others("waiting") is None  # the others are there
    assert isinstance(channel._heard, UsageError) and said == ["waiting"]
    channel.meet_others("waiting")
    assert said == ["waiting"]  # until it is raised, nobody meets again
    with pytest.raises(UsageError, match="apart"):
        channel.start_sync("a forward")
    channel.raise_heard()
    channel.meet_others("waiting")
    channel.finish_sync = lambda: None
    channel.strike()
    channel.raise_heard()


@pytest.mark.parametrize("why", ["the training thread is here", "nothing runs", "no alarm"])
def test_a_listener_does_not_meet_where_nobody_waits(why, channel, monkeypatch):
    """Twin: above."""
    said = meets(channel, monkeypatch, UsageError("apart"))
    if why == "nothing runs":
        channel.collective_trace.close()
    if why == "no alarm":
        monkeypatch.setattr(Channel, "sees_alarm", lambda self: False)
    if why == "the training thread is here":
        channel.lock.acquire()
    thread = threading.Thread(target=channel.meet_others, args=("waiting",))
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and said == [] and channel._heard is None


def test_a_rank_that_has_ended_is_told(channel, monkeypatch):
    """Its process is gone, and no alarm comes. Twin: without a device its transport tells it."""
    monkeypatch.setattr(Channel, "sees_alarm", lambda self: False)
    monkeypatch.setattr(channels.failure_report, "ended", lambda ranks: ranks == [0, 1])
    monkeypatch.setattr(channels, "ranks_lost", lambda what, error: PeerError(f"{what}: {error}"))
    channel._listener = None
    assert channel.meet_others("waiting") is None
    channel._listener = object()
    error = channel.meet_others("waiting")
    assert isinstance(error, PeerError) and "has ended" in str(error) and channel.has_lost
    assert channel.meet_others("waiting") is error
    with pytest.raises(PeerError):
        channel.raise_heard()
    assert channel.meet_others("waiting") is None  # the training thread knows it


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_rank_reports_no_second_failure_before_the_first_is_heard(channel, monkeypatch, is_heard):
    """It would wait for the others, and ends at once. Twin: it does once they have come."""
    said: list[BaseException] = []
    monkeypatch.setattr(Channel, "_begin_failure_report", lambda self, error: said.append(error))
    channel._sync_point = SimpleNamespace(
        is_failure_report=True, is_begun=True, is_over=False, poll=lambda: is_heard, wait=int
    )
    channel.report(error := UsageError("mine"))
    assert said == [error] * is_heard and not channel.has_ended
    channel.report(error, ends=True)
    assert said == [error] * (2 * is_heard) and channel.has_ended
    channel.report(error)
    assert len(said) == 2 * is_heard
