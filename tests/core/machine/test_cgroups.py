"""Control groups: a file of the kernel is read whole, and left closed."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from infinity.core.machine import cgroups


def read_until(file: Any, point: int) -> str | None:
    """Reads, interrupted at line number ``point`` of the reading; None: it was interrupted."""
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code is not cgroups.read.__code__:
            return None
        lines += event == "line"
        if lines == point and event == "line":
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        return cgroups.read(file)
    except KeyboardInterrupt:
        return None
    finally:
        sys.settrace(None)


def test_an_interrupt_at_any_line_leaves_no_descriptor(tmp_path):
    """Twin: without one the text is read, more than one read gives."""
    file = tmp_path / "cpu.max"
    file.write_text("150000 100000\n" * 9000)
    before = os.listdir("/proc/self/fd")
    found = [read_until(file, point) for point in range(1, 9)]
    assert found[0] is None and found[-1] == file.read_text()
    assert os.listdir("/proc/self/fd") == before


def test_a_number_is_read_and_what_is_none_is_told(tmp_path):
    """Twins: "max", v1's number for it, and no file."""
    file = tmp_path / "memory.max"
    for text, number in (("4096\n", 4096), ("max\n", None), (f"{1 << 63}\n", None)):
        file.write_text(text)
        assert cgroups.number(file) == number
    assert cgroups.number(tmp_path / "none") is None
    with pytest.raises(OSError):
        cgroups.read(tmp_path / "none")
