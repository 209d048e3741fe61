"""A device with queues of its own: the same bits whatever it does when, no race, and nobody
standing still.

Words used here:

**elsewhere**: a device whose memory the processor does not use, as a GPU's is; here it is the
processor's all the same. **threads**: queues that are threads, with delays at random, so that what
is not waited for is not there yet. **detector**: a device that tells which memory two queues use
without being put in order (`race_detector`). **kernels**: the GPU's, compiled for the processor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time

import pytest
import threaded_device
import torch
from device_cases import (  # noqa: F401
    HOMES,
    HOMES_WITH_KERNELS,
    WIDTH,
    Delayed,
    Elsewhere,
    a_model,
    compute_on,
    config_at,
    kernels,
    same,
    train,
    trained,
)
from inside import parts_of
from marks import few
from race_detector import RaceDetector, Watch, detecting
from torch import nn

import infinity
from infinity import native
from infinity.core.grads import homes, lander, values
from infinity.core.machine import device as devices
from infinity.core.machine import in_flight
from infinity.core.machine.traffic import Traffic
from infinity.core.run.activation_disk import ActivationsOnDisk
from infinity.core.step.device_fraction import DeviceFraction
from infinity.core.units.staged_reads import StagedReads
from infinity.core.units.unit import ParamUnit
from infinity.errors import CapacityError, ConfigError, CorruptionError, StorageError


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"clip": True}, id="clip", marks=pytest.mark.slow),
        pytest.param({"micro": 2, "clip": True}, id="accumulate"),
    ],
)
@pytest.mark.parametrize("homes", HOMES, ids="-".join)
def test_threads_change_no_bit(homes, how, compute_on, tmp_path):
    """Claim: late copies and landings change nothing. Method: the same run with queues that run at
    once, and with threads that are late at random, on the host's memory and elsewhere."""
    config = config_at(homes, tmp_path)
    at_once = trained(config, **how)
    compute_on(Delayed)
    assert same(trained(config, **how), at_once)
    compute_on(Elsewhere)
    assert same(trained(config, **how), at_once)


@pytest.mark.parametrize(
    ("homes", "moments"),
    [
        *((homes, "fp32") for homes in HOMES_WITH_KERNELS),
        pytest.param(("device", "device"), "int8", marks=pytest.mark.slow),
        pytest.param(("device", "host"), "int8", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_state_on_the_device_is_stepped_there_with_the_same_bits(
    homes, moments, kernels, compute_on, tmp_path
):
    """Claim: where state lies, and who steps it, changes nothing. Method: the processor's run,
    against every pair of homes on a device elsewhere, whose kernels step what lies there."""
    how = {"clip": True, "steps": 2}
    by_processor = trained({"params": "host", "optimizer": "host", "moments": moments}, **how)
    compute_on(Elsewhere, kernels)
    assert same(trained(config_at(homes, tmp_path, moments=moments), **how), by_processor)


@pytest.mark.parametrize("moments", ["fp32", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_step_that_is_split_has_the_same_bits(moments, kernels, compute_on, monkeypatch):
    """Half of each flat param by the device and half by the processor; the device's share is chosen
    by measured rates. With 8-bit moments this fails when the random bits of rounding go by an
    element's place in its slot."""
    config = {"params": "host", "optimizer": "host", "moments": moments}
    by_processor = trained(config, clip=True)
    compute_on(Elsewhere, kernels)
    monkeypatch.setattr(DeviceFraction, "note", give_half)
    assert same(trained(config, clip=True), by_processor)


def give_half(share: DeviceFraction, *of_step) -> None:
    """Let the device step half of the state."""
    share.value = 0.5


# --- order ---


def races_of(monkeypatch, config, kernels=None, **how):
    """What the detector finds in a run, and how often the host stood still in its last step."""
    # The detector is a mode that has to see the engine's own work.
    monkeypatch.setattr("infinity.core.params.outside_modes.count_dispatch_modes", lambda: 0)
    monkeypatch.setattr("infinity.core.params.outside_modes.innermost_transform", lambda: None)
    with detecting(monkeypatch, kernels) as detector:
        model, optimizer = infinity.wrap_model(*a_model(), config)
        with Watch(detector()):
            train(model, optimizer, **{"steps": 2, **how})
            found, before = detector(), detector().waits
            train(model, optimizer, **{**how, "steps": 1})
        waits = found.waits - before
        races = list(dict.fromkeys(found.races))
        infinity.unwrap_model(model, optimizer)
    return races, waits


@pytest.mark.parametrize(
    ("homes", "window", "activations"),
    [
        (("host", "host"), None, "host"),
        (("host", "host"), "320KiB", "auto"),
        (("nvme", "nvme"), "320KiB", "host"),
        (("nvme", "nvme"), None, "auto"),
        (("host", "nvme"), None, "auto"),
        (("nvme", "host"), "320KiB", "auto"),
    ],
)
def test_no_two_queues_use_memory_out_of_order(homes, window, activations, monkeypatch, tmp_path):
    """Claim: every use of memory by a queue is in order with the compute's, the host's and the
    updates'. Failing twins: below."""
    config = config_at(homes, tmp_path, device_memory=window, activations=activations)
    assert races_of(monkeypatch, config, micro=2, clip=True)[0] == []


@pytest.mark.parametrize("homes", few(HOMES_WITH_KERNELS[len(HOMES) :], 2), ids="-".join)
def test_steps_on_the_device_are_in_order(homes, kernels, monkeypatch, tmp_path):
    assert races_of(monkeypatch, config_at(homes, tmp_path), kernels, clip=True, steps=2)[0] == []


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_activations_change_no_bit(home, compute_on, tmp_path):
    """Activations at home on the host or on a disk, on a device elsewhere with late copies."""
    config = config_at(("host", "host"), tmp_path, nvme_paths=[str(tmp_path)])
    at_once = trained(config, micro=2)
    compute_on(Elsewhere)
    assert same(trained({**config, "activations": home}, micro=2), at_once)


def test_activations_go_through_staging_memory_once_and_are_waited_for(
    compute_on, monkeypatch, tmp_path
):
    """Claim: what goes to a disk is copied from the device once, into staging memory. Method:
    copies that are always late; their bytes are those of the storages. Failing twin: one that is
    not waited for, whose checksum is of what was there before.
    """
    copied, saved_nbytes, staged = [], [], []

    class Late(threaded_device.ThreadedDevice):
        is_host = False

        def put(self, queue, work, *, transfer=None, **more):
            def late() -> None:
                time.sleep(0.003)
                work()

            if transfer is not None and (transfer.edge, transfer.label) == (
                "device->host",
                "activations",
            ):
                copied.append(transfer.nbytes)
                return super().put(queue, late, transfer=transfer, **more)
            return super().put(queue, work, transfer=transfer, **more)

    def send(disk, saved, *given, real=ActivationsOnDisk.send):
        saved_nbytes.append(saved.nbytes)
        real(disk, saved, *given)

    def write(disk, saved, part, *, real=ActivationsOnDisk._write):
        staged.append(
            part.lease.address - disk._staging.region.address < disk._staging.capacity_nbytes
        )
        real(disk, saved, part)

    config = config_at(("host", "host"), tmp_path, nvme_paths=[str(tmp_path)])
    at_once = trained(config, steps=1)
    compute_on(Late)
    monkeypatch.setattr(ActivationsOnDisk, "send", send)
    monkeypatch.setattr(ActivationsOnDisk, "_write", write)
    assert same(trained({**config, "activations": "nvme"}, steps=1), at_once)
    assert sum(copied) == sum(saved_nbytes) > 0 and len(staged) == len(copied) and all(staged)

    def copy_out(disk, *given, real=ActivationsOnDisk._copy_out):
        return dataclasses.replace(real(disk, *given), event=devices.PAST)

    monkeypatch.setattr(ActivationsOnDisk, "_copy_out", copy_out)
    with contextlib.suppress(
        CorruptionError
    ):  # the bytes may come between the checksum and the disk
        assert not same(trained({**config, "activations": "nvme"}, steps=1), at_once)


def test_norms_of_gradients_that_are_dropped_are_in_order(monkeypatch):
    """Claim: a norm that nobody asks for is not freed while it is still taken. Method: one small
    layer, whose gradients are far below what may be borrowed: accumulation, zeroing and scaling
    after a clipped step. Fails without its keeping.
    """
    with detecting(monkeypatch) as detector:
        model = nn.Linear(8, 8)
        model, optimizer = infinity.wrap_model(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            {"params": "host", "optimizer": "host"},
        )
        with Watch(detector()):
            for turn in range(4):
                for _ in range(2):
                    model(torch.ones(2, 8)).sum().backward()
                if turn == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                model.weight.grad.mul_(0.5)
                if turn != 2:
                    optimizer.step()
                optimizer.zero_grad()
        assert detector().races == []
        infinity.unwrap_model(model, optimizer)


def test_pieces_of_a_unit_are_copied_as_they_are_read(compute_on, monkeypatch, tmp_path):
    """Claim: on a device with queues a unit from disk is copied piece by piece, and that changes no
    bit. Method: pieces of one checksum block; how many a unit has is looked at. Failing twin: a
    piece that is copied to another place.
    """
    monkeypatch.setattr("device_cases.WIDTH", 128)
    config = config_at(("nvme", "nvme"), tmp_path)
    at_once = trained(config, clip=True)
    compute_on(Elsewhere)
    monkeypatch.setattr("infinity.core.units.staged_reads.PIECE_NBYTES", native.CHECKSUM_NBYTES)
    real, counts = StagedReads._copy_piece, []

    def copy_piece(reads, store, flat_param, flat, piece, name, *, beside=False):
        counts.append(piece.begin)
        moved = beside and piece.read.nbytes == native.CHECKSUM_NBYTES
        placed = dataclasses.replace(piece, begin=0) if moved else piece
        real(reads, store, flat_param, flat, placed, name)

    monkeypatch.setattr(StagedReads, "_copy_piece", copy_piece)
    assert same(trained(config, clip=True), at_once)
    assert max(counts) > 0, "no unit has two pieces"
    monkeypatch.setattr(StagedReads, "_copy_piece", lambda *given: copy_piece(*given, beside=True))
    assert not same(trained(config, clip=True), at_once)


@pytest.mark.parametrize("fault", ["eio=0.01", "bit_flip=0.01"])
def test_a_read_that_fails_while_pieces_are_copied_is_a_typed_error_and_leaves_nothing(
    fault, compute_on, monkeypatch, tmp_path
):
    """Claim: whichever piece fails, the error is the disk's, and no swap file, thread or lease
    stays behind."""
    monkeypatch.setattr("device_cases.WIDTH", 128)
    monkeypatch.setattr("infinity.core.units.staged_reads.PIECE_NBYTES", native.CHECKSUM_NBYTES)
    monkeypatch.setenv("INFINITY_FAULTS", f"seed=3,{fault}")
    compute_on(Elsewhere)
    threads = threading.active_count()
    jobs = []
    with pytest.raises((StorageError, CorruptionError)):
        jobs.append(infinity.wrap_model(*a_model(), config_at(("nvme", "host"), tmp_path)))
        train(*jobs[0], steps=30)
    for model, _ in jobs:
        parts_of(model).shut_down()
    assert list(tmp_path.iterdir()) == [] and threading.active_count() == threads


def test_an_activation_that_is_changed_on_its_way_home_is_refused(compute_on):
    """As torch refuses a saved tensor that was changed. The copy starts after the change here, so
    it has the wrong bytes."""
    go = threading.Event()

    class Held(threaded_device.ThreadedDevice):
        is_host = False

        def put(self, queue, work, **more):
            def later() -> None:
                go.wait()
                work()

            return super().put(queue, later if queue == "out" else work, **more)

    compute_on(Held)

    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(256, 256)

        def forward(self, x):
            y = self.inner(x)
            z = y * y
            with torch.no_grad():
                y.add_(1)
            return z

    model = Changes()
    config = {"params": "host", "optimizer": "host", "activations": "host"}
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config
    )
    loss = model(torch.ones(128, 256)).sum()
    go.set()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    optimizer.zero_grad()
    infinity.unwrap_model(model, optimizer)


def test_a_wrap_that_finds_no_room_on_the_device_changes_nothing(compute_on, monkeypatch):
    """Claim: buffers are taken before the model is changed. Method: the third buffer finds no
    room."""
    compute_on(Elsewhere)
    real, count = ParamUnit.allocate, []

    def allocate(unit):
        count.append(unit)
        if len(count) == 3:
            raise CapacityError("no room")
        real(unit)

    monkeypatch.setattr(ParamUnit, "allocate", allocate)
    model, optimizer = a_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CapacityError, match="no room"):
        infinity.wrap_model(model, optimizer, {"params": "host", "optimizer": "host"})
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    train(model, optimizer, steps=1)


def test_what_the_device_is_planned_to_hold_is_charged(compute_on, kernels):
    """The engine's own device memory counts from the start, and is all that is charged between two
    steps."""
    compute_on(Elsewhere, kernels)
    model, optimizer = infinity.wrap_model(
        *a_model(), {"params": "host", "optimizer": "host", "device_memory": "2MiB"}
    )
    train(model, optimizer, steps=2)
    tier = infinity.stats(model).tiers["device"]
    assert tier.peak_nbytes <= tier.planned_nbytes <= 2 << 20
    engine = parts_of(model).engine
    terms = parts_of(engine).planned.plan.terms["device"]
    there_always = terms["gradients on their way"] + terms["optimizer slots"]
    assert (
        there_always > 0
        and parts_of(engine).ledger.accounts["device"].charged_nbytes == there_always
    )
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("homes", ["host", "auto"])
def test_every_budget_from_the_least_one_on_is_enough(homes, compute_on, kernels):
    """The least that an error names works, and so does all above it, to the whole of the state on
    the device. Twin: one byte less does not."""
    compute_on(Elsewhere, kernels)
    config = {"params": homes, "optimizer": homes}
    with pytest.raises(CapacityError, match="the least that works") as refused:
        infinity.wrap_model(*a_model(), config | {"device_memory": "64KiB"})
    least = int(re.search(r"works here is .*?\((\d+) bytes\)", str(refused.value))[1])
    with pytest.raises(CapacityError):
        infinity.wrap_model(*a_model(), config | {"device_memory": least - 1})
    for budget in (least, least + (4 << 10), *range(least, 3 << 20, 96 << 10)):
        model, optimizer = infinity.wrap_model(*a_model(), config | {"device_memory": budget})
        train(model, optimizer, steps=1)
        tier = infinity.stats(model).tiers["device"]
        assert tier.peak_nbytes <= budget
        infinity.unwrap_model(model, optimizer)


def test_a_gradient_that_is_set_goes_home_from_the_device(compute_on):
    """What p.grad reads is a copy on the device: what is assigned, or done to it in place, is what
    is read then, and stepped."""
    compute_on(Elsewhere)
    model = nn.Linear(8, 8, bias=False)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=1.0), {"params": "host", "optimizer": "host"}
    )
    before = model.state_dict()["weight"].clone()
    model(torch.ones(1, 8)).sum().backward()
    model.weight.grad = torch.full((8, 8), 2.0)
    assert bool((model.weight.grad.clone() == 2).all())
    model.weight.grad.add_(1)
    assert bool((model.weight.grad.clone() == 3).all())
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], before - 3)
    infinity.unwrap_model(model, optimizer)


def test_a_split_step_is_in_order(kernels, monkeypatch):
    monkeypatch.setattr(DeviceFraction, "note", give_half)
    assert races_of(monkeypatch, {"params": "host", "optimizer": "host"}, kernels)[0] == []


def _finish_gather(unit, store, *, real=ParamUnit.finish_gather):
    unit.arrival.event = devices.PAST
    return real(unit, store)


def _norm_taken_anew(grads, handle, order):
    grads.homes.queue.forget(handle.flat_param)
    return torch.linalg.vector_norm(grads.value(handle, write=False), order)


def _resize(detector, storage, nbytes, *, after=(), real=RaceDetector.resize):
    real(detector, storage, nbytes)


TWINS = {
    "gradients that are freed while they are sent": (
        in_flight.InFlight,
        "keep",
        lambda self, tensor, moment: None,
    ),
    "gradients that are sent before they are computed": (
        RaceDetector,
        "now",
        lambda self: devices.PAST,
    ),
    "weights that are used before they came": (ParamUnit, "finish_gather", _finish_gather),
    "weights that are freed while they are used": (RaceDetector, "resize", _resize),
    "updates that do not wait for gradients": (
        homes.GradHomes,
        "close_flat_param",
        lambda self, flat_param: [],
    ),
    "a gradient that is read before it landed": (values.GradValues, "norm", _norm_taken_anew),
}


@pytest.mark.parametrize("twin", TWINS)
def test_the_detector_finds_what_is_forgotten(twin, monkeypatch):
    """The failing twins: with one wait left out, the detector names a race."""
    owner, name, instead = TWINS[twin]
    monkeypatch.setattr(owner, name, instead)
    races, _ = races_of(monkeypatch, {"params": "host", "optimizer": "host"}, clip=True)
    assert races


def test_nobody_stands_still_between_two_steps(monkeypatch):
    """Claim: in the steady state the training thread waits for no queue. Failing twin: gradients
    that it adds itself."""
    config = {"params": "host", "optimizer": "host"}
    assert races_of(monkeypatch, config, micro=2)[1] == 0

    def value(self, handle, *args, real=lander.Lander.enqueue, **how):
        real(self, handle, *args, **how)
        self._grad_homes.queue.wait(handle.flat_param)

    monkeypatch.setattr(lander.Lander, "enqueue", value)
    assert races_of(monkeypatch, config)[1] > 0


# --- moments and queues ---


def test_work_of_a_queue_is_in_order_and_behind_what_it_was_put_behind():
    device = Delayed(torch.device("cpu"), Traffic())
    done = []
    first = device.put("in", lambda: (time.sleep(0.02), done.append("first")))
    second = device.put("out", lambda: done.append("second"), after=[first])
    third = device.put("in", lambda: done.append("third"))
    second.wait()
    third.wait()
    assert done.index("first") < done.index("second") and done.index("first") < done.index("third")
    device.close()


def test_an_error_in_a_queue_is_raised_where_it_is_waited_for_and_behind_it():
    device = threaded_device.ThreadedDevice(torch.device("cpu"), Traffic())

    def fail() -> None:
        raise CapacityError("no room")

    failed = device.put("in", fail)
    after = device.put("out", lambda: None, after=[failed])
    with pytest.raises(CapacityError, match="no room"):
        failed.wait()
    with pytest.raises(CapacityError, match="no room"):
        after.precede()
    device.close()


def test_a_ticket_finishes_with_all_of_its_moments():
    device = threaded_device.ThreadedDevice(torch.device("cpu"), Traffic())
    go = [False]

    def wait() -> None:
        while not go[0]:
            time.sleep(0.001)

    ticket = device.ticket([device.put("in", wait), device.put("out", lambda: None)])
    assert not ticket.done
    go[0] = True
    ticket.wait()
    assert device.ticket([devices.PAST]) is None
    device.close()


def test_a_closed_device_leaves_no_thread():
    before = threading.active_count()
    device = threaded_device.ThreadedDevice(torch.device("cpu"), Traffic())
    assert threading.active_count() == before + len(devices.QUEUES)
    device.close()
    assert threading.active_count() == before


def test_joined_tickets_fail_with_the_first_that_fails():
    tickets = [native.Ticket(1), native.Ticket(2)]
    together = native.joined(tickets)
    tickets[0].part_failed("gone")
    tickets[1].part_done()
    assert not together.done
    tickets[1].part_done()
    with pytest.raises(RuntimeError, match="gone"):
        together.wait()


# --- bad input ---


def test_a_device_that_is_not_there_is_refused_before_anything_changes():
    model, optimizer = a_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    absent = "xpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ConfigError, match=f"no device {absent}"):
        infinity.wrap_model(model, optimizer, {"device": absent})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_device_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="device='gpu0'"):
        infinity.Config(device="gpu0")


def test_state_on_a_device_without_kernels_is_refused(compute_on):
    compute_on(Elsewhere)
    with pytest.raises(ConfigError, match="kernels"):
        infinity.wrap_model(*a_model(), {"params": "device", "optimizer": "device"})


@pytest.mark.parametrize("case", ["kernels", "not built", "too old", "frozen", "processor"])
def test_a_wrap_on_a_device_without_kernels_says_what_it_costs(case, compute_on, caplog):
    """Reads the lines of a wrap whose device has no kernels, and why. Twins: one with kernels, a
    model that trains nothing, the processor itself."""
    refusals = {
        "not built": native.gpu_kernels()[1],
        "too old": "a card has capability (7, 5), the kernels need (8, 0)",
    }

    def made(where, traffic):
        device = Elsewhere(where, traffic)
        device.kernels_refusal = refusals.get(case, "")
        return device

    if case != "processor":
        compute_on(made, object() if case == "kernels" else None)
    model, optimizer = a_model()
    if case == "frozen":
        model.requires_grad_(False)
        optimizer = None
    infinity.wrap_model(model, optimizer, {"params": "host", "optimizer": "host"})
    told = [each.getMessage() for each in caplog.records if "no optimizer kernels" in each.message]
    assert len(told) == (case in refusals)
    for line in told:
        assert (
            refusals[case] in line
            and "the processor steps" in line
            and "1.3 MiB of weights" in line
        )
    assert "INFINITY_CUDA=1" in refusals["not built"]


def test_weights_on_the_device_with_state_on_disk_are_refused(compute_on, kernels, tmp_path):
    compute_on(Elsewhere, kernels)
    with pytest.raises(ConfigError, match="in memory"):
        infinity.wrap_model(*a_model(), config_at(("device", "nvme"), tmp_path))
