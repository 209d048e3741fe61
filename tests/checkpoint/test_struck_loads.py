"""Loads that are struck while they write to disk: the next one makes the state whole, wherever the strike came.

Words used here: **struck**: a Ctrl-C at one line; **the job** as in `checkpoint_cases.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from checkpoint_cases import SEED, Job, check_like, saved, uninterrupted  # noqa: F401

import infinity
from infinity.storage.store import ShardStore
from infinity.storage.write_behind import WriteBehind

Line = tuple[str, int]


@contextmanager
def struck_at(found: set[Line]) -> Iterator[list[Line]]:
    """Raises KeyboardInterrupt in the block at the first line of a writer behind, and of what makes and ends it, that is not ``found``
    yet. Yields a list that gets where."""
    watched: set[CodeType] = {
        ShardStore.writing_behind.__wrapped__.__code__,
        *(
            getattr(WriteBehind, name).__code__
            for name in ("__init__", "write", "_part_for", "_submit", "flush", "close", "_let_go")
        ),
    }
    struck: list[Line] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code not in watched:
            return None
        line = (frame.f_code.co_qualname, frame.f_lineno)
        if event == "line" and not struck and line not in found:
            struck.append(line)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield struck
    finally:
        sys.settrace(before)


def test_wherever_a_writer_behind_is_struck_the_next_load_is_whole(saved, uninterrupted, tmp_path):
    """Method: Ctrl-C at every line in turn, of which each leaves a state that is refused, or whole; then a load, and steps."""
    job, found = Job(("nvme", "nvme"), tmp_path, seed=SEED + 1).run(1), set[Line]()
    while True:
        with struck_at(found) as struck:
            try:
                job.load(saved)
            except KeyboardInterrupt:
                pass
        if not struck:
            break
        found.update(struck)
        job.load(saved)
        check_like(job, uninterrupted, 2)
    assert {name for name, _ in found} >= {
        "ShardStore.writing_behind",
        "WriteBehind.write",
        "WriteBehind.flush",
        "WriteBehind.close",
    }
    check_like(job.run(4), uninterrupted, 2)
    infinity.unwrap_model(job.model, job.optimizer)
