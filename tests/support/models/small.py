"""Small small layers at home, whose gradients a test gives: what a module's own tests work on.

**elsewhere**: a device whose memory the processor does not use, as a GPU's is; here it is the
processor's all the same, with a thread for each queue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import threaded_device
import torch
from inside import parts_of
from models import at_home, with_least
from torch import nn

import infinity
from infinity.core.run.engine import Engine
from infinity.core.units.handle import ParamHandle

RAMP = torch.tensor([1.0, 2.0, 3.0, 4.0])  # inputs whose elements differ


class Elsewhere(threaded_device.ThreadedDevice):
    is_host = False


class Small(nn.Module):
    """Six layers, each a unit, of which the first two can get gradients. That of a layer's weight
    has the layer's input in both of its rows, that of a bias is ones. Six, for the gradients of so
    many do not fit beside each other in the least memory."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2, bias=bias) for _ in range(6))
        for param in self.parameters():
            nn.init.ones_(param)

    def forward(
        self, first: torch.Tensor | None = None, second: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = zip(self.layers, (first, second), strict=False)
        return sum(layer(x).sum() for layer, x in given if x is not None)


@dataclass
class AtHome:
    """A wrapped Small."""

    model: nn.Module
    optimizer: Any
    engine: Engine

    @property
    def handles(self) -> list[ParamHandle]:
        """Those of all parameters."""
        return [param._infinity for param in self.model.parameters()]

    def backward(
        self, first: torch.Tensor | None = None, second: torch.Tensor | None = None
    ) -> None:
        """Brings these gradients, as Small tells."""
        self.model(first, second).backward()


def sgd(params: Any) -> torch.optim.Optimizer:
    """Takes a gradient off the weight as it is."""
    return torch.optim.SGD(params, lr=1.0)


def small_at_home(
    home: str = "host",
    folder: Any = None,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    bias: bool = False,
    **config: Any,
) -> AtHome:
    """Wraps a Small with all of it at ``home``. If that is a disk the host has the least memory,
    which forces the gradients there, too."""
    model = Small(bias=bias)
    optimizer = make(model.parameters())
    config = at_home(home, home, folder, **config)
    if home == "nvme":
        config = with_least(model, optimizer, config)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    return AtHome(model, optimizer, parts_of(model).engine)
