"""Models whose repeated parts are never called themselves: the numbers are torch's, and the device
has what was planned.

Words used here: **least**: the device budget that the wrap names when it refuses a smaller one.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from containers import AGAIN, KINDS, MANY, Chained, Lists, Mixture, Parameters, Products, trained
from models import at_home, differing, seeded
from ranks import Jobs

import infinity
from infinity.config import Config
from infinity.core.grads.backward import Backward
from infinity.core.run.passes import Passes
from infinity.core.run.prefetch import Prefetcher
from infinity.core.wrap.lay_out import lay_out
from infinity.errors import CapacityError


def made(kind):
    model = seeded(1, kind)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def wrapped_at(kind, home, folder, **more):
    """Wraps with the least device memory, unless the home is the device."""
    model, optimizer = made(kind)
    config = at_home(home, home, folder, **more)
    if home != "device":
        with pytest.raises(CapacityError) as refused:
            infinity.wrap_model(model, optimizer, config | {"device_memory": 1})
        config["device_memory"] = refused.value.needed["device_memory"]
        _, units = lay_out(model, optimizer, Config(**config))
        assert config["device_memory"] < sum(unit.weight_nbytes for unit in units)
    return infinity.wrap_model(model, optimizer, config)


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(each, marks=pytest.mark.slow) for each in AGAIN)]
)
def test_parts_that_are_never_called_train_as_in_torch_within_the_least(kind, home, tmp_path):
    """Method: three steps and an evaluation beside plain torch, bit for bit. Claim: the peak is
    within the plan, which the budget holds. Twins: the tests below."""
    plain, (model, optimizer) = made(kind), wrapped_at(kind, home, tmp_path)
    assert trained(model, optimizer) == trained(*plain)
    assert differing(dict(model.state_dict()), dict(plain[0].state_dict())) == []
    device = infinity.stats(model).tiers["device"]
    assert device.peak_nbytes <= device.planned_nbytes
    assert device.budget_nbytes is None or device.planned_nbytes <= device.budget_nbytes


def test_units_that_stay_until_the_end_of_the_forward_break_the_least(tmp_path, monkeypatch):
    """The twin: what an operation uses is held until the outermost forward ends."""

    @contextmanager
    def using(self, handles, *, writes):
        for handle in handles:
            self.hold_for_frame(handle.unit)
        yield

    monkeypatch.setattr(Passes, "using", using)
    with pytest.raises(CapacityError, match="does not fit the device window"):
        trained(*wrapped_at(Parameters, "host", tmp_path))


def test_weights_that_are_not_saved_as_references_are_gone_in_the_backward(tmp_path, monkeypatch):
    """The twin: autograd saves the memory itself."""
    as_they_are = (lambda tensor: tensor.detach(), lambda tensor: tensor)
    monkeypatch.setattr(Passes, "_saving_hooks", lambda self: as_they_are)
    with pytest.raises(RuntimeError):
        trained(*wrapped_at(Parameters, "host", tmp_path))


def needed(kind, folder, **more):
    """Trains with the least. Returns the budget that the error names."""
    model, optimizer = wrapped_at(kind, "host", folder, units=["Linear"], **more)
    with pytest.raises(CapacityError, match="not fit the device window") as refused:
        trained(model, optimizer)
    budget = refused.value.needed["device_memory"]
    assert f"Config(device_memory={budget})" in str(refused.value)
    return budget


def trained_within(kind, budget):
    config = {"params": "host", "optimizer": "host", "units": ["Linear"], "device_memory": budget}
    model, optimizer = infinity.wrap_model(*made(kind), config)
    return trained(model, optimizer), model


@pytest.mark.parametrize("kind", MANY)
def test_an_operation_over_many_units_names_a_budget_that_works(kind, tmp_path):
    """Method: one error with the least, then training with the budget that it names, beside plain
    torch. Twins: the tests below."""
    plain, budget = made(kind), needed(kind, tmp_path)
    losses, model = trained_within(kind, budget)
    assert losses == trained(*plain)
    assert differing(dict(model.state_dict()), dict(plain[0].state_dict())) == []
    device = infinity.stats(model).tiers["device"]
    assert device.peak_nbytes <= device.planned_nbytes <= budget


def test_the_need_of_one_unit_after_another_is_not_the_whole(tmp_path, monkeypatch):
    """The twin: what an operation uses is not looked at together."""
    refuse = Prefetcher.refuse_over

    def of_one(self, units, nbytes):
        if len(units) == 1:
            refuse(self, units, nbytes)

    monkeypatch.setattr(Prefetcher, "refuse_over", of_one)
    with pytest.raises(CapacityError):
        trained_within(Chained, needed(Chained, tmp_path))


def test_the_units_of_a_running_node_do_not_give_way(tmp_path, monkeypatch):
    """The twin: the second weight of a product drops the first one, which torch computes with."""
    monkeypatch.setattr(Backward, "_taken_by_node", lambda self: ())
    with pytest.raises(RuntimeError, match="data pointer"):
        trained(*wrapped_at(Products, "host", tmp_path, units=["Linear"]))


@pytest.mark.parametrize("kind", [Lists, Mixture])
def test_blocks_inside_of_containers_run_in_micro_batches_and_again(kind, tmp_path):
    """Method: what is called inside a layer is recomputed; beside plain torch. Twin: with blocks in
    micro-batches, whose sums are in another order."""
    plain = made(kind)
    right = trained(*plain)
    model, optimizer = wrapped_at(kind, "host", tmp_path, recompute=True)
    assert trained(model, optimizer) == right
    assert differing(dict(model.state_dict()), dict(plain[0].state_dict())) == []
    assert sum(infinity.stats(model).blocks.values()) >= 6
    if kind is Lists:
        assert trained(*wrapped_at(kind, "host", tmp_path, micro_batch=1)) == pytest.approx(right)


def test_the_weights_of_containers_are_there_for_inference(tmp_path):
    """Method: no optimizer, each kind at home on the host. Twin: plain torch."""
    x = torch.ones(1, 4, 32)
    for kind in KINDS:
        model, _ = infinity.wrap_model(made(kind)[0], None, {"params": "host"})
        with torch.no_grad():
            assert torch.equal(model(x), made(kind)[0](x))
        device = infinity.stats(model).tiers["device"]
        assert device.peak_nbytes <= device.planned_nbytes


@pytest.mark.timeout(700)
def test_ranks_gather_what_is_used_outside_of_owners(standing_ranks):
    """Method: ZeRO-3 over two ranks with the same batches, each kind with the least; beside plain
    torch in one process, bit for bit."""
    names = ["Lists", "Parameters", "Functions", "Mixture", *(kind.__name__ for kind in AGAIN)]
    jobs = Jobs(standing_ranks(2), "container_jobs", {"kinds": {"names": names}})
    for found in jobs["kinds"]:
        assert found == dict.fromkeys(names, (True, [], True))
