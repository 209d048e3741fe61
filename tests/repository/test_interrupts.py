"""An interrupt that Python ignores keeps nothing alive while a test goes on."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest


class Held:
    """What the caller of an interrupted callback holds."""


def collect_interrupted() -> weakref.ref[Held]:
    """Returns what a frame held while an interrupt landed in a callback of the garbage
    collector."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    held = Held()
    gc.callbacks.append(interrupt)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(interrupt)
    return weakref.ref(held)


def test_an_ignored_interrupt_goes_at_once():
    assert collect_interrupted()() is None


def test_a_hook_that_keeps_it_keeps_what_the_callers_held(monkeypatch: pytest.MonkeyPatch):
    """The twin: what pytest's own hook does."""
    kept: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: kept.append(ignored.exc_value))
    held = collect_interrupted()
    assert held() is not None
    kept.clear()
    assert held() is None
