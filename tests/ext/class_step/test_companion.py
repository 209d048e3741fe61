"""Parameters that the engine does not move are trained with torch's bits, in the same step.

Words used here:

**outside**: a sparse embedding, an fp64 scale and complex weights of the model, and all parameters
of its loss.
"""

from __future__ import annotations

import copy

import pytest
import torch
from models import at_home
from torch import nn

import infinity
from infinity.errors import ConfigError, UsageError


class Net(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, sparse=sparse)
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))
        self.spectrum = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.body(self.table(ids).mean(1))
        filtered = torch.fft.rfft(x)[:, :8] * self.spectrum
        return (x.double() * self.scale).float() + torch.fft.irfft(filtered, n=16)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.center = (
            nn.Parameter(torch.tensor(1.5)),
            nn.Parameter(torch.zeros(16)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.temperature - self.center).pow(2).mean()


def one(**settings):
    """A net, its loss, and one optimizer over both."""
    torch.manual_seed(0)
    net, loss = Net(), Loss()
    params = [
        {"params": [*net.parameters()]},
        {"params": [*loss.parameters()], "lr": 0.02},
    ]
    return net, loss, torch.optim.SGD(params, lr=0.05, **settings)


def several():
    """The table has an optimizer of its own, and so has the loss, of classes without kernels."""
    torch.manual_seed(0)
    net, loss = Net(), Loss()
    rest = [param for name, param in net.named_parameters() if "table" not in name]
    return (
        net,
        loss,
        [
            torch.optim.SparseAdam(list(net.table.parameters()), lr=0.01),
            torch.optim.SGD(rest, lr=0.05, momentum=0.9),
            torch.optim.Adagrad(loss.parameters(), lr=0.05),
        ],
    )


FORMS = {"one": one, "with momentum": lambda: one(momentum=0.9), "several": several}


def config(home: str, folder) -> dict:
    return at_home(home, home, folder)


def train(net, loss, optimizer, *, steps: int = 4, seed: int = 1) -> list[float]:
    generator, losses = torch.Generator().manual_seed(seed), []
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for _ in range(steps):
        value = loss(net(torch.randint(0, 50, (4, 3), generator=generator)))
        value.backward()
        losses.append(value.item())
        for each in optimizers:
            each.step()
            each.zero_grad()
    return losses


def states(optimizer) -> list[dict]:
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    return [each.state_dict() for each in optimizers]


def same(one, other) -> bool:
    """Nested values, tensors by their bits."""
    if isinstance(other, torch.Tensor):
        if other.is_sparse:
            one, other = one.to_dense(), other.to_dense()
        return torch.equal(one, other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("form", FORMS)
def test_they_are_trained_with_torchs_bits(form, tmp_path):
    """Losses, weights and state dicts; and what is unwrapped goes on alike."""
    plain = FORMS[form]()
    expected = train(*plain)
    net, loss, optimizer = FORMS[form]()
    net, optimizer = infinity.wrap_model(net, optimizer, config("hostile", tmp_path))
    assert train(net, loss, optimizer) == expected
    assert same(dict(net.state_dict()), dict(plain[0].state_dict()))
    assert same(states(optimizer), states(plain[2]))
    net, optimizer = infinity.unwrap_model(net, optimizer)
    assert not [key for p in net.parameters() for key in vars(p) if "infinity" in key]
    assert train(net, loss, optimizer, seed=2) == train(*plain, seed=2)


@pytest.mark.parametrize("form", ["one", "several"])
def test_a_checkpoint_has_them_and_the_losss_values(form, tmp_path):
    """Twin: without the optimizers the loss keeps its own values."""
    net, loss, optimizer = FORMS[form]()
    net, optimizer = infinity.wrap_model(net, optimizer, config("host", tmp_path))
    train(net, loss, optimizer)
    infinity.save_checkpoint(tmp_path / "saved", net, optimizer)
    center = loss.center.detach().clone()
    expected = train(net, loss, optimizer, seed=2)
    again, its_loss, others = FORMS[form]()
    again, others = infinity.wrap_model(again, others, config("host", tmp_path))
    infinity.load_checkpoint(tmp_path / "saved", again)
    assert bool((its_loss.center == 0).all())
    infinity.load_checkpoint(tmp_path / "saved", again, others)
    assert torch.equal(its_loss.center, center)
    assert train(again, its_loss, others, seed=2) == expected


def test_torchs_state_dict_is_taken_in_mid_run():
    plain = one(momentum=0.9)
    train(*plain)
    net, loss, optimizer = one(momentum=0.9)
    net, optimizer = infinity.wrap_model(net, optimizer, config("host", None))
    net.load_state_dict(plain[0].state_dict()), loss.load_state_dict(plain[1].state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain[2].state_dict()))
    assert train(net, loss, optimizer, seed=3) == train(*plain, seed=3)


def test_a_group_of_another_module_joins_in_mid_run():
    """And a module that the model gets after the wrap."""
    plain, mine = one(), one()
    net, optimizer = infinity.wrap_model(mine[0], mine[2], config("host", None))
    runs = []
    for of_net, of_loss, its in ((plain[0], plain[1], plain[2]), (net, mine[1], optimizer)):
        torch.manual_seed(5)
        head = nn.Linear(16, 16)
        of_net.head = head
        its.add_param_group({"params": head.parameters(), "lr": 0.3})
        runs.append(
            train(lambda ids, net=of_net, head=head: head(net(ids)), of_loss, its)
            + [head.weight.sum().item()]
        )
    assert runs[0] == runs[1]


def test_clipping_counts_them(tmp_path):
    """`max_grad_norm` clips by the norm of all gradients, as torch's clip does in the loop."""

    def dense():
        torch.manual_seed(0)
        net, loss = Net(sparse=False), Loss()
        for param in (net.scale, net.spectrum):
            param.requires_grad_(False)
        params = [*(p for p in net.parameters() if p.requires_grad), *loss.parameters()]
        return net, loss, torch.optim.SGD(params, lr=0.5)

    net, loss, optimizer = dense()
    net, optimizer = infinity.wrap_model(
        net, optimizer, config("host", tmp_path) | {"max_grad_norm": 0.01}
    )
    train(net, loss, optimizer, steps=1)
    plain, its_loss, its = dense()
    generator = torch.Generator().manual_seed(1)
    its_loss(plain(torch.randint(0, 50, (4, 3), generator=generator))).backward()
    params = [param for group in its.param_groups for param in group["params"]]
    torch.nn.utils.clip_grad_norm_(params, 0.01)
    its.step()
    torch.testing.assert_close(loss.center, its_loss.center, rtol=1e-6, atol=1e-9)


def test_an_optimizer_of_nothing_of_the_model_is_refused():
    """Built from another one, by mistake. Twin: in a list with the model's own it steps by
    itself."""
    net, loss, optimizer = one()
    with pytest.raises(ConfigError, match="none is one of the model's"):
        infinity.wrap_model(net, torch.optim.SGD(loss.parameters(), lr=0.1), config("host", None))
    both = [torch.optim.SGD(net.body.parameters(), lr=0.1), torch.optim.Adagrad(loss.parameters())]
    net, (first, second) = infinity.wrap_model(net, both, config("host", None))
    assert second is both[1] and first is not both[0]
    with pytest.raises(UsageError, match="give the whole list"):
        infinity.save_checkpoint("nowhere", net, first)
