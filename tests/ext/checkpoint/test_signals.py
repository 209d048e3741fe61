"""Signals: every listener hears, and what was there before is back."""

from __future__ import annotations

import signal
import threading

import pytest

from infinity.ext.checkpoint import signals
from infinity.ext.checkpoint.signals import Listener, others_end


@pytest.fixture(autouse=True)
def default_handlers():
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_every_listener_hears_and_forgets():
    one, other = Listener(), Listener()
    signal.raise_signal(signal.SIGUSR1)
    assert one.saves and other.saves and not one.ends
    one.forget(signal.SIGUSR1)
    assert not one.saves and other.saves
    signal.raise_signal(signal.SIGTERM)
    one.forget(signal.SIGTERM)
    assert other.ends and others_end()
    other.close()
    one.close()
    assert not others_end() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_request_goes_to_the_handler_of_before(monkeypatch):
    """The twin: two at once are one."""
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    listener = Listener()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert listener.ends and not heard
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", -1.0)
    signal.raise_signal(signal.SIGTERM)
    assert heard == [1]
    listener.close()


def test_a_handler_that_somebody_set_meanwhile_stays():
    listener = Listener()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    listener.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_another_thread_hears_nothing():
    made = []
    thread = threading.Thread(target=lambda: made.append(Listener()))
    thread.start()
    thread.join()
    assert not made[0].saves and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    made[0].close()
