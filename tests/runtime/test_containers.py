"""Models whose repeated parts are never called themselves: the numbers are torch's, and the device
has what was planned.

Words used here: **least**: the device budget that the plan without one has, which the wrap accepts.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from containers import KINDS, Lists, Mixture, Parameters, trained
from models import at_home, differing, seeded
from ranks import Jobs

import infinity
from infinity.api.lay_out import lay_out
from infinity.api.unmoved import unmoved_nbytes
from infinity.config.config import Config
from infinity.errors import CapacityError
from infinity.machine.tiers import Tier
from infinity.runtime.engine import Engine
from infinity.runtime.passes import Passes


def made(kind):
    model = seeded(1, kind)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def wrapped_at(kind, home, folder, **more):
    """Wraps with the least device memory, unless the home is the device."""
    model, optimizer = made(kind)
    config = at_home(home, home, folder, **more)
    if home != "device":
        plan, units = lay_out(model, optimizer, Config(**config))
        config["device_memory"] = plan.planned_nbytes(Tier.DEVICE) + unmoved_nbytes(model)
        assert config["device_memory"] < sum(unit.weight_nbytes for unit in units)
    return infinity.wrap_model(model, optimizer, config)


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("kind", KINDS)
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
    monkeypatch.setattr(Engine, "saving_tensors", lambda self: nullcontext())
    with pytest.raises(RuntimeError):
        trained(*wrapped_at(Parameters, "host", tmp_path))


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
    names = ["Lists", "Parameters", "Functions", "Mixture"]
    jobs = Jobs(standing_ranks(2), "container_jobs", {"kinds": {"names": names}})
    for found in jobs["kinds"]:
        assert found == dict.fromkeys(names, (True, [], True))
