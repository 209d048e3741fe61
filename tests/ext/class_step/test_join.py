"""A later optimizer over a wrapped model: it takes over what others stepped, as in torch.

Method: two stages of training beside plain torch, from every home, with a gradient left from the
first one. Twins: a step of the former optimizer is refused; where the arrays are shared with a
parameter that the former one keeps, nothing changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from models import at_home
from own_optimizers import Trusting
from small_net import furthest, model, steps
from torch import nn, optim
from twins import of_this_test, twin

import infinity
from infinity.core import seams
from infinity.errors import ConfigError, UsageError

HOMES = ["device", "hostile"]
MADE: dict[str, Callable] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "of a script": Trusting,
}


def wrap(net: nn.Module, optimizer: optim.Optimizer, home: str | None, folder):
    if home is None:
        return net, optimizer
    given = at_home(home, home, folder)
    return infinity.wrap_model(net, optimizer, given)


def two_stages(first: str, second: str, home: str | None, folder, *, head: bool) -> dict:
    """``head``: the first stage trains the last layer alone."""
    net = model()
    for name, param in net.named_parameters():
        param.requires_grad_(not head or name.startswith("3."))
    params = [param for param in net.parameters() if param.requires_grad]
    net, former = wrap(net, MADE[first](params), home, folder)
    steps(net, former, 3)
    net(torch.ones(2, 64)).square().sum().backward()
    net.requires_grad_(True)
    later = MADE[second](net.parameters())
    if home is not None:
        net, later = infinity.wrap_model(net, later)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with pytest.raises(UsageError, match="is another optimizer's of this model"):
            former.step()
        assert furthest(dict(net.state_dict()), before) == 0
    steps(net, later, 3, seed=2)
    if home is not None:
        infinity.save_checkpoint(folder / "saved", net, later)
        steps(net, later, 1)
        infinity.load_checkpoint(folder / "saved", net, later)
        net, later = infinity.unwrap_model(net, later)
    steps(net, later, 2, seed=3)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(
    "first, second",
    [
        ("AdamW", "AdamW"),
        ("AdamW", "SGD"),
        ("SGD", "Adafactor"),
        ("Adafactor", "RMSprop"),
        ("RMSprop", "of a script"),
    ],
)
def test_a_later_optimizer_takes_over_as_in_torch(first, second, head, home, tmp_path):
    """Claim: with moments of its own, and the gradients that are there."""
    plain = partial(two_stages, first, second, None, tmp_path, head=head)
    expected = twin(plain, first, second, head)
    found = two_stages(first, second, home, tmp_path, head=head)
    assert furthest(found, expected) < 2e-6


def test_moments_that_go_on_would_show(tmp_path):
    """The twin: the former optimizer, with its moments, gives other weights."""
    expected = two_stages("AdamW", "AdamW", None, tmp_path, head=False)
    net = model()
    optimizer = MADE["AdamW"](net.parameters())
    steps(net, optimizer, 3)
    net(torch.ones(2, 64)).square().sum().backward()
    steps(net, optimizer, 3, seed=2)
    steps(net, optimizer, 2, seed=3)
    assert furthest(dict(net.state_dict()), expected) > 1e-4


@pytest.mark.parametrize("home", HOMES)
def test_the_former_goes_on_with_what_it_keeps(home, tmp_path):
    """Claim: a later optimizer of one layer, once the former has let go of it; both are saved and
    given back."""

    def trained(home):
        net = model()
        net, former = wrap(net, MADE["AdamW"](net.parameters()), home, tmp_path)
        steps(net, former, 2)
        last = list(net[3].parameters())
        later = MADE["SGD"](last)
        if home is not None:
            net, later = infinity.wrap_model(net, later)
        kept = [p for p in former.param_groups[0]["params"] if all(p is not q for q in last)]
        former.param_groups[0]["params"] = kept
        for each in last:
            former.state.pop(each, None)
        for seed in (2, 3):
            steps(net, former, 1, seed)
            steps(net, later, 1, seed)
        net.zero_grad()
        if home is not None:
            infinity.save_checkpoint(tmp_path / "saved", net, [former, later])
            infinity.load_checkpoint(tmp_path / "saved", net, [former, later])
            net, (former, later) = infinity.unwrap_model(net, [former, later])
        steps(net, former, 1)
        steps(net, later, 1)
        return {name: value.detach().clone() for name, value in net.state_dict().items()}

    assert furthest(trained(home), twin(lambda: trained(None), of_this_test())) < 2e-6


def test_dtypes_of_moments_are_the_later_classs(tmp_path):
    """Claim: from 8 bits to fp32, and back."""
    kind = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    net = model()
    net, _ = infinity.wrap_model(net, kind(net.parameters()), {"params": "host"})
    for make, dtypes in (
        (MADE["AdamW"], {torch.float32}),
        (kind, {torch.float32, torch.uint8}),
    ):
        net, later = infinity.wrap_model(net, make(net.parameters()))
        steps(net, later, 2)
        assert {p._infinity.flat_param.spec.moment_dtype for p in net.parameters()} == dtypes
        for param in net.parameters():
            flat_param = param._infinity.flat_param
            found = {name: array.dtype for name, array in flat_param.arrays.items()}
            assert found == flat_param.spec.array_dtypes()


def test_what_shares_arrays_with_another_is_refused(tmp_path):
    """Claim: a parameter stored with one that the former keeps, a parameter of two later ones, and
    an option for one optimizer; nothing has changed, and the former goes on."""
    net = model()
    net, former = infinity.wrap_model(net, MADE["AdamW"](net.parameters()), {"params": "host"})
    steps(net, former, 1)
    net, former = infinity.unwrap_model(net, former)
    plain, other = copy.deepcopy((net, former))
    net, former = infinity.wrap_model(net, former, {"params": "host"})
    weight = net[3].weight
    with pytest.raises(UsageError, match="3.weight is stored with .* as 3.bias"):
        infinity.wrap_model(net, MADE["SGD"]([weight]))
    with pytest.raises(ConfigError, match="3.weight is in the optimizers 0 and 1"):
        infinity.wrap_model(net, [MADE["SGD"]([weight]), MADE["SGD"]([weight])])
    for each in ((plain, other), (net, former)):
        steps(*each, 2)
    assert furthest(dict(net.state_dict()), dict(plain.state_dict())) < 2e-6
    net = model()
    given = {"params": "host", "max_grad_norm": 1.0}
    net, former = infinity.wrap_model(net, MADE["AdamW"](net.parameters()), given)
    with pytest.raises(ConfigError, match="max_grad_norm with 2 optimizers"):
        infinity.wrap_model(net, MADE["SGD"](net[3].parameters()))
    net, later = infinity.wrap_model(net, MADE["AdamW"](net.parameters()))
    steps(net, later, 1)


def test_the_only_one_left_steps_in_the_backward():
    """Claim: as an optimizer that was given at the wrap. Twin: beside another it is refused."""
    net = model()
    net, _ = infinity.wrap_model(net, MADE["AdamW"](net[3].parameters()), {"params": "host"})
    net, first = infinity.wrap_model(net, MADE["AdamW"](net[0].parameters()))
    with pytest.raises(UsageError, match="one of several optimizers"), first.step_in_backward():
        pass
    net, later = infinity.wrap_model(net, MADE["SGD"](net.parameters()))
    with later.step_in_backward():
        net(torch.ones(2, 64)).sum().backward()
    later.step()


def test_only_by_its_extension_a_wrapped_model_gets_another_optimizer(monkeypatch, tmp_path):
    """Method: wraps without the extension, and trains. Twin: with it the optimizer joins."""
    kept = [each for each in seams.EXTENSIONS if "class_step.join." not in str(each)]
    for extensions in (kept, [*seams.EXTENSIONS]):
        monkeypatch.setattr(seams, "EXTENSIONS", extensions)
        net = model()
        net, former = wrap(net, optim.AdamW(net.parameters()), "host", tmp_path)
        later = optim.AdamW(net.parameters())
        if extensions is kept:
            with pytest.raises(UsageError, match="wrapped already"):
                infinity.wrap_model(net, later)
            steps(net, former, 1)
        else:
            steps(*infinity.wrap_model(net, later), 1)
