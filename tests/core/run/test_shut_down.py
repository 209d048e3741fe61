"""Shut-down: all of an engine is freed, in an order in which nothing is used after its end."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from infinity.core.run import shut_down as module
from infinity.core.run.shut_down import shut_down
from infinity.errors import UsageError


class Parts:
    """The parts of an engine, each of which notes what is asked of it."""

    def __init__(self):
        self.asked: list[str] = []
        self.pid, self.is_own_thread, self.updaters = os.getpid(), False, []
        self.closed = [lambda: self.note("listener")]
        self.fails = ""

    def note(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails:
            self.fails = ""
            raise KeyboardInterrupt

    def noting(self, name: str, *methods: str, **more: object) -> SimpleNamespace:
        calls = {each: lambda each=each: self.note(f"{name}.{each}") for each in methods}
        return SimpleNamespace(**calls, **more)

    def run(self) -> None:
        if not hasattr(self, "arguments"):
            self.arguments = (
                None,
                self.noting("store", "close", pid=self.pid, traffic=None),
                [self.noting(name, "settle", "clear") for name in ("first", "second")],
                self.updaters,
                [],
                self.noting("collectives", "close"),
                self.noting("device", "close", is_own_thread=self.is_own_thread),
                self.closed,
            )
        shut_down(*self.arguments)


ALL = [
    "others",
    "first.settle",
    "second.settle",
    "device.close",
    "store.close",
    "collectives.close",
    "listener",
    "first.clear",
    "second.clear",
]


@pytest.fixture
def parts(monkeypatch) -> Parts:
    """Of an engine with one updater; what is drawn of it is noted."""
    found = Parts()
    monkeypatch.setattr(module, "wait_for_others", lambda scopes: found.note("others"))
    monkeypatch.setattr(
        module, "draw_updates", lambda updater, traffic, names: found.note(f"draw {updater}")
    )
    return found


def test_transfers_end_before_the_store_and_the_store_before_the_rest(parts):
    """Claim: contents are cleared last, when nothing writes to their memory."""
    parts.run()
    assert parts.asked == ALL


def test_updates_are_drawn_once_the_device_is_done_and_before_their_store_closes(parts):
    parts.updaters += ["a", "b"]
    parts.run()
    at = ALL.index("store.close")
    assert parts.asked == [*ALL[:at], "draw a", "draw b", *ALL[at:]]
    assert parts.updaters == []


@pytest.mark.parametrize("where", ALL[:-1])
def test_after_an_interrupt_the_rest_is_done_by_another_call(parts, where):
    parts.fails = where
    with pytest.raises(KeyboardInterrupt):
        parts.run()
    assert parts.asked == ALL[: ALL.index(where) + 1]
    parts.asked.clear()
    parts.run()
    assert parts.asked == ALL


def test_a_forked_child_leaves_all_to_its_parent(parts):
    parts.pid = os.getpid() + 1
    parts.run()
    assert parts.asked == []


def test_the_devices_own_thread_does_not_wait_for_itself(parts):
    """Method: asked by that thread, another one does all of it. Twin: else the caller does."""
    threads: list[int] = []
    done = threading.Event()
    note = parts.note

    def noting(what: str) -> None:
        threads.append(threading.get_ident())
        note(what)
        if what == ALL[-1]:
            done.set()

    parts.note = noting
    parts.run()
    assert set(threads) == {threading.get_ident()} and parts.asked == ALL
    threads.clear(), parts.asked.clear(), done.clear()
    device = parts.arguments[-2]
    main = threading.get_ident()
    parts.arguments = (*parts.arguments[:-2], OwnThread(device, main), parts.closed)
    parts.run()
    assert done.wait(60)
    assert parts.asked == ALL and main not in threads


class OwnThread:
    """A device whose own thread is the one with this number."""

    def __init__(self, device: SimpleNamespace, thread: int):
        self.close, self._thread = device.close, thread

    @property
    def is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread


def test_a_use_that_goes_on_for_ever_is_not_waited_for(parts, monkeypatch):
    """Twin: any other exception of the wait is raised, and nothing is freed."""

    def refuse(error: BaseException):
        def wait(scopes: object) -> None:
            raise error

        return wait

    monkeypatch.setattr(module, "wait_for_others", refuse(UsageError("no progress")))
    parts.run()
    assert parts.asked == ALL[1:]
    parts.asked.clear()
    monkeypatch.setattr(module, "wait_for_others", refuse(ValueError("other")))
    with pytest.raises(ValueError, match="other"):
        parts.run()
    assert parts.asked == []


def test_without_listeners_none_is_called(parts):
    parts.closed = []
    parts.run()
    assert parts.asked == [each for each in ALL if each != "listener"]
