"""Memory that is borrowed: written to disk from where it is, and kept until the disk has read it.

Words used here: **home**, **block**, **slow disk** as in `behind_cases.py`. **twin**: the same
check on something that is wrong.
"""

from __future__ import annotations

import errno
import gc
import itertools
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import doubles
import pytest
import torch
from behind_cases import BLOCK, Home, Noted, SlowDisk, folder, home_in, kind  # noqa: F401
from doubles import fault_plan
from lines import is_line
from models import environment

from infinity import native
from infinity.core.homes import zero_copy_writes
from infinity.core.homes.store import ArrayStore
from infinity.core.homes.write_behind import writing_behind
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.errors import CorruptionError, StorageError

SEED = 77
TYPED = (StorageError, CorruptionError)

pytestmark = pytest.mark.timeout(120)  # a hang is a failure, too


def lent_to(home: Home, count: int) -> tuple[weakref.ref, torch.Tensor]:
    """Writes the first ``count`` bytes of array 4 from memory that nobody else keeps: a reference
    to it, and its bytes."""
    region = native.Region(count, False, 0)
    memory = native.tensor_at(region, region.address, count, torch.uint8)
    memory.random_(256)
    home.plain[4].view(torch.uint8)[:count] = memory
    home.store.lend(home.arrays[4], 0, memory)
    return weakref.ref(memory), memory.clone()


def test_memory_that_is_lent_is_kept_until_the_disk_has_read_it(kind, folder):
    """Method: writes that take their time, from memory that the caller lets go at once. Behind them
    it is gone, and nobody copied a byte."""
    with home_in(folder, faults=fault_plan(delay=1.0, delay_seconds=0.02)) as home:
        kept, _ = lent_to(home, 6 * BLOCK)
        gc.collect()
        assert home.engine.under_way() and len(home.store._zero_copy._zero_copy) == 1
        home.store.finish_borrowed()
        assert not home.engine.under_way() and not home.store._zero_copy._zero_copy
        gc.collect()
        assert kept() is None
        home.check_all()


def test_no_more_is_lent_at_a_time_than_is_allowed(folder, monkeypatch):
    monkeypatch.setattr(zero_copy_writes, "PIECE_NBYTES", BLOCK)
    monkeypatch.setattr(zero_copy_writes, "MOST", 2)
    with home_in(folder) as home:
        home.store.io = disk = SlowDisk(home.engine._engine, 0)
        lent_to(home, 6 * BLOCK)
        assert len(disk.tickets) == 6 and disk.under_way() <= 2
        home.store.finish_borrowed()
        home.store.io = disk._engine
        home.check_all()


@pytest.mark.parametrize(
    "fault, name", [("eio", "StorageError"), ("lost_write", "CorruptionError")]
)
def test_what_is_lent_to_a_disk_that_fails_is_a_typed_error(fault, name, kind, folder, monkeypatch):
    """Method: half of the writes are refused, or lost, and the others are late. Nothing is borrowed
    any more behind the error, and nothing under way."""
    monkeypatch.setattr(zero_copy_writes, "PIECE_NBYTES", BLOCK)
    with home_in(
        folder, faults=fault_plan(3, delay=1.0, delay_seconds=0.02, **{fault: 0.5})
    ) as home:
        with pytest.raises(TYPED) as raised:
            with writing_behind(home.store) as writer:
                home.write(writer, 4, 0, home.arrays[4].numel, 1, borrowed=True)
            assert fault == "lost_write"
            home.check_all()
        assert type(raised.value).__name__ == name
        assert home.engine.under_way() == 0 and not home.store._zero_copy._zero_copy


def test_memory_that_a_hung_disk_may_still_read_is_never_freed(tmp_path, monkeypatch):
    """Method: writes that never end. Behind the error, and the end of the store, the memory is
    there, and a file may be dropped."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(zero_copy_writes, "never_freed", kept)
    with environment(INFINITY_IO_TIMEOUT="0.5"):
        store = ArrayStore(
            [str(tmp_path)],
            Ledger(),
            Traffic(),
            service_nbytes=5 * BLOCK,
            layer=doubles.layer(fault_plan(hang=1.0)),
        )
    array = store.allocator.allocate(Tier.NVME, torch.uint8, 4 * BLOCK, "array")
    store.open([])
    region = native.Region(4 * BLOCK, False, 0)
    memory = native.tensor_at(region, region.address, 4 * BLOCK, torch.uint8)
    store.lend(array, 0, memory[: 2 * BLOCK])
    with pytest.raises(StorageError) as raised:
        store.finish_borrowed()
    assert raised.value.errno == errno.ETIMEDOUT and [each.data_ptr() for each in kept] == [
        memory.data_ptr()
    ]
    store._zero_copy._hidden.append(
        SimpleNamespace(memory=memory[2 * BLOCK :])
    )  # one that an exception hid
    engine = store.io
    store.close()
    engine.drop_file(0)  # behind an end that gave the disk up: nothing
    assert [each.data_ptr() for each in kept] == [memory.data_ptr(), memory[2 * BLOCK :].data_ptr()]


class Refusing(Noted):
    """An engine that cannot read the memory of its first write. Ctrl-C comes as write number
    ``interrupted`` has been submitted."""

    def __init__(self, engine: native.IoEngine, interrupted: int | None = None):
        super().__init__(engine)
        self.interrupted = interrupted

    def write(
        self, extent: native.Extent, offset: int, address: int, nbytes: int, **more: Any
    ) -> Any:
        if self.tickets:
            super().write(extent, offset, address, nbytes, **more)
        else:
            self.tickets.append(SimpleNamespace(done=True, wait=self.refuse))
        if len(self.tickets) - 1 == self.interrupted:
            raise KeyboardInterrupt
        return self.tickets[-1]

    @staticmethod
    def refuse() -> None:
        raise StorageError(errno.EFAULT, "write", "a disk")


@pytest.mark.parametrize("wrong", [False, True])
def test_memory_that_the_disk_cannot_read_is_copied(wrong, folder, monkeypatch):
    """Method: a disk that refuses what lies in the memory that was borrowed with EFAULT. The twin:
    where the error counts as any other it is raised."""
    if wrong:
        monkeypatch.setattr(
            zero_copy_writes, "errno", SimpleNamespace(EFAULT=None, ETIMEDOUT=errno.ETIMEDOUT)
        )

    with home_in(folder) as home:
        home.store.io = Refusing(home.engine._engine)
        lent_to(home, 6 * BLOCK)
        if wrong:
            with pytest.raises(StorageError):
                home.store.finish_borrowed()
        else:
            home.store.finish_borrowed()
            home.check_all()
        home.store.io = home.store.io._engine


@pytest.mark.parametrize("interrupted", [1, 2, 3])
def test_a_transfer_that_ctrl_c_hid_keeps_its_memory_until_it_is_over(
    interrupted, kind, folder, monkeypatch
):
    """Method: the disk is slow, and Ctrl-C comes when a write has been submitted and nobody has its
    ticket; one of them is of a copy."""
    monkeypatch.setattr(zero_copy_writes, "PIECE_NBYTES", BLOCK)
    with home_in(folder, faults=fault_plan(delay=1.0, delay_seconds=0.05)) as home:
        home.store.io = disk = Refusing(home.engine._engine, interrupted)
        with pytest.raises(KeyboardInterrupt):
            lent_to(home, 3 * BLOCK)
            home.store.finish_borrowed()
        kept = [*home.store._zero_copy._zero_copy, *home.store._zero_copy._hidden]
        assert any(loan.ticket is None for loan in kept) and disk.under_way() <= len(kept)
        home.store.rebuild()
        assert (
            disk.under_way() == 0
            and not home.store._zero_copy._zero_copy
            and not home.store._zero_copy._hidden
        )
        home.store.io = disk._engine
        home.write_all_anew()
        home.check_all()


@pytest.mark.parametrize("line", range(12))
def test_ctrl_c_while_memory_is_lent_leaves_nothing_under_way_that_nobody_keeps(line, folder):
    """Method: Ctrl-C at the n-th line of what lends it, on a slow disk; all that was begun is over
    when the store is put right, or kept."""
    with home_in(folder, faults=fault_plan(delay=1.0, delay_seconds=0.02)) as home:
        counted = itertools.count()

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != zero_copy_writes.__file__:
                return None
            if is_line(frame, event) and next(counted) == line:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            lent_to(home, 3 * BLOCK)
            home.store.finish_borrowed()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert (
            len(home.store._zero_copy._zero_copy) + len(home.store._zero_copy._hidden)
            >= home.engine.under_way()
        )
        home.store.rebuild()
        assert not home.store._zero_copy._zero_copy and not home.engine.under_way()
        home.write_all_anew()
        home.check_all()
