"""NeverEvict: after the first epoch, exactly the items that were not kept are read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader

import infinity
from infinity.data import NeverEvict
from infinity.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "support" / "jobs" / "kept_items.py"


class Reader:
    """Reads numbered items of 100 bytes, and counts."""

    def __init__(self):
        self.reads = []

    def __call__(self, number: int) -> bytes:
        self.reads.append(number)
        return bytes([number]) * 100


def decoded(data) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_coordl_misses_what_is_not_kept_in_each_later_epoch(share):
    """Claim: for any order. The twin: a cache that replaces the oldest item misses more."""
    picks, reader = random.Random(3), Reader()
    data = NeverEvict(range(40), read=reader, memory=max(1, int(40 * 100 * share)))
    for epoch in range(5):
        before = len(reader.reads)
        order = picks.sample(range(40), 40)
        assert [data[item] for item in order] == [bytes([item]) * 100 for item in order]
        expected = 40 if epoch == 0 else 40 - data.kept
        assert len(reader.reads) - before == expected
    assert data.kept == int(40 * share)
    oldest, missed = [], 0
    for item in [item for _ in range(5) for item in picks.sample(range(40), 40)]:
        missed += item not in oldest
        oldest = [each for each in oldest if each != item][-max(0, int(40 * share) - 1) :] + [item]
    assert share in (0.0, 1.0) or missed > len(reader.reads)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_share_what_is_kept(workers, tmp_path):
    for number in range(16):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * 64)
    files = [tmp_path / f"{number}.bin" for number in range(16)]
    data = NeverEvict(files, prepare=decoded, memory=8 * 64)
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    misses = []
    for _ in range(3):
        before = data.misses
        rows = torch.cat(list(loader))
        misses.append(data.misses - before)
        assert sorted(rows[:, 0].tolist()) == list(range(16))
    assert data.kept == 8 and misses == [16, 8, 8] and data.used_nbytes == 8 * 64


def test_what_cannot_be_read_is_not_kept():
    fails = [True]

    def read(number: int) -> bytes:
        if fails[0]:
            raise OSError("the disk")
        return b"now"

    data = NeverEvict([0, 1], read=read, memory=100)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk"):
            data[0]
    fails[0] = False
    assert data[0] == b"now" and data[-1] == b"now" and data.kept == 2
    with pytest.raises(IndexError):
        data[2]


BAD = {
    "no files": (lambda: NeverEvict([], memory=100), "at least one"),
    "one file": (lambda: NeverEvict("a.bin", memory=100), "at least one"),
    "no memory": (lambda: NeverEvict(["a"], memory=0), "memory=0"),
    "a word": (lambda: NeverEvict(["a"], memory="much"), "memory='much' is not a size"),
    "no function": (lambda: NeverEvict(["a"], read="cat", memory=100), "read='cat'"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_options_are_refused(what):
    make, said = BAD[what]
    with pytest.raises(ConfigError, match=said):
        make()


def test_the_ranks_of_a_machine_share_it(tmp_path):
    """Claim: each item is read once by one of two ranks, and its bytes are charged by halves."""
    done = run_ranks(2, [str(SCRIPT), str(tmp_path)], seconds=120)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads((tmp_path / f"told.{rank}.json").read_text()) for rank in range(2)]
    assert all(each == {"kept": 32, "right": True, "charged": 1600} for each in told)
    reads = sum(
        (json.loads((tmp_path / f"reads.{rank}.json").read_text()) for rank in range(2)), []
    )
    assert sorted(reads) == list(range(32))
    assert infinity.data.NeverEvict is NeverEvict
