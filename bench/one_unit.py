"""one_unit: a model of one unit of any size, whose arithmetic takes no time: its gradient is a copy
of one that was made before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import infinity


class _Through(torch.autograd.Function):
    """Hands its input on, and the weight's gradient out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Any:
        ctx.grad = grad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        return given, ctx.grad.clone(), None  # new, so that autograd may take it over


class Block(nn.Module):
    """One bf16 weight of ``count`` elements."""

    def __init__(self, count: int):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.zeros(count, dtype=torch.bfloat16))
        grad = torch.randn(count, generator=generator).mul_(1e-3)
        self.made = [grad.to(torch.bfloat16)]  # a list: no attribute that a wrap looks at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Through.apply(x, self.weight, self.made[0])


class OneUnit:
    """A model of one such block, with AdamW. ``home``: of all its state; None: plain torch."""

    def __init__(self, count: int, home: str | None, folder: str = "", **config: Any):
        self.x = torch.zeros(1, requires_grad=True)
        self.model: Any = nn.Sequential(Block(count))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if home is not None:
            config |= {"params": home, "optimizer": home, "nvme_paths": [folder]}
            self.model, self.optimizer = infinity.wrap_model(self.model, self.optimizer, config)

    def gather(self) -> None:
        """Brings the weight for a forward without a graph."""
        with torch.no_grad():
            self.model(self.x)

    def add(self) -> None:
        """Lands the gradient, added to what is there."""
        self.model(self.x).sum().backward()

    def set(self) -> None:
        """Lands the gradient where none is."""
        self.optimizer.zero_grad()
        self.add()

    def close(self) -> None:
        """Takes the model back from the engine."""
        infinity.unwrap_model(self.model, self.optimizer)
