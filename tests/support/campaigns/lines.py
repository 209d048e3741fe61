"""Lines at which a trace function may raise, as the handler of a signal may."""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType, FrameType


@functools.cache
def _unsafe(code: CodeType) -> frozenset[int]:
    """Returns the offsets at which an exception of a trace function breaks CPython, and where the
    handler of a signal never runs.

    Behind KW_NAMES, up to its call, 3.11 keeps the names of keywords aside: they would be left to
    the next call, which then reads wrong memory. At FOR_ITER 3.12 leaves the function without its
    `except` and `finally`.
    """
    found, is_within = set(), False
    for each in dis.get_instructions(code):
        if is_within or (each.opname == "FOR_ITER" and sys.version_info >= (3, 12)):
            found.add(each.offset)
        if each.opname == "KW_NAMES":
            is_within = True
        elif each.opname.startswith("CALL"):
            is_within = False
    return frozenset(found)


def is_line(frame: FrameType, event: str) -> bool:
    """Tells whether ``event`` is a line at which an exception leaves the interpreter whole."""
    return event == "line" and frame.f_lasti not in _unsafe(frame.f_code)
