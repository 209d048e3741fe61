"""Lander: sets a gradient at home or adds to it, here or beside the compute."""

from __future__ import annotations

import math

import pytest
import torch
from inside import parts_of
from small import RAMP, AtHome, Elsewhere, small_at_home

from infinity.core.grads.lander import Lander
from infinity.core.machine import accelerator

HERE, BESIDE = "here", "beside"
ODD = torch.linspace(0.1, 0.8, 8).view(2, 4)  # whose products and sums are rounded


def columns(params) -> torch.optim.Optimizer:
    """Keeps the first weight by columns."""
    params = list(params)
    params[0].data = params[0].data.t().contiguous().t()
    return torch.optim.SGD(params, lr=1.0)


@pytest.fixture(params=[HERE, BESIDE])
def job(request, monkeypatch) -> AtHome:
    """On the processor, or from a device whose transfers run beside it. Gradients are in memory."""
    if request.param == BESIDE:
        monkeypatch.setitem(accelerator.KINDS, "cpu", Elsewhere)
    return small_at_home(make=columns)


def lander(job: AtHome) -> Lander:
    bank = parts_of(job).gradients
    return Lander(bank.homes, parts_of(job).store, bank.changes, bank.values.norms)


def at_home(job: AtHome, index: int = 0) -> torch.Tensor:
    return parts_of(job).gradients.homes.view(job.handles[index], write=False).clone()


def is_beside(job: AtHome) -> bool:
    return parts_of(job).device.overlaps


def land(job: AtHome, grad: torch.Tensor, *, adds: bool, whole: bool = True) -> None:
    """As a whole, or as this rank's flat param, which is flat and by columns."""
    if whole:
        lander(job).land(job.handles[0], grad, adds=adds)
    else:
        lander(job).land_shard(job.handles[0], grad.t().reshape(-1).clone(), 0, adds=adds)


@pytest.mark.parametrize("whole", [True, False])
def test_the_first_gradient_replaces_what_is_at_home_and_others_are_added(job, whole):
    """Twin: the other parameter's is left alone."""
    job.backward(RAMP, RAMP)
    land(job, ODD, adds=False, whole=whole)
    assert torch.equal(at_home(job), ODD)
    land(job, ODD * 3, adds=True, whole=whole)
    assert torch.equal(at_home(job), ODD + ODD * 3)
    assert at_home(job, 1).tolist() == [RAMP.tolist()] * 2


@pytest.mark.parametrize("whole", [True, False])
def test_pending_factors_are_applied_before_a_gradient_is_added_and_once(job, whole):
    record = job.handles[0].grad
    land(job, ODD, adds=False, whole=whole)
    record.factors += [0.3, 0.7]
    land(job, ODD * 3, adds=True, whole=whole)
    assert record.factors == []
    assert torch.equal(at_home(job), ODD * 0.3 * 0.7 + ODD * 3)


def test_a_gradient_of_other_strides_and_another_dtype_lands_as_it_is(job):
    """Both weights: one is kept by columns, one by rows."""
    for index in range(2):
        for grad in (ODD, ODD.t().contiguous().t(), ODD.double(), ODD.bfloat16()):
            lander(job).land(job.handles[index], grad, adds=False)
            assert torch.equal(at_home(job, index), grad.float())


@pytest.mark.parametrize("order", [None, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("whole", [True, False])
def test_the_norm_that_was_asked_for_is_taken_of_the_sum(job, order, whole):
    """With torch's bits. Twin: without a question none is taken."""
    record = job.handles[0].grad
    if order is not None:
        parts_of(job).gradients.values.norms.ask(order)
    land(job, ODD, adds=False, whole=whole)
    land(job, ODD * 3, adds=True, whole=whole)
    if order is None:
        assert record.norm is None
        return
    total = ODD.t().reshape(-1) + (ODD * 3).t().reshape(-1)
    record.landing.precede()
    assert record.norm[0] == order
    assert torch.equal(record.norm[1], torch.linalg.vector_norm(total, order))


@pytest.mark.parametrize("order", [None, 2.0])
def test_what_a_transfer_uses_lives_until_it_ends(job, order, monkeypatch):
    """The gradient, and the norm that it fills in, which may be forgotten meanwhile. Twin: on the
    processor nothing is left behind."""
    record, queue, kept = job.handles[0].grad, parts_of(job).gradients.homes.queue, []
    send = queue.send
    monkeypatch.setattr(queue, "send", lambda *args: (kept.append(args[4:]), send(*args))[1])
    if order is not None:
        parts_of(job).gradients.values.norms.ask(order)
    land(job, ODD, adds=False)
    if not is_beside(job):
        assert kept == []
        return
    ((value, *norms),) = kept
    assert value.numel() == ODD.numel() and len(norms) == (order is not None)
    assert all(norm is record.norm[1] for norm in norms)


@pytest.mark.parametrize("whole", [True, False])
def test_the_bytes_of_a_gradient_are_counted_on_their_way_home(job, whole):
    edge = parts_of(job).traffic.edges["device->host"]
    before = edge.nbytes
    land(job, ODD.double(), adds=False, whole=whole) if whole else land(
        job, ODD, adds=False, whole=False
    )
    parts_of(job).gradients.homes.queue.wait(job.handles[0].flat_param)
    assert edge.nbytes - before == ODD.numel() * 4  # as they are at home


def test_a_gradient_whose_memory_others_have_is_sent_as_it_was(job, monkeypatch):
    """A Function may return a view of memory that its next call writes to. Twin: a gradient
    with memory of its own is not copied."""
    queue, read = parts_of(job).gradients.homes.queue, []
    send = queue.send
    monkeypatch.setattr(queue, "send", lambda *args: (read.append(args[4]), send(*args))[1])
    workspace = ODD.flatten().clone()
    land(job, workspace.view(2, 4), adds=False)
    workspace.zero_()
    queue.wait(job.handles[0].flat_param)
    assert torch.equal(at_home(job), ODD)
    if not is_beside(job):
        return
    lander(job).land(job.handles[1], own := ODD.clone(), adds=False)
    shared, alone = read
    assert shared.data_ptr() != workspace.data_ptr() and alone.data_ptr() == own.data_ptr()


def test_only_a_device_with_transfers_of_its_own_lands_beside_the_compute(job):
    """Method: whether the gradient's arrival is still listed."""
    flat_param = job.handles[0].flat_param
    land(job, ODD, adds=False)
    assert len(parts_of(job).gradients.homes.queue.of(flat_param)) == is_beside(job)
    parts_of(job).gradients.homes.queue.wait(flat_param)
    land(job, ODD, adds=False, whole=False)
    assert len(parts_of(job).gradients.homes.queue.of(flat_param)) == is_beside(job)


def test_a_landed_gradient_counts_as_freed_where_the_host_computes(job, monkeypatch):
    """The host's allocator keeps its memory, which the heap must know of. Twin: a device's own
    allocator uses it again."""
    freed = []
    monkeypatch.setattr(parts_of(job).device, "note_freed", freed.append)
    land(job, ODD, adds=False)
    assert freed == ([] if is_beside(job) else [ODD.nbytes])
