"""DeviceStepper: host state stepped on the device in chunks, and who steps how much of it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from inside import parts_of
from recorder import NOW, Recorder
from torch import nn

import infinity
from infinity import native
from infinity.core.machine.device import PAST
from infinity.core.machine.tiers import Tier
from infinity.core.step.device_fraction import Rates
from infinity.core.step.device_slots import DEVICE_SLOTS, SLOT_ALIGNMENT
from infinity.core.step.device_step import DeviceStepper, DeviceUpdate, passing, steps_on_device
from infinity.core.units.home_arrays import COPY, Reader

QUEUES = ("state-in", "step", "state-out")
CHUNK, CHUNKS = 4096, DEVICE_SLOTS + 2
NUMEL = CHUNKS * CHUNK
# Of a weight and a gradient of four bytes each; too few for the alignment of two chunks.
SLOT_NBYTES = 8 * 2 * CHUNK + SLOT_ALIGNMENT


@pytest.fixture(autouse=True)
def open_runs(monkeypatch) -> None:
    """The core's runs can be read by its kernels alone."""
    monkeypatch.setattr(native, "Run", lambda *run: SimpleNamespace(begin=run[0], end=run[1]))


@pytest.fixture(scope="module")
def job() -> SimpleNamespace:
    model = nn.Linear(CHUNK, CHUNKS, bias=False)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=1.0), {"params": "host", "optimizer": "host"}
    )
    flat_param = model.weight._infinity.flat_param
    return SimpleNamespace(
        model=model, optimizer=optimizer, engine=parts_of(model).engine, flat_param=flat_param
    )


@pytest.fixture
def state(job) -> SimpleNamespace:
    """The flat param's weights count up, and its gradients are halves."""
    arrays = job.flat_param.arrays
    arrays["weight"].flat.copy_(torch.arange(float(NUMEL)))
    arrays["grad"].flat.fill_(0.5)
    return SimpleNamespace(weight=arrays["weight"].flat, arrays=arrays, job=job)


def step(state, device: Recorder, *spans: tuple[int, int], after=(), **more) -> DeviceUpdate:
    stepper = DeviceStepper(device, device.traffic, SLOT_NBYTES)
    flat_param, hyper = state.job.flat_param, native.Hyperparameters()
    return stepper.step(
        flat_param,
        flat_param.homes.native_layout(native.Rule.SGD),
        [(begin, end, hyper) for begin, end in spans],
        state.job.flat_param.homes.draft(),
        after=after,
        **{"version": 7} | more,
    )


def expected(*spans: tuple[int, int]) -> torch.Tensor:
    values = torch.arange(float(NUMEL))
    for begin, end in spans:
        values[begin:end] -= 0.5
    return values


SPANS = [[(0, NUMEL)], [(0, 10), (64, 5000)], [(CHUNK, 2 * CHUNK)], []]
SPANS += [[(2 * CHUNK + 100, 3 * CHUNK + 1), (3 * CHUNK + 1, NUMEL)]]


@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_the_elements_of_the_spans_are_stepped_once_and_no_other(state, spans):
    device = Recorder()
    update = step(state, device, *spans)
    assert torch.equal(state.weight, expected(*spans))
    assert state.arrays["grad"].flat.eq(0.5).all()  # which did not come back
    assert sum(end - begin for begin, end in device.kernels.runs) == sum(
        end - begin for begin, end in spans
    )
    assert all(end - begin <= CHUNK for begin, end in device.kernels.runs)
    assert not update.on_device and update.ticket is None
    assert {array.extent.version for array in state.arrays.values()} == {7}


def test_state_comes_and_goes_and_gradients_only_come(state):
    """In whole blocks of 8-bit moments. Twin: chunks with nothing to step do not move."""
    device = Recorder()
    begin = CHUNK + 3 * native.MOMENT_BLOCK
    step(state, device, (begin + 1, begin + 2))
    edges = device.traffic.edges
    assert edges["host->device"].nbytes == 8 * native.MOMENT_BLOCK
    assert edges["device->host"].nbytes == 4 * native.MOMENT_BLOCK
    step(state, device, (0, NUMEL))
    assert edges["host->device"].nbytes == 8 * (native.MOMENT_BLOCK + NUMEL)
    assert [len(device.of(queue)) for queue in QUEUES] == [1 + CHUNKS] * 3


def test_a_chunk_comes_once_its_slot_is_free_and_goes_once_it_is_stepped(state):
    """All of it comes after what the caller waits for, and after the copies of the weights. The
    compute so far need not be over: all arrays are in host memory. Twin: the gradient is not."""
    device, before = Recorder(), SimpleNamespace(name="landing")
    state.job.flat_param.homes.read_until(COPY, read := SimpleNamespace(name="read"))
    update = step(state, device, (0, NUMEL), after=[before])
    come, stepped, leave = (device.of(queue) for queue in QUEUES)
    for number in range(CHUNKS):
        after = come[number][1]
        assert NOW not in after and before in after and read in after
        if number >= DEVICE_SLOTS:
            assert leave[number - DEVICE_SLOTS][0] in after
        assert stepped[number][1] == [come[number][0]]
        assert leave[number][1] == [stepped[number][0]]
    assert update.event is leave[-1][0]
    device, grad = Recorder(), state.arrays["grad"]
    with patch.object(grad, "tier", Tier.DEVICE):
        step(state, device, (0, NUMEL), after=[before])
    assert all(NOW in after for _, after in device.of("state-in"))
    state.job.flat_param.homes.read_until(COPY, PAST)


def test_new_weights_are_made_beside_the_old_ones(state):
    """Also of elements that are not stepped."""
    weight, store = state.arrays["weight"], parts_of(state.job).store
    newer = store.allocator.allocate_later(Tier.HOST, weight.dtype, weight.numel, "newer")
    homes = state.job.flat_param.homes
    homes.readers[0] = Reader(array=newer)
    homes.hold(0)
    step(state, Recorder(), (0, CHUNK), version=9)
    homes.readers.clear()
    assert torch.equal(state.weight, expected())
    assert torch.equal(newer.flat, expected((0, CHUNK))) and newer.extent.version == 9
    store.allocator.free_more(newer)


def test_only_state_on_the_device_itself_is_stepped_in_place(state):
    """Method: the tiers of arrays are made up. Gradients alone do not count."""

    def flat_param(**tiers: Tier) -> SimpleNamespace:
        return SimpleNamespace(
            arrays={name: SimpleNamespace(tier=tier) for name, tier in tiers.items()}
        )

    assert passing(state.job.flat_param) == ["weight", "grad"] and not steps_on_device(
        state.job.flat_param
    )
    assert steps_on_device(flat_param(weight=Tier.DEVICE, grad=Tier.HOST))
    assert passing(flat_param(weight=Tier.DEVICE, grad=Tier.HOST, exp_avg=Tier.NVME)) == ["grad"]
    assert not steps_on_device(flat_param(weight=Tier.HOST, grad=Tier.DEVICE))


@pytest.mark.parametrize("slots", [SLOT_NBYTES, 0])
def test_state_passes_only_if_there_are_slots_and_all_of_it_is_in_host_memory(job, slots):
    stepper = DeviceStepper(device := Recorder(), device.traffic, slots)
    stepper.fraction.value = 1.0
    stepper.choose_fraction([job.flat_param], [], 0.0)
    assert stepper.fraction.first_own(job.flat_param) == (0 if slots else NUMEL)
    with patch.object(job.flat_param.arrays["grad"], "tier", Tier.DEVICE):
        stepper.choose_fraction([job.flat_param], [], 0.0)
    assert stepper.fraction.first_own(job.flat_param) == NUMEL


@pytest.mark.parametrize("rate, seconds", [(100.0, 2.0), (0.0, 2.0), (100.0, 0.0)])
def test_what_device_and_processor_reach_is_measured(job, monkeypatch, rate, seconds):
    """By hand: the edge brings 4800 bytes a second, of which an element has 8. Twins: one of the
    rates is unknown."""
    device, told = Recorder(), []
    if seconds:
        device.traffic.copied("host->device", 9600, "by hand", 0.0, seconds)
    stepper = DeviceStepper(device, device.traffic, SLOT_NBYTES)
    monkeypatch.setattr(stepper.fraction, "note", lambda *args: told.append(args))
    stepper.choose_fraction([job.flat_param], [0.5], rate)
    known = rate and seconds
    assert told == [([0.5], Rates(100.0, 600.0, NUMEL) if known else None)]


@pytest.mark.parametrize("on_device", [True, False])
def test_an_update_is_over_when_both_parts_are_and_the_host_waits_if_it_has_one(on_device):
    called: list[str] = []

    def part(name: str) -> SimpleNamespace:
        wait, precede = (partial(called.append, f"{name} {how}") for how in ("waits", "precedes"))
        return SimpleNamespace(done=False, wait=wait, precede=precede)

    event, ticket = part("event"), part("ticket")
    update = DeviceUpdate(event, on_device)
    assert not update.done
    event.done = True
    assert update.done
    update.ticket = ticket
    assert not update.done
    ticket.done = True
    assert update.done
    update.wait()
    assert called == ["ticket waits", "event precedes" if on_device else "event waits"]
