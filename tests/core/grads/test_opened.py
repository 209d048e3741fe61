"""OpenedGrads: gradients whose home is a disk, in slots of a staging pool."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from small import RAMP, small_at_home

from infinity import native
from infinity.core.grads.opened import OpenedGrads

NBYTES = 4 * 4096  # of one flat param


class Desk:
    """A pool with room for so many flat params, and what is done between it and the disk."""

    def __init__(self, folder, monkeypatch, slots: int = 2):
        self.job = small_at_home("nvme", folder)
        self.store, self.done = parts_of(self.job).store, []
        self.flat_params = [handle.flat_param for handle in self.job.handles]
        self.region = native.Region(slots * NBYTES)
        self.memory().fill_(8.0)
        self.pool = native.PinnedPool(self.region)
        self.opened = OpenedGrads(
            self.store, self.pool, lambda flat_param: self.note("wait", flat_param)
        )
        self.job.backward(RAMP, 2 * RAMP)
        self.job.engine.gradients.homes.settle()
        arrays = {flat.arrays["grad"]: flat for flat in self.flat_params}
        for name in ("read", "write"):
            start = getattr(self.store, f"start_{name}")

            def started(array, *args, name=name, start=start, **more):
                self.note(name, arrays[array])
                return start(array, *args, **more)

            monkeypatch.setattr(self.store, f"start_{name}", started)

    def note(self, what: str, flat_param) -> None:
        self.done.append((what, self.flat_params.index(flat_param)))

    def memory(self) -> torch.Tensor:
        numel = self.region.nbytes // 4
        return native.tensor_at(self.region, self.region.address, numel, torch.float32)

    def flat(self, index: int, *, write: bool = False) -> torch.Tensor:
        return self.opened.flat(self.flat_params[index], write=write)

    def take_done(self) -> list[tuple[str, int]]:
        done, self.done = self.done, []
        return done


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def test_a_gradient_is_read_once_into_a_slot(desk):
    """Twin: each flat param has its own."""
    flat = desk.flat(0)
    assert flat[:8].tolist() == RAMP.tolist() * 2 and flat.numel() == 4096
    assert desk.flat(0).data_ptr() == flat.data_ptr()
    assert desk.flat(1)[:8].tolist() == (2 * RAMP).tolist() * 2
    assert desk.take_done() == [("read", 0), ("read", 1)]
    assert {desk.flat(index).data_ptr() - desk.region.address for index in (0, 1)} == {0, NBYTES}


def test_a_shard_without_gradients_is_zeros_and_is_not_read(desk):
    """Whatever was in the slot. Twin: the padding of one that is read is its own."""
    assert desk.memory().eq(8).all()
    assert desk.flat(3).eq(0).all() and desk.take_done() == []
    assert desk.flat(1)[8:].eq(0).all()


def test_a_shard_with_one_gradient_is_read(tmp_path):
    """Although another of its parameters has none."""
    job = small_at_home("nvme", tmp_path, bias=True)
    job.backward(RAMP)
    weight, bias, *_ = job.handles
    bias.param.grad = None
    parts_of(job).gradients.homes.settle()
    pool = native.PinnedPool(native.Region(NBYTES))
    opened = OpenedGrads(parts_of(job).store, pool, lambda flat_param: None)
    assert opened.flat(weight.flat_param, write=False)[:8].tolist() == RAMP.tolist() * 2


@pytest.mark.parametrize("writes", [(False, False), (True, False), (False, True)])
def test_only_a_gradient_that_changed_is_written_when_it_is_closed(desk, writes):
    """Once, after what still lands in the slot. Twin: a second close has nothing to do."""
    for write in writes:
        desk.flat(0, write=write)
    desk.take_done()
    for _ in range(2):
        desk.opened.close(desk.flat_params[0])
    assert desk.take_done() == [("wait", 0), ("write", 0)] * any(writes)
    desk.opened.close(desk.flat_params[1])  # which was never opened
    assert desk.take_done() == []


@pytest.mark.parametrize("writes", [True, False])
def test_what_was_changed_is_there_when_it_is_opened_again(desk, writes):
    """Twin: without saying so the change is lost."""
    desk.flat(0, write=writes)[:4] = 5.0
    desk.opened.settle()
    assert desk.flat(0)[:4].tolist() == ([5.0] * 4 if writes else RAMP.tolist())
    assert desk.flat(0)[4:8].tolist() == RAMP.tolist()


def test_the_least_recently_used_makes_room(desk):
    """Twin: what was used since stays where it is."""
    first = desk.flat(0).data_ptr()
    second = desk.flat(1, write=True).data_ptr()
    desk.flat(0)
    desk.take_done()
    assert desk.flat(2).data_ptr() == second
    assert desk.take_done() == [("wait", 1), ("write", 1)]
    assert desk.flat(0).data_ptr() == first and desk.take_done() == []
    assert desk.flat(1)[:8].tolist() == (2 * RAMP).tolist() * 2
    assert desk.take_done() == [("read", 1)]


def test_slots_are_free_once_all_is_settled(desk):
    desk.flat(0, write=True)
    desk.flat(1)
    assert desk.pool.leased_nbytes == 2 * NBYTES
    desk.opened.settle()
    assert desk.pool.leased_nbytes == 0
    assert desk.take_done()[2:] == [("wait", 0), ("write", 0)]
    desk.opened.settle()
    assert desk.take_done() == []


def test_a_closed_shard_gives_its_slot_back_alone(desk):
    desk.flat(0)
    desk.flat(1)
    desk.opened.close(desk.flat_params[0])
    assert desk.pool.leased_nbytes == NBYTES
    desk.take_done()
    desk.flat(1)
    assert desk.take_done() == []


def test_another_pool_is_used_from_the_time_it_is_given(desk):
    other = native.Region(NBYTES)
    desk.flat(0)
    desk.opened.settle()
    desk.opened.stage_in(native.PinnedPool(other))
    assert desk.flat(0).data_ptr() == other.address
    assert desk.flat(0)[:4].tolist() == RAMP.tolist() and desk.pool.leased_nbytes == 0


def test_without_a_pool_there_is_nothing_to_settle(desk):
    OpenedGrads(desk.store, None, lambda flat_param: None).settle()
