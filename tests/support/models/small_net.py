"""A small model, and its steps: beside the optimizer of a library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from models import at_home
from torch import nn, optim

import infinity


def stepped_by_class(params, **settings) -> optim.Optimizer:
    """Makes an optimizer without a rule, which may step any part of a parameter."""
    from pytorch_optimizer import AdaBelief

    return AdaBelief(params, **{"lr": 1e-2, "weight_decay": 0.1} | settings)


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(64, 7))


def steps(net: nn.Module, optimizer: optim.Optimizer, count: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(16, 64, generator=generator)
        target = torch.randint(0, 7, (16,), generator=generator)
        nn.functional.cross_entropy(net(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(make: Callable, home: str | None, folder, **config):
    """The net and its optimizer: plain, or wrapped with all at ``home`` that ``config`` does not
    put elsewhere."""
    net = model()
    optimizer = make(list(net.parameters()))
    if home is None:
        return net, optimizer
    config = {"params": home, "optimizer": home} | config
    return infinity.wrap_model(net, optimizer, at_home(folder=folder, **config))


def furthest(one: dict, other: dict) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def same(one: tuple, other: tuple) -> bool:
    return all(torch.equal(one[0][n], other[0][n]) for n in one[0]) and all(
        torch.equal(one[1][i][k], other[1][i][k]) for i in one[1] for k in one[1][i]
    )
