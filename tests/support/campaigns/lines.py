"""Lines at which a trace function may raise, as the handler of a signal may."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType


@functools.cache
def _within_calls(code: CodeType) -> frozenset[int]:
    """Returns the offsets behind KW_NAMES, up to its call.

    CPython 3.11 keeps the names of a call's keywords aside there. An exception would leave them to
    the next call, which then reads wrong memory. The handler of a signal never runs there.
    """
    found, is_within = set(), False
    for each in dis.get_instructions(code):
        if is_within:
            found.add(each.offset)
        if each.opname == "KW_NAMES":
            is_within = True
        elif each.opname.startswith("CALL"):
            is_within = False
    return frozenset(found)


def is_line(frame: FrameType, event: str) -> bool:
    """Tells whether ``event`` is a line at which an exception leaves the interpreter whole."""
    return event == "line" and frame.f_lasti not in _within_calls(frame.f_code)
