"""Two small layers at home, whose gradients a test gives: what a module's own tests work on.

**elsewhere**: a device whose memory the processor does not use, as a GPU's is; here it is the
processor's all the same, with a thread for each queue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import threaded_device
import torch
from torch import nn

import infinity
from infinity.runtime.engine import Engine
from infinity.runtime.registry import wrapped
from infinity.state.handle import ParamHandle

RAMP = torch.tensor([1.0, 2.0, 3.0, 4.0])  # inputs whose elements differ


class Elsewhere(threaded_device.ThreadedDevice):
    is_host = False


class Two(nn.Module):
    """Each layer is a unit. The gradient of a layer's weight has the layer's input in both of its
    rows, that of a bias is ones. A layer without an input gets none."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2, bias=bias) for _ in range(2))
        for param in self.parameters():
            nn.init.ones_(param)

    def forward(
        self, first: torch.Tensor | None = None, second: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = zip(self.layers, (first, second))
        return sum(layer(x).sum() for layer, x in given if x is not None)


@dataclass
class AtHome:
    """A wrapped Two."""

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
        """Brings these gradients, as Two tells."""
        self.model(first, second).backward()


def sgd(params: Any) -> torch.optim.Optimizer:
    """Takes a gradient off the weight as it is."""
    return torch.optim.SGD(params, lr=1.0)


def two_at_home(
    home: str = "host",
    folder: Any = None,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    bias: bool = False,
    **config: Any,
) -> AtHome:
    """Wraps a Two with all of it at ``home``."""
    model = Two(bias=bias)
    config = {"params": home, "optimizer": home, **config}
    if home == "nvme":
        config["nvme_paths"] = [str(folder)]
    model, optimizer = infinity.wrap_model(model, make(model.parameters()), config)
    return AtHome(model, optimizer, wrapped(model).engine)
