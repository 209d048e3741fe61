"""Uses by hand: what the code of a model's modules shows of weights that are used whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from infinity.ext.tiles.uses_by_hand import used_by_hand


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class ByFunction(Base):
    def forward(self, ids):
        return F.linear(self.table(ids), self.head.weight)


class ByMethod(Base):
    def forward(self, ids):
        return self.head(self.table(ids)).mean() + self.penalty(self.head)

    def penalty(self, layer):
        return layer.weight.pow(2).sum()


class ByName(Base):
    def forward(self, ids):
        weight = self.table.weight
        return self.table(ids) @ weight.T


class InLoops(Base):
    def forward(self, ids):
        x = self.table(ids)
        for _, layer in enumerate(self.layers):
            x = F.linear(x, layer.weight)
        return x


class InComprehension(Base):
    def forward(self, ids):
        x = self.head(self.table(ids))
        return x.mean() + sum(layer.weight.norm() for layer in self.layers)


def norm_of(module: nn.Module) -> torch.Tensor:
    return module.weight.norm()


class ByAnother(Base):
    def forward(self, ids):
        return self.head(self.table(ids)) / norm_of(self.head)


class ByForm(Base):
    """Asks for a weight's form alone."""

    def forward(self, ids):
        if self.head.weight is None or not isinstance(self.head.weight, nn.Parameter):
            return ids
        x = self.table(ids.to(self.table.weight.device)).to(self.head.weight.dtype)
        return self.head(x).view(-1, self.head.weight.shape[0])

    def reset(self):
        self.head.weight.data.zero_()


class Inside(nn.Module):
    """Has it in a submodule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ByFunction()

    def forward(self, ids):
        return self.inner(ids)


CASES = {
    ByFunction: {"head.weight"},
    ByMethod: {"head.weight"},
    ByName: {"table.weight"},
    InLoops: {"layers.0.weight", "layers.1.weight"},
    InComprehension: {"layers.0.weight", "layers.1.weight"},
    ByAnother: {"head.weight"},
    Inside: {"inner.head.weight"},
    ByForm: set(),
}


@pytest.mark.parametrize("kind", CASES)
def test_code_shows_what_is_used_by_hand(kind):
    """Reads the code of a forward, with what it calls. Twin: one that asks for dtype, device and
    shape alone, and uses values only outside of its forward."""
    model = kind()
    found = used_by_hand(model.modules())
    assert {name for name, param in model.named_parameters() if param in found} == CASES[kind]


def test_code_without_a_source_shows_nothing():
    """Claim: nothing is found, and nothing raised, for a class of `exec`; torch's own classes are
    not read."""
    there = {"nn": nn, "F": F, "Base": Base}
    exec("class Made(Base):\n    def forward(self, x): return F.linear(x, self.head.weight)", there)
    assert used_by_hand(there["Made"]().modules()) == set()
    assert used_by_hand(nn.TransformerEncoderLayer(4, 1, 4).modules()) == set()
