"""Backward: holds a unit for as long as a backward needs it."""

from __future__ import annotations

import torch
from models import seeded
from torch import nn

import infinity
from infinity.runtime.registry import wrapped


class Block(nn.Module):
    """A layer, and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def test_a_unit_is_held_until_what_gets_gradients_has_landed():
    """Method: when a backward comes to the input, which units but the first are held. Once it has been seen that a parameter gets no
    gradient nothing waits for it. Twin: in the first backward all wait for theirs."""
    model = seeded(3, lambda: nn.Sequential(*(Block() for _ in range(4))))
    config = {"params": "host", "optimizer": "host", "device_memory": "1MiB"}  # a window for all: none has to make room
    model, optimizer = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    engine, seen = wrapped(model).engine, []
    for _ in range(2):
        x = torch.ones(2, 8, requires_grad=True)
        x.register_hook(lambda _: seen.append([engine.prefetcher.is_held(unit) for unit in engine.units[1:]]))
        model(x).sum().backward()
        assert not any(map(engine.prefetcher.is_held, engine.units))
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [[True] * 3, [False] * 3]
