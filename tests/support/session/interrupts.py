"""Interrupts that tests raise, where Python ignores them."""

from __future__ import annotations

import sys


def forget_ignored_interrupts() -> None:
    """Has an interrupt that lands where Python ignores exceptions, such as in a callback of the
    garbage collector, go at once.

    Pytest's hook keeps it until its test ends, and with it what the frames of all callers hold,
    engines with their files too.
    """
    report = sys.unraisablehook

    def report_all_else(ignored: sys.UnraisableHookArgs) -> None:
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            report(ignored)

    sys.unraisablehook = report_all_else
