"""Launches: the time in which a GPU is ahead of the training thread is told as such."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from infinity.core.machine.traffic import UPDATES, Traffic
from infinity.core.seams import Events
from infinity.ext.card import launches
from infinity.ext.card.launches import Launches, launch_seconds


class Card:
    """Streams of which a list tells whether they are idle at each mark, a second apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, idle: list[bool]):
        self.idle, self.now, self.traffic, self.events = idle, 0.0, Traffic(), Events()
        self.counter = Launches(self, self.traffic, self.events)
        monkeypatch.setattr(launches, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def current(self) -> Card:
        return self

    def query(self) -> bool:
        return self.idle.pop(0)

    def tell(self, *names: str) -> float:
        """Tells the listeners of events, one a second, and returns the seconds counted so far."""
        for name in names:
            self.now += 1
            for listener in getattr(self.events, name):
                listener(None, None)
        return self.counter.seconds


BLOCK = ("forward_begun", "forward_ended")


def test_time_between_two_idle_marks_is_of_launches(monkeypatch):
    """Twins: a card that is busy at one of the two marks, and one that always is."""
    card = Card(monkeypatch, [True, True, False, True, True, True])
    assert card.tell(*BLOCK) == 1
    assert card.tell(*BLOCK) == 1
    assert card.tell("unit_landed", "step_begun") == 3
    assert Card(monkeypatch, [False] * 4).tell(*BLOCK, *BLOCK) == 0


def test_time_between_passes_is_the_users(monkeypatch):
    card = Card(monkeypatch, [True] * 4)
    assert card.tell(*BLOCK) == 1
    assert card.tell("pass_begun", *BLOCK) == 2


def test_what_the_thread_waits_for_is_not_of_launches(monkeypatch):
    """Method: of three seconds between two marks 2.5 are a wait for an update."""
    card = Card(monkeypatch, [True] * 2)
    card.tell("forward_begun")
    card.now += 2
    card.traffic.stood_still(UPDATES, "", 0.0, 2.5)
    assert card.tell("forward_ended") == 0.5


def test_a_job_on_a_processor_has_none():
    """Twin: that of a card has."""
    counter = Launches(SimpleNamespace(), Traffic(), Events())
    counter.seconds = 3.0
    assert launch_seconds(SimpleNamespace(extensions=[object(), counter])) == {"launches": 3.0}
    assert launch_seconds(SimpleNamespace(extensions=[object()])) == {}
    assert Launches.begin(None, object(), None, Events()) is None
