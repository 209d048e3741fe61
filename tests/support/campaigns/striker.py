"""A striker: raises an exception at one point inside the package."""

from __future__ import annotations

import dis
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lines import is_line

import infinity

PACKAGE = str(Path(infinity.__file__).parent) + os.sep
MARK = "struck by the campaign"


class _Points(dict):
    """Of each code object: offsets after which a signal handler may run."""

    def __missing__(self, code: Any) -> set[int]:
        instructions = list(dis.get_instructions(code))
        table = [(each.start, each.end, each.target) for each in dis._parse_exception_table(code)]

        def handler(offset: int) -> int | None:
            return next((target for begin, end, target in table if begin <= offset < end), None)

        handled = set()
        for number, each in enumerate(instructions):
            following = instructions[number + 1] if number + 1 < len(instructions) else None
            if each.opname.startswith("JUMP_BACKWARD"):
                handled.add(each.offset)
            # It runs inside the call: what comes behind the end of a ``try`` is not struck outside
            # of it.
            if (
                each.opname.startswith("CALL")
                and following is not None
                and handler(each.offset) == handler(following.offset)
            ):
                handled.add(following.offset)
        self[code] = handled
        return self[code]


class Striker:
    """Raises an exception at the n-th point of what :meth:`run` runs in this thread."""

    def __init__(self, kind: type[BaseException], events: str):
        self._kind, self._events, self._points = kind, events, _Points()
        self._left, self._armed, self._thread = 0, False, 0
        self.place = ""

    def run(self, n: int, work: Callable[[], Any]) -> tuple[BaseException | None, Any]:
        """What came out of ``work``, struck at its n-th point: the exception, and the result."""
        self._left, self.place, self._thread, self._armed = n, "", threading.get_ident(), True
        try:
            if self._events != "user":
                sys.settrace(self._trace)
            return None, work()
        except BaseException as error:  # noqa: BLE001 - it is what this is about
            return error, None
        finally:
            sys.settrace(None)
            self._armed = False

    @property
    def counted(self) -> int:
        """Points since the last :meth:`run` began, when none was reached."""
        return -self._left

    def count(self, place: str) -> None:
        """A point is passed."""
        if self._armed:
            self._left -= 1
            if self._left == 0:
                self._armed, self.place = False, place
                raise self._kind(MARK)

    def users(self, place: str) -> None:
        """A piece of the user's own code runs."""
        if self._events == "user":
            self.count(place)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if (
            not self._armed
            or threading.get_ident() != self._thread
            or not frame.f_code.co_filename.startswith(PACKAGE)
        ):
            return None
        if self._events == "signal":
            frame.f_trace_opcodes = True
            self.count(_place(frame))
        return self._inside

    def _inside(self, frame: Any, event: str, _: Any) -> Any:
        if self._events == "line" and is_line(frame, event):
            self.count(_place(frame))
        elif event == "opcode" and frame.f_lasti in self._points[frame.f_code]:
            self.count(_place(frame))
        return self._inside


def _place(frame: Any) -> str:
    return (
        f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
    )
