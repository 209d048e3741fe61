"""Lines at which a trace function may raise, as the handler of a signal may."""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType, FrameType


@functools.cache
def _unsafe(code: CodeType) -> frozenset[int]:
    """Returns the offsets at which an exception of a trace function breaks CPython, and those at
    which the handler of a signal never runs.

    Where a ``with`` is left without an exception, no handler runs before ``__exit__`` is called.
    Behind KW_NAMES, up to its call, 3.11 keeps the names of keywords aside: they would be left to
    the next call, which then reads wrong memory. At FOR_ITER 3.12 leaves the function without its
    `except` and `finally`.
    """
    found, is_within = set(), False
    instructions = list(dis.get_instructions(code))
    for number, each in enumerate(instructions):
        # The arguments of `__exit__`; a result that is returned out of the block lies beneath them.
        arguments = instructions[number + (each.opname == "SWAP") :][:3]
        if [(one.opname, one.argval) for one in arguments] == [("LOAD_CONST", None)] * 3:
            found.add(each.offset)
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
