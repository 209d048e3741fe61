"""park(to="host"): what is at home on the device goes to registered host memory, and comes back bit
by bit.

Words used here: see `test_device` (the model, `train`, `same`, devices that stand in).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_device import Elsewhere, a_model, compute_on, config_at, kernels, train  # noqa: F401

import infinity
from infinity.errors import CapacityError, ConfigError, UsageError
from infinity.machine.tiers import Tier
from infinity.runtime.registry import wrapped

ON_DEVICE = ("device", "device")


def arrays(model) -> dict[str, torch.Tensor]:
    """Those at home on the device, by unit and name."""
    return {
        f"{unit.name}.{name}": array.flat
        for unit in wrapped(model).engine.job.units
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
    wrapped(model).engine.wait_idle()
    host = wrapped(model).engine.job.ledger.accounts[Tier.HOST]
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
    with pytest.raises(UsageError, match="processor"):
        infinity.park(model, to="host")
    infinity.unwrap_model(model, optimizer)
