"""Jobs of ranks with models that are mostly their table (see `ranks`)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from inside import parts_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from infinity.core.machine.tiers import Tier

ROWS, WIDTH = 8192, 64


class Alive(TorchDispatchMode):
    """Counts the tensors of ``nbytes`` that operations made and that are alive, at most."""

    def __init__(self, nbytes: int):
        super().__init__()
        self._nbytes, self._made, self.most = nbytes, weakref.WeakSet(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {each.data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.nbytes == self._nbytes:
            if out.data_ptr() not in given:
                self._made.add(out)
        self.most = max(self.most, len({each.data_ptr() for each in self._made}))
        return out


class Mostly(nn.Module):
    def __init__(self, *, tied: bool):
        super().__init__()
        self.table, self.layer = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.layer(self.table(ids)))


def whole_gradients(shard: str, *, tied: bool) -> dict[str, Any]:
    """Two steps. What the device holds at most: whole gradients of the table, all bytes that are
    charged, and those that are planned."""
    torch.manual_seed(0)
    model = Mostly(tied=tied)
    whole = model.table.weight.nbytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"params": "host", "optimizer": "host", "shard": shard}
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    most = 0
    for _ in range(2):
        ids = torch.randint(0, ROWS, (4,))
        loss = nn.functional.cross_entropy(model(ids), ids)
        with Alive(whole) as alive:
            loss.backward()
        most = max(most, alive.most)
        optimizer.step()
        optimizer.zero_grad()
    tier = infinity.stats(model).tiers[Tier.DEVICE]
    terms = parts_of(model).planned.plan.terms[Tier.DEVICE]
    infinity.unwrap_model(model, optimizer)
    return {
        "whole": whole,
        "most": most,
        "weights": terms["gathered weights"],
        "autograd": terms.get("gradients in the backward", 0),
        "charged": tier.peak_nbytes,
        "planned": tier.planned_nbytes,
    }
