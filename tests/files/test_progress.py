"""Progress bars: on a terminal only, of the first rank only, and without a thread."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from infinity import progress as progress_module
from infinity.progress import progress

pytest.importorskip("tqdm")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "rank", "shown"),
    [(Terminal, "0", True), (io.StringIO, "0", False), (Terminal, "1", False)],
)
def test_a_bar_is_on_a_terminal_of_the_first_rank_only(stream, rank, shown, monkeypatch):
    """Method: what is written to a stream that is a terminal, one that is none, and another
    rank's."""
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(progress_module, "DELAY_SECONDS", 0.0)
    monkeypatch.setenv("RANK", rank)
    threads = threading.active_count()
    with progress("reading", 1024) as advance:
        advance(512)
        advance(512)
        assert threading.active_count() == threads
    assert ("reading" in sys.stderr.getvalue()) == shown


def test_what_is_quick_shows_none(monkeypatch):
    """The twin: the bar waits for a second."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("reading", 1024) as advance:
        advance(1024)
    assert "reading" not in sys.stderr.getvalue()
