"""Matrices: Muon steps the heads, blocks and experts that a group's `split` names.

Method: a net of fused projections, experts and convolutions takes steps beside torch's own Muon of
the matrices, which are written out by hand. Twins: without `split`, or with another one, the bits
differ; what cannot be split is refused by name, with nothing changed.
"""

from __future__ import annotations

import pytest
import torch
from matrices_net import SPLITS, OfMatrices, matrices_net, muon_of, trained
from models import at_home
from torch import nn, optim

import infinity
from infinity.errors import ConfigError, UsageError
from infinity.ext.class_step.matrices import multiplications, shapes_of

HOMES = ["device", "hostile"]


def wrapped(home: str, folder, **config) -> tuple[nn.Module, optim.Optimizer]:
    net = matrices_net()
    given = at_home(home, home, folder)
    return infinity.wrap_model(net, muon_of(net), given | config)


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def momentum(net: nn.Module, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        name: optimizer.state[param]["momentum_buffer"].clone()
        for name, param in net.named_parameters()
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("config", [{}, {"device_memory": "32KiB"}, {"host_memory": "1MiB"}])
def test_twenty_steps_have_the_bits_of_the_matrices_from_every_home(config, tmp_path):
    plain = matrices_net()
    theirs = OfMatrices(plain)
    trained(plain, theirs, 20)
    for home in HOMES:
        net, optimizer = wrapped(home, tmp_path)
        trained(net, optimizer, 20)
        assert equal(weights(net), weights(plain))
        assert equal(momentum(net, optimizer), theirs.momentum())


@pytest.mark.parametrize("name, other", [("fused.weight", [24, 24]), ("gated", "experts")])
def test_another_split_shows(name, other, tmp_path):
    """The twin."""
    found = []
    for change in (False, True):
        net, optimizer = wrapped("host", tmp_path)
        place = next(g for g in optimizer.param_groups if g.get("split") == SPLITS[name])
        if change:
            place["split"] = other
        trained(net, optimizer, 2)
        found.append(weights(net)[name])
    assert not torch.equal(*found)


def test_channels_last_and_views_have_the_same_matrices(tmp_path):
    """Claim: the matrices are those of the shape, whatever the strides at home are."""

    def steps(convolve):
        net = matrices_net()
        convolve(net)
        net, optimizer = infinity.wrap_model(net, muon_of(net), {"params": "host"})
        trained(net, optimizer, 3)
        return weights(net)["across.weight"]

    last = steps(lambda net: net.across.to(memory_format=torch.channels_last))
    # Kernels for other strides round otherwise, by the machine
    assert torch.allclose(steps(lambda net: None), last, atol=1e-3)


def test_states_load_both_ways(tmp_path):
    """Claim: a state dict has torch's form: one momentum in the shape of the parameter, and the
    group's `split`. A job goes on from it with the same bits."""
    net, optimizer = wrapped("host", tmp_path)
    trained(net, optimizer, 3)
    saved = optimizer.state_dict()
    shapes = [tuple(param.shape) for g in optimizer.param_groups for param in g["params"]]
    assert [tuple(of["momentum_buffer"].shape) for of in saved["state"].values()] == shapes
    assert all({*of} == {"momentum_buffer"} for of in saved["state"].values())
    plain = matrices_net()
    theirs = muon_of(plain)
    plain.load_state_dict(net.state_dict())
    theirs.load_state_dict(saved)
    again = infinity.wrap_model(plain, theirs, {"params": "nvme", "nvme_paths": [str(tmp_path)]})
    for each in (net, optimizer), again:
        trained(*each, 3, seed=2)
    assert equal(weights(net), weights(again[0]))
    assert equal(momentum(net, optimizer), momentum(*again))


@pytest.mark.parametrize(
    "shape, split, expected",
    [
        ((6, 4), None, [(6, 4)]),
        ((6, 4), "flat", [(6, 4)]),
        ((6, 4), 3, [(2, 4)] * 3),
        ((6, 4), [1, 5], [(1, 4), (5, 4)]),
        ((2, 6, 4), "experts", [(6, 4)] * 2),
        ((2, 6, 4), "flat", [(2, 24)]),
        ((2, 6, 4), 2, [(3, 4)] * 4),
        ((2, 3, 6, 4), "experts", [(6, 4)] * 6),
        ((6, 4, 3, 3), None, [(6, 36)]),
        ((6, 4, 3, 3), 2, [(3, 36)] * 2),
    ],
)
def test_the_matrices_have_every_element_once(shape, split, expected):
    assert shapes_of(shape, split) == expected


def test_the_cost_is_that_of_the_matrices():
    """Claim: heads cost less than their projection; a convolution what its flat matrix does."""
    assert multiplications((64, 64), None) == 64**3
    assert multiplications((64, 64), 8) == 8 * (8 * 64 * 8)
    assert multiplications((4, 64, 64), "experts") == 4 * 64**3
    assert multiplications((64, 8, 3, 3), None) == 64 * 72 * 64


REFUSED = {
    "a vector": ((6,), None, "0 of shape .6,. is no matrix: give it to a second optimizer"),
    "a number": ((), None, "is no matrix.* or to a group with use_muon=False"),
    "either": ((2, 6, 4), None, "may be experts or a convolution: set 'split'"),
    "no experts": ((6, 4), "experts", "has no dimension of experts"),
    "heads": ((6, 4), 4, "has 6 rows, which are not those of split=4"),
    "rows": ((6, 4), [2, 2], "has 6 rows, which are not those of split=.2, 2."),
    "a word": ((6, 4), "heads", 'group 1 has split=\'heads\': set it to "flat", "experts"'),
    "zero": ((6, 4), 0, "group 1 has split=0"),
    "true": ((6, 4), True, "group 1 has split=True"),
    "half": ((6, 4), [3, 3.0], r"group 1 has split=\[3, 3.0\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_matrix_is_refused_by_its_name(case):
    """Claim: before anything is changed: the model can be wrapped when the group is right."""
    shape, split, match = REFUSED[case]
    net = nn.ParameterList([torch.zeros(shape), torch.ones(6, 4)])
    muon = optim.Muon([net[1]])
    muon.add_param_group({"params": [net[0]], "split": split})
    with pytest.raises(ConfigError, match=match):
        infinity.wrap_model(net, muon, {"params": "host"})
    del muon.param_groups[1]
    infinity.wrap_model(net, muon, {"params": "host"})


def test_a_split_is_checked_before_a_step(tmp_path):
    net, optimizer = wrapped("host", tmp_path)
    trained(net, optimizer, 1)
    before = weights(net)
    net(torch.ones(2, 24)).sum().backward()
    optimizer.param_groups[1]["split"] = 7
    with pytest.raises(UsageError, match="step.*fused.weight of shape .48, 24. has 48 rows"):
        optimizer.step()
    assert equal(weights(net), before)
    optimizer.param_groups[1]["split"] = 6
    optimizer.step()
    assert not equal(weights(net), before)
    with pytest.raises(UsageError, match="add_param_group.*is no matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_where_it_cannot_be_honoured_it_is_refused():
    """Claim: in groups of another library's Muon, and of parameters that stay where they are."""
    library = pytest.importorskip("pytorch_optimizer")
    net = nn.Linear(4, 6, bias=False)
    group = {"params": [net.weight], "use_muon": True, "split": 2}
    with pytest.raises(ConfigError, match="split=2, which only torch.optim.Muon has here"):
        infinity.wrap_model(net, library.Muon([group]), {"params": "host"})
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 6, bias=False).double())
    muon = optim.Muon([{"params": list(net.parameters()), "split": 2}])
    with pytest.raises(ConfigError, match=r"1.weight of shape .6, 6. stays where it is"):
        infinity.wrap_model(net, muon, {"params": "host"})
