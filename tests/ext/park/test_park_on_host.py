"""park(to="host"): what is at home on the device goes to registered host memory, and comes back bit
by bit.

Words used here: see `test_device` (the model, `train`, `same`, devices that stand in).
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device_cases import Elsewhere, a_model, compute_on, config_at, kernels, train  # noqa: F401
from inside import parts_of

import infinity
from infinity import native
from infinity.core.homes.allocator import ArrayAllocator
from infinity.core.machine.tiers import Tier
from infinity.core.run.uses import Uses
from infinity.errors import CapacityError, ConfigError, UsageError
from infinity.ext.park.parking import Parking

ON_DEVICE = ("device", "device")


def arrays(model) -> dict[str, torch.Tensor]:
    """Those at home on the device, by unit and name."""
    return {
        f"{unit.name}.{name}": array.flat
        for unit in parts_of(model).units
        for flat_param in unit.flat_params
        for name, array in flat_param.arrays.items()
        if array.tier is Tier.DEVICE
    }


def taken(model) -> dict[str, int]:
    """The bytes of memory behind each of them."""
    return {name: flat.untyped_storage().nbytes() for name, flat in arrays(model).items()}


def run(tmp_path: Path, parks) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Trains, with ``parks(model, number)`` after each step."""
    config = config_at(ON_DEVICE, tmp_path, nvme_paths=[str(tmp_path)])
    model, optimizer = infinity.wrap_model(*a_model(), config)
    told = []
    for number in range(4):
        told += train(model, optimizer, steps=1)
        parks(model, number)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    infinity.unwrap_model(model, optimizer)
    return told, weights


def apart(model, number: int) -> None:
    """The optimizer's state, then the weights, then all of it on to a disk."""
    infinity.park(model, to="host", what="optimizer")
    assert any(taken(model).values())
    infinity.park(model, to="host", what="weights")
    assert not any(taken(model).values())
    if number % 2:
        infinity.park(model)


PARKS = {
    "to the host": lambda model, number: infinity.park(model, to="host"),
    "to the host, and resumed": lambda model, number: (
        infinity.park(model, to="host"),
        infinity.resume(model),
    ),
    "to a disk": lambda model, number: infinity.park(model),
    "apart, and on to a disk": apart,
}


@pytest.mark.parametrize("parks", PARKS)
def test_a_parked_run_is_the_same(parks, compute_on, kernels, tmp_path):
    compute_on(Elsewhere, kernels)
    told, weights = run(tmp_path, lambda model, number: None)
    parked_told, parked_weights = run(tmp_path, PARKS[parks])
    assert all(map(torch.equal, told, parked_told))
    assert all(torch.equal(weights[name], value) for name, value in parked_weights.items())


def test_the_device_is_freed_and_the_host_charged_until_it_is_resumed(
    compute_on, kernels, tmp_path
):
    compute_on(Elsewhere, kernels)
    model, optimizer = infinity.wrap_model(*a_model(), config_at(ON_DEVICE, tmp_path))
    train(model, optimizer, steps=1)
    parts_of(model).wait_idle()
    host = parts_of(model).ledger.accounts[Tier.HOST]
    before, needed = host.charged_nbytes, sum(taken(model).values())
    values = {name: flat.clone() for name, flat in arrays(model).items()}
    parked = infinity.park(model, to="host")
    # Gradients that no step waits for go nowhere
    grads = sum(flat.nbytes for name, flat in arrays(model).items() if name.endswith(".grad"))
    assert parked == needed and sum(taken(model).values()) == 0
    assert host.charged_nbytes == before + needed - grads
    infinity.resume(model)
    assert host.charged_nbytes == before and sum(taken(model).values()) == needed
    assert all(
        torch.equal(flat, values[name])
        for name, flat in arrays(model).items()
        if not name.endswith(".grad")
    )
    infinity.unwrap_model(model, optimizer)


def test_a_budget_without_room_is_an_error_and_the_model_goes_on(compute_on, kernels, tmp_path):
    """Twin: the same after a park elsewhere."""
    compute_on(Elsewhere, kernels)
    config = config_at(ON_DEVICE, tmp_path, host_memory="1060KiB")
    model, optimizer = infinity.wrap_model(*a_model(), config)
    train(model, optimizer, steps=1)
    with pytest.raises(CapacityError, match="parked state"):
        infinity.park(model, to="host")
    train(model, optimizer, steps=1)
    assert infinity.park(model, tmp_path) > 0
    train(model, optimizer, steps=1)
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize(
    "given, error",
    [
        ({"to": "disk"}, ConfigError),
        ({"what": "moments"}, ConfigError),
        ({"to": "host", "folder": "/tmp"}, ConfigError),
    ],
)
def test_unknown_words_are_refused(given, error, compute_on, kernels, tmp_path):
    compute_on(Elsewhere, kernels)
    model, optimizer = infinity.wrap_model(*a_model(), config_at(ON_DEVICE, tmp_path))
    with pytest.raises(error, match="park"):
        infinity.park(model, **given)
    infinity.unwrap_model(model, optimizer)


def test_a_device_that_is_the_processor_has_nothing_to_give(tmp_path):
    model, optimizer = infinity.wrap_model(*a_model(), config_at(("host", "host"), tmp_path))
    with pytest.raises(UsageError, match="would free nothing"):
        infinity.park(model, to="host")
    infinity.unwrap_model(model, optimizer)


def placed(model) -> tuple[int, int]:
    """The bytes planned and charged on the host."""
    host = parts_of(model).ledger.accounts[Tier.HOST]
    return host.planned_nbytes, host.charged_nbytes


@pytest.fixture
def parkable(compute_on, kernels, tmp_path):
    """A model that was trained on the device, its optimizer, and its arrays' values."""
    compute_on(Elsewhere, kernels)
    config = config_at(ON_DEVICE, tmp_path, nvme_paths=[str(tmp_path)])
    model, optimizer = infinity.wrap_model(*a_model(), config)
    train(model, optimizer, steps=1)
    parts_of(model).wait_idle()
    values = {name: flat.clone() for name, flat in arrays(model).items() if ".grad" not in name}
    yield model, optimizer, values
    infinity.unwrap_model(model, optimizer)


def are_back(model, values: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(arrays(model)[name], value) for name, value in values.items())


@pytest.mark.parametrize("strikes", [1, 3, 7])
@pytest.mark.parametrize("then", ["resume", "park"])
def test_an_interrupt_while_copies_run_loses_nothing(then, strikes, parkable, monkeypatch):
    """Method: a wait for a copy is interrupted; then all is brought back, or parked once more and
    brought back."""
    (model, _, values), before = parkable, placed(parkable[0])
    copy, waits = Parking._copy, []

    def interrupted(self, *given):
        event = copy(self, *given)

        def wait() -> None:
            waits.append(event)
            if len(waits) == strikes:
                raise KeyboardInterrupt
            event.wait()

        return SimpleNamespace(wait=wait, done=False)

    monkeypatch.setattr(Parking, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        infinity.park(model, to="host")
    if then == "park":
        infinity.park(model, to="host")
        assert not any(taken(model).values())
    infinity.resume(model)
    assert are_back(model, values) and placed(model) == before


def test_a_resume_without_room_leaves_all_parked(parkable, monkeypatch):
    """Method: the device refuses the memory of the third array. Twin: it has room again."""
    (model, _, values), refill, count = parkable, ArrayAllocator.refill, []

    def refuse(self, array):
        count.append(array)
        if len(count) == 3:
            raise CapacityError("no room")
        return refill(self, array)

    infinity.park(model, to="host")
    monkeypatch.setattr(ArrayAllocator, "refill", refuse)
    with pytest.raises(CapacityError):
        infinity.resume(model)
    assert not any(taken(model).values())
    infinity.resume(model)
    assert are_back(model, values)


def test_a_part_that_is_asked_for_goes_on_to_a_disk_alone(parkable):
    model, _, values = parkable
    _, before = placed(model)
    infinity.park(model, to="host")
    _, parked = placed(model)
    weights = sum(values[name].nbytes for name in values if name.endswith(".weight"))
    infinity.park(model, what="weights")
    service = max(parts_of(model).planned.plan.service_nbytes, 1 << 20)
    beside = service + native.sums_nbytes(placed(model)[1])
    assert parked - weights <= placed(model)[1] <= parked - weights + beside
    infinity.resume(model)
    assert are_back(model, values)


def test_what_another_thread_does_before_a_second_park_counts(parkable, monkeypatch):
    """Method: another thread runs a backward once the second park has found the first."""
    (model, optimizer, _), begin = parkable, Uses.begin
    infinity.park(model, to="host", what="optimizer")

    def meanwhile(self, **given):
        if "unless" not in given:
            return begin(self, **given)
        monkeypatch.setattr(Uses, "begin", begin)
        ids = torch.randint(0, 96, (4, 8))
        backward = lambda: model(ids).float().sum().backward()
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        return begin(self, **given)

    monkeypatch.setattr(Uses, "begin", meanwhile)
    with pytest.raises(UsageError, match="between backward and step"):
        infinity.park(model, to="host")
    optimizer.zero_grad()


@pytest.mark.parametrize("error", [KeyboardInterrupt, CapacityError])
def test_an_array_whose_copy_never_started_keeps_its_bytes(error, parkable, monkeypatch):
    """Method: a copy fails before it starts, once gradients' memory is given up. Twin: the arrays
    before it are parked."""
    (model, _, values), copy, count = parkable, Parking._copy, []

    def failing(self, *given):
        count.append(given)
        if len(count) == 3:
            raise error("before the copy")
        return copy(self, *given)

    infinity.park(model, to="host", what="optimizer")
    monkeypatch.setattr(Parking, "_copy", failing)
    with pytest.raises(error):
        infinity.park(model, to="host", what="weights")
    infinity.resume(model)
    assert are_back(model, values) and all(taken(model).values())


def test_weights_that_are_held_are_refused_in_a_second_park_too(parkable):
    """Twin: the optimizer's state is parked, held or not."""
    model, _, values = parkable
    held = next(iter(parts_of(model).units)).buffers.flats[0][:4]
    infinity.park(model, to="host", what="optimizer")
    with pytest.raises(UsageError, match="holds the memory"):
        infinity.park(model, to="host", what="weights")
    del held
    assert infinity.park(model, to="host", what="weights") > 0
    infinity.resume(model)
    assert are_back(model, values)
