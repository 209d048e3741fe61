"""GradHomes: the bytes of gradients at home, wherever that is."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from inside import parts_of
from small import RAMP, Elsewhere, small_at_home

from infinity import native
from infinity.core.machine import accelerator

SECONDS = 5  # that a closed gate lasts at most: a fault fails, and hangs nothing
HOMES = ("device", "host", "nvme")
every_home = pytest.mark.parametrize("home", HOMES)
ROWS = [RAMP.tolist()] * 2  # the gradient of a weight whose input is the ramp


@every_home
def test_a_view_is_the_gradient_at_home(home, tmp_path):
    """What is written to it is the gradient from then on. Twin: the other parameter's stays."""
    job = small_at_home(home, tmp_path)
    first, second, *_ = job.handles
    job.backward(RAMP, RAMP)
    homes = parts_of(job).gradients.homes
    view = homes.view(first, write=True)
    assert view.shape == (2, 4) and view.tolist() == ROWS
    view[1] = 7.0
    homes.settle()
    assert homes.view(first, write=False).tolist() == [RAMP.tolist(), [7.0] * 4]
    assert first.param.grad.tolist() == [RAMP.tolist(), [7.0] * 4]
    assert second.param.grad.tolist() == ROWS


def test_what_is_written_to_a_disks_gradient_without_saying_so_is_lost(tmp_path):
    """Twin of the view that is to be written."""
    job = small_at_home("nvme", tmp_path)
    job.backward(RAMP, RAMP)
    homes = parts_of(job).gradients.homes
    homes.settle()
    homes.view(job.handles[0], write=False)[1] = 7.0
    homes.settle()
    assert homes.view(job.handles[0], write=False).tolist() == ROWS


@every_home
def test_flat_elements_and_a_slice_are_in_the_order_of_the_storage(home, tmp_path):
    """Of one rank the shard is the whole gradient. The weight is kept by columns."""

    def by_columns(params):
        params = list(params)
        params[0].data = params[0].data.t().contiguous().t()
        return torch.optim.SGD(params, lr=1.0)

    job = small_at_home(home, tmp_path, by_columns, bias=True)
    weight, bias, *_ = job.handles
    job.backward(RAMP)
    homes = parts_of(job).gradients.homes
    in_order = [1.0, 1, 2, 2, 3, 3, 4, 4]
    assert homes.flat_view(weight, write=False).tolist() == in_order
    assert homes.shard(weight, write=False).tolist() == in_order
    assert homes.shard(bias, write=False).tolist() == [1.0, 1.0]
    homes.shard(bias, write=True).copy_(torch.tensor([5.0, 6.0]))
    assert homes.view(bias, write=False).tolist() == [5.0, 6.0]
    assert homes.view(weight, write=False).tolist() == ROWS


def test_only_a_home_that_the_device_cannot_compute_with_is_remote(tmp_path, monkeypatch):
    for home in HOMES:
        homes = (job := small_at_home(home, tmp_path)).engine.gradients.homes
        assert not homes.is_remote(job.handles[0])
    monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    for home in ("host", "nvme"):
        homes = (job := small_at_home(home, tmp_path)).engine.gradients.homes
        assert homes.is_remote(job.handles[0])


def held_up(monkeypatch):
    """A job from a device elsewhere whose first gradient is on its way, until the gate opens."""
    monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    job, gate = small_at_home("host"), threading.Event()
    job.backward(RAMP, RAMP)
    homes, first = parts_of(job).gradients.homes, job.handles[0]
    homes.view(first, write=False)
    home = homes.shard(first, write=False)

    def send() -> None:
        gate.wait(SECONDS)
        home.fill_(9.0)

    homes.queue.send(first.flat_param, send, home.nbytes, first.name)
    return job, homes, gate


def test_gradients_on_their_way_are_waited_for_unless_told_not_to(monkeypatch):
    job, homes, gate = held_up(monkeypatch)
    first, second, *_ = job.handles
    for take in (homes.view, homes.shard):
        assert take(first, write=False, wait=False).flatten().tolist() == RAMP.tolist() * 2
    assert homes.flat_view(first, write=False).tolist() == RAMP.tolist() * 2
    assert homes.view(second, write=False).tolist() == ROWS
    gate.set()
    assert homes.view(first, write=False).tolist() == [[9.0] * 4] * 2


def test_what_must_end_before_gradients_are_read_is_told(monkeypatch):
    """To the device as events, to the core as tickets. Twins: of the other flat param nothing, and
    nothing once it has arrived."""
    job, homes, gate = held_up(monkeypatch)
    first, second = (handle.flat_param for handle in job.handles[:2])
    homes.queue.wait(second)
    assert homes.queue.of(second) == [] and homes.close_flat_param(second) == []
    (event,) = homes.queue.of(first)
    (ticket,) = homes.close_flat_param(first)
    assert not event.done and not ticket.done
    gate.set()
    ticket.wait()
    assert event.done
    homes.queue.wait(first)
    assert homes.close_flat_param(first) == [] == homes.queue.of(first)


def test_after_an_exception_nothing_is_waited_for(monkeypatch):
    """Twin: what has arrived is still listed until then, for nobody has waited for it."""
    job, homes, gate = held_up(monkeypatch)
    first = job.handles[0].flat_param
    gate.set()
    homes.queue.of(first)[0].wait()
    assert len(homes.queue.of(first)) == 1
    homes.rebuild()
    assert homes.queue.of(first) == []


def test_the_whole_gradient_is_read_after_it_has_landed(monkeypatch):
    """And after the update that may still read it. Method: the gate is opened by the wait."""
    job, homes, gate = held_up(monkeypatch)
    first, wait, waits = job.handles[0].flat_param, homes.queue.wait, []
    monkeypatch.setattr(homes.queue, "wait", lambda flat_param: (gate.set(), wait(flat_param)))
    first.homes.commit(
        first.homes.draft(), SimpleNamespace(wait=lambda: waits.append(gate.is_set()))
    )
    whole = homes.whole(first)
    assert whole[:8].tolist() == [9.0] * 8 and whole.numel() == 4096 and waits == [False]


@pytest.mark.parametrize("close", ["close_flat_param", "settle", "rebuild"])
def test_a_disks_gradients_are_at_home_once_they_are_closed(close, tmp_path):
    """Method: bytes that are written to the slot after that are nobody's."""
    job = small_at_home("nvme", tmp_path)
    job.backward(RAMP, RAMP)
    homes, first = parts_of(job).gradients.homes, job.handles[0]
    view = homes.view(first, write=True)
    view.fill_(3.0)
    closed = getattr(homes, close)(*([first.flat_param] if close == "close_flat_param" else []))
    for ticket in closed or ():
        ticket.wait()
    view.fill_(4.0)
    assert homes.view(first, write=False).tolist() == [[3.0] * 4] * 2
    assert first.param.grad.tolist() == [[3.0] * 4] * 2


def test_only_the_shards_that_are_named_are_closed(tmp_path, monkeypatch):
    """Method: what the store is told to write. Twin: the one that is open is named, too."""
    job = small_at_home("nvme", tmp_path)
    homes, store, written = parts_of(job).gradients.homes, parts_of(job).store, []
    job.backward(RAMP, RAMP)
    homes.settle()
    first, second = (handle.flat_param for handle in job.handles[:2])
    homes.view(job.handles[0], write=True)
    start = store.start_write
    monkeypatch.setattr(
        store,
        "start_write",
        lambda array, *args, at: (written.append(array), start(array, *args, at=at))[1],
    )
    homes.close_all([second])
    assert written == []
    homes.close_all([first, second])
    assert written == [first.arrays["grad"]]


def test_a_disks_gradients_are_opened_in_the_staging_that_was_given_last(tmp_path):
    """Method: the address of what is read. Twin: before, they are elsewhere."""
    job = small_at_home("nvme", tmp_path)
    job.backward(RAMP, RAMP)
    homes, region = parts_of(job).gradients.homes, native.Region(1 << 20)
    inside = []
    for _ in range(2):
        homes.settle()
        view = homes.view(job.handles[0], write=False)
        assert view.tolist() == ROWS
        inside.append(0 <= view.data_ptr() - region.address < region.nbytes)
        homes.settle()
        homes.stage_in(native.PinnedPool(region))
    assert inside == [False, True]
