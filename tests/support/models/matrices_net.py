"""A net whose weights are fused projections, experts and convolutions, and its Muon: of the
parameters, or of their matrices in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn, optim

# Parameter -> the group's ``split``, and its matrices written out
SPLITS: Mapping[str, Any] = {
    "fused.weight": [8, 24, 16],
    "heads.weight": 3,
    "experts": "experts",
    "gated": [10, 14],
    "along.weight": "flat",
    "across.weight": None,
    "grouped.weight": 2,
    "plain.weight": None,
}
MATRICES: Mapping[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "fused.weight": lambda w: [w[:8], w[8:32], w[32:]],
    "heads.weight": lambda w: [w[:8], w[8:16], w[16:]],
    "experts": lambda w: [w[0], w[1], w[2]],
    "gated": lambda w: [w[0, :10], w[0, 10:], w[1, :10], w[1, 10:]],
    "along.weight": lambda w: [w.reshape(8, 12)],
    "across.weight": lambda w: [w.reshape(6, 36)],
    "grouped.weight": lambda w: [w[:3].reshape(3, 12), w[3:].reshape(3, 12)],
    "plain.weight": lambda w: [w],
}
RATE = {"lr": 0.02, "momentum": 0.9}


class MatricesNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused, self.heads = nn.Linear(24, 48, bias=False), nn.Linear(48, 24, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 24, 24) / 5)
        self.gated = nn.Parameter(torch.randn(2, 24, 24) / 5)
        self.along = nn.Conv1d(4, 8, 3, padding=1, bias=False)
        self.across = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.grouped = nn.Conv2d(8, 6, (3, 1), groups=2, bias=False)
        self.plain = nn.Linear(6, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.heads(self.fused(x)).tanh()
        hidden = hidden + sum(hidden @ each for each in (*self.experts, *self.gated)).tanh()
        pixels = hidden.view(len(x), 4, 6)
        along = self.along(pixels).unsqueeze(-1).expand(-1, -1, -1, 3)
        found = self.grouped(along).mean((2, 3)).unsqueeze(-1)
        found = found + self.across(pixels.unsqueeze(-1).expand(-1, -1, -1, 3)).mean(-1)
        return self.plain(found.tanh())


def matrices_net() -> MatricesNet:
    torch.manual_seed(0)
    return MatricesNet()


def muon_of(net: nn.Module) -> optim.Muon:
    """One Muon of all parameters, each in a group with its ``split``. torch checks their dimensions
    only as it is made."""
    params = dict(net.named_parameters())
    muon = optim.Muon([{"params": [params["plain.weight"]]}], **RATE)
    for name, split in SPLITS.items():
        if name != "plain.weight":
            muon.add_param_group({"params": [params[name]], "split": split})
    return muon


def trained(net: nn.Module, optimizer: optim.Optimizer, count: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        net(torch.randn(5, 24, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class OfMatrices:
    """torch's Muon of the matrices of a plain ``net``, each a parameter of its own."""

    def __init__(self, net: nn.Module):
        self._params = dict(net.named_parameters())
        self._matrices = {
            name: [nn.Parameter(each.detach().clone()) for each in MATRICES[name](param)]
            for name, param in self._params.items()
        }
        self._muon = optim.Muon([m for each in self._matrices.values() for m in each], **RATE)

    def step(self) -> None:
        for name, param in self._params.items():
            for matrix, grad in zip(self._matrices[name], MATRICES[name](param.grad)):
                matrix.grad = grad.clone()
        self._muon.step()
        with torch.no_grad():
            for name, param in self._params.items():
                param.copy_(_joined(self._matrices[name], param))

    def zero_grad(self) -> None:
        for param in self._params.values():
            param.grad = None

    def momentum(self) -> dict[str, torch.Tensor]:
        """The momentum of each parameter, in its shape."""
        state = self._muon.state
        return {
            name: _joined([state[m]["momentum_buffer"] for m in self._matrices[name]], param)
            for name, param in self._params.items()
        }


def _joined(matrices: list[torch.Tensor], param: torch.Tensor) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in matrices]).view(param.shape)
