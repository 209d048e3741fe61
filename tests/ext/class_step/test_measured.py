"""Prodigy: a distance of all parameters once a step, from every home, with the library's bits.

Twins: a distance that is settled from the sums of one group alone is another; a step in the
backward, which has not all sums, is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import at_home
from small_net import model, same, steps
from torch import nn

import infinity
from infinity.errors import UsageError
from infinity.ext.class_step.measured import Prodigy

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {"d0": 1e-3, "d_coef": 8.0},
    "a part of the elements": {"d0": 1e-3, "d_coef": 8.0, "slice_p": 11, "safeguard_warmup": True},
    "corrected and slow": {
        "d0": 1e-3,
        "d_coef": 64.0,
        "use_bias_correction": True,
        "growth_rate": 1.02,
    },
    "coupled decay": {"d0": 1e-3, "d_coef": 8.0, "weight_decay": 0.01, "decouple": False},
    "no first moment": {"d0": 1e-3, "d_coef": 8.0, "betas": (0.0, 0.99), "beta3": 0.9},
}


def made(settings: dict[str, Any], home: str | None, folder) -> tuple[nn.Module, Any]:
    net = model()
    kind = pytest.importorskip("prodigyopt").Prodigy
    params = list(net.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.1}]
    optimizer = kind(groups, **settings)
    if home is None:
        return net, optimizer
    given = at_home(home, home, folder)
    return infinity.wrap_model(net, optimizer, given)


def values(net: nn.Module, optimizer: Any) -> tuple[dict, dict]:
    return (
        {name: value.detach().clone() for name, value in net.state_dict().items()},
        {
            i: {k: torch.as_tensor(v).clone() for k, v in of.items()}
            for i, of in optimizer.state_dict()["state"].items()
        },
    )


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize("what", SETTINGS)
def test_the_distance_and_the_weights_are_the_librarys(what, tmp_path):
    plain, ours = (made(SETTINGS[what], each, tmp_path) for each in (None, "hostile"))
    for net, optimizer in (plain, ours):
        steps(net, optimizer, 20)
    assert settings_of(plain[1]) == settings_of(ours[1])
    assert plain[1].param_groups[0]["d"] > 1e-3
    assert same(values(*plain), values(*ours))


def test_what_has_no_sums_is_stepped_too(tmp_path):
    """Claim: a parameter with gradients of zeros decays as the others; a group with a rate of zero
    stays; a step without gradients counts nothing."""

    def trained(home):
        net, optimizer = made({"d0": 1e-3}, home, tmp_path)
        optimizer.param_groups[1]["lr"] = 0.0
        optimizer.param_groups[0]["weight_decay"] = 0.1
        still = net[0][0].weight
        still.register_hook(torch.zeros_like)
        optimizer.step()
        steps(net, optimizer, 5)
        optimizer.param_groups[1]["lr"] = 1.0
        steps(net, optimizer, 5, seed=2)
        return values(net, optimizer), settings_of(optimizer)

    expected, found = trained(None), trained("host")
    assert same(expected[0], found[0]) and expected[1] == found[1]
    assert not torch.equal(found[0][0]["0.0.weight"], model().state_dict()["0.0.weight"])


def test_an_interrupted_measurement_is_repeated(tmp_path, monkeypatch):
    plain, ours = (made({"d0": 1e-3}, each, tmp_path) for each in (None, "nvme"))
    sums_of, count = Prodigy.sums_of, iter(range(1000))

    def interrupted(changed):
        if next(count) == 3:
            raise KeyboardInterrupt
        return sums_of(changed)

    monkeypatch.setattr(Prodigy, "sums_of", staticmethod(interrupted))
    x, target = torch.randn(4, 64), torch.zeros(4, dtype=torch.long)
    for net, _ in (plain, ours):
        nn.functional.cross_entropy(net(x), target).backward()
    plain[1].step()
    with pytest.raises(KeyboardInterrupt):
        ours[1].step()
    ours[1].step()
    assert same(values(*plain), values(*ours)) and settings_of(plain[1]) == settings_of(ours[1])


def test_sums_of_all_parameters_settle_the_distance():
    """The twin: the sums of a part settle another one."""
    group = {
        "lr": 1.0,
        "betas": (0.9, 0.99),
        "beta3": None,
        "d": 1e-6,
        "d0": 1e-6,
        "d_max": 1e-6,
        "d_coef": 1.0,
        "d_numerator": 0.0,
        "growth_rate": float("inf"),
        "decouple": True,
        "use_bias_correction": False,
        "fsdp_in_use": False,
        "k": 3,
    }
    whole, part = Prodigy([group]), Prodigy([group])
    whole.settle([(2e-4, 1.0), (2e-4, 1.0)])
    part.settle([(2e-4, 1.0)])
    assert whole.changes(0)["d_denom"] == 2.0 and part.changes(0)["d_denom"] == 1.0
    assert whole.changes(0)["d"] == 2e-4 and whole.changes(0)["k"] == 4


def test_a_step_in_the_backward_is_refused(tmp_path):
    net, optimizer = made({}, "host", tmp_path)
    with pytest.raises(UsageError, match="a number of all gradients"):
        with optimizer.step_in_backward():
            net(torch.ones(2, 64)).sum().backward()


def test_a_group_that_comes_later_is_stepped_by_the_first_ones_distance(tmp_path):
    """Method: the later group has the settings of a fresh one, as in the library."""

    def grown(home):
        net = model()
        late = list(net[2].parameters())
        for param in late:
            param.requires_grad_(False)
        kind = pytest.importorskip("prodigyopt").Prodigy
        optimizer = kind([p for p in net.parameters() if p.requires_grad], d0=1e-3, d_coef=8.0)
        if home is not None:
            net, optimizer = infinity.wrap_model(net, optimizer, {"params": home})
        steps(net, optimizer, 10)
        for param in late:
            param.requires_grad_(True)
        optimizer.add_param_group({"params": late})
        steps(net, optimizer, 3, seed=2)
        return values(net, optimizer), settings_of(optimizer)

    expected, found = grown(None), grown("host")
    assert same(expected[0], found[0]) and expected[1] == found[1]


def test_two_rates_are_refused(tmp_path):
    net, optimizer = made({}, "host", tmp_path)
    optimizer.param_groups[0]["lr"] = 0.5
    net(torch.ones(2, 64)).sum().backward()
    with pytest.raises(UsageError, match="lr=1.0 and lr=0.5"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()


def test_parameters_that_stay_outside_are_refused(tmp_path):
    """Claim: their sums would be missing."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    optimizer = pytest.importorskip("prodigyopt").Prodigy(net.parameters())
    net, optimizer = infinity.wrap_model(net, optimizer, {"params": "host"})
    net[1](net[0](torch.ones(1, 4)).double()).sum().backward()
    with pytest.raises(UsageError, match="does not move 2 of them"):
        optimizer.step()
