"""Loads that are struck while they write to disk: the next one makes the state whole, wherever the
strike came.

Words used here: **struck**: a Ctrl-C at one line; **the job** as in `checkpoint_cases.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from checkpoint_cases import SEED, Job, check_like, saved, uninterrupted  # noqa: F401
from lines import is_line
from models import at_home, differing, with_least
from native_arrays import ENGINES, MIB
from runs import adamw
from torch import nn

import infinity
from infinity.core.homes.store import ArrayStore
from infinity.core.homes.write_behind import WriteBehind, writing_behind
from infinity.core.homes.zero_copy_writes import ZeroCopyWrites

Line = tuple[str, int]


@contextmanager
def struck_at(found: set[Line]) -> Iterator[list[Line]]:
    """Raises KeyboardInterrupt in the block at the first line of a writer behind, and of what makes
    and ends it, that is not ``found`` yet. Yields a list that gets where."""
    watched: set[CodeType] = {
        writing_behind.__wrapped__.__code__,
        ArrayStore.lending_service.__wrapped__.__code__,
        *(
            getattr(WriteBehind, name).__code__
            for name in (
                "__init__",
                "write",
                "_gather",
                "_lend",
                "_part_for",
                "_submit",
                "flush",
                "close",
                "_let_go",
            )
        ),
        *(getattr(ZeroCopyWrites, name).__code__ for name in ("write", "finish", "_finish_first")),
    }
    struck: list[Line] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code not in watched:
            return None
        line = (frame.f_code.co_qualname, frame.f_lineno)
        if is_line(frame, event) and not struck and line not in found:
            struck.append(line)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield struck
    finally:
        sys.settrace(before)


class Wide:
    """A job whose values are whole blocks, which a load writes from where the system keeps the
    files."""

    def __init__(self, folder: Path, seed: int):
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
        optimizer = adamw(model, 1e-2)
        config = with_least(model, optimizer, at_home("nvme", "nvme", folder))
        config["host_memory"] += 8 * MIB  # for a service buffer of several blocks
        self.model, self.optimizer = infinity.wrap_model(model, optimizer, config)
        self.step()

    def step(self) -> None:
        self.model(torch.ones(1, 512)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def load(self, path: Path) -> None:
        infinity.load_checkpoint(path, self.model, self.optimizer)

    def state(self) -> dict[str, torch.Tensor]:
        entries = self.optimizer.state_dict()["state"].items()
        moments = {
            f"{index} {name}": torch.as_tensor(value)
            for index, entry in entries
            for name, value in entry.items()
        }
        return dict(self.model.state_dict()) | moments


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
def test_wherever_a_load_that_lends_is_struck_the_next_one_is_whole(kind, tmp_path, monkeypatch):
    """Method: as above, of values that are whole blocks; then each byte is the saved one, and so
    are those of a step."""
    monkeypatch.setenv("INFINITY_IO", kind)
    first = Wide(tmp_path, 1)
    infinity.save_checkpoint(tmp_path / "saved", first.model, first.optimizer)
    job, saved_state, found = Wide(tmp_path, 2), first.state(), set[Line]()
    while True:
        with struck_at(found) as struck:
            try:
                job.load(tmp_path / "saved")
            except KeyboardInterrupt:
                pass
        if not struck:
            break
        found.update(struck)
        job.load(tmp_path / "saved")
        assert differing(job.state(), saved_state) == []
    assert {name for name, _ in found} >= {
        "WriteBehind._lend",
        "ZeroCopyWrites.write",
        "ZeroCopyWrites.finish",
        "ZeroCopyWrites._finish_first",
    }
    first.step()
    job.step()
    assert differing(job.state(), first.state()) == []


@pytest.mark.slow
def test_wherever_a_writer_behind_is_struck_the_next_load_is_whole(saved, uninterrupted, tmp_path):
    """Method: Ctrl-C at every line in turn, of which each leaves a state that is refused, or whole;
    then a load, and steps."""
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
        "writing_behind",
        "ArrayStore.lending_service",
        "WriteBehind.write",
        "WriteBehind.flush",
        "WriteBehind.close",
    }
    check_like(job.run(4), uninterrupted, 2)
    infinity.unwrap_model(job.model, job.optimizer)
