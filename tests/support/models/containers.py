"""Models whose repeated parts are never called themselves: containers, and modules that are used in
another way than by a call.

Each stack has six layers, so that its weights are several times what the least plan has on the
device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS = 32, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Stack(nn.Module, ABC):
    """Layers, and a head that is called. A kind of stack makes one layer, and runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 2)

    @abstractmethod
    def layer(self) -> nn.Module: ...

    @abstractmethod
    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.run(layer, x)
        return self.head(x).square().mean()


class Lists(Stack):
    def layer(self):
        return nn.ModuleList([nn.LayerNorm(WIDTH), Attention(), FeedForward()])

    def run(self, layer, x):
        norm, attention, feed = layer
        return feed(attention(norm(x)))


class Recomputed(Lists):
    """Checkpoints a part of a layer, which holds what is called inside and is no module."""

    def run(self, layer, x):
        norm, attention, feed = layer
        return feed(checkpoint(lambda x: attention(norm(x)), x, use_reentrant=False))


class RecomputedByTasks(Lists):
    """Checkpoints all of a layer, in a backward inside the backward."""

    def run(self, layer, x):
        return checkpoint(partial(super().run, layer), x, use_reentrant=True)

    def forward(self, x):
        return super().forward(x.detach().requires_grad_())


class Names(Stack):
    """A layer gives names to a module and to a parameter of its own."""

    def layer(self):
        made = nn.Module()
        made.inner = nn.ModuleDict({"feed": FeedForward()})
        made.scale = nn.Parameter(torch.ones(WIDTH))
        return made

    def run(self, layer, x):
        return layer.scale * layer.inner["feed"](x * layer.scale)


class Parameters(Stack):
    """Views of weights are kept and used twice."""

    def layer(self):
        sizes = {"up": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH)}
        return nn.ParameterDict({k: torch.randn(size) / 8 for k, size in sizes.items()})

    def run(self, layer, x):
        up, down = layer["up"].t(), layer["down"]
        return F.linear(torch.tanh(x @ up), down) + F.linear(torch.relu(x @ up), down)


class Functions(Stack):
    """The layers could be called, but functions use their weights; two are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[4][0].weight = self.layers[1][0].weight

    def layer(self):
        return nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def run(self, layer, x):
        for each in layer:
            x = torch.tanh(F.linear(x, each.weight, each.bias))
        return x


class OtherMethod(Stack):
    """Some layers are called, others are used by another method, or piece by piece."""

    class Layer(nn.Sequential):
        def attend(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)

    def layer(self):
        return self.Layer(Attention(), FeedForward())

    def run(self, layer, x):
        if layer is self.layers[0]:
            return layer(x)
        x = layer.attend(x)
        return layer[1](x) + layer[1](x * 0.5)


class Mixture(Stack):
    """The last expert of each layer gets no token."""

    def layer(self):
        experts = nn.ModuleList(
            [nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(3)]
        )
        return nn.ModuleDict({"gate": nn.Linear(WIDTH, 2), "experts": experts})

    def run(self, layer, x):
        weight, chosen = layer["gate"](x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, (up, down) in enumerate(layer["experts"]):
            if (its := chosen == number).any():
                out[its] = down(F.silu(up(x[its]))) * weight[its][:, None]
        return out


KINDS = (Lists, Recomputed, RecomputedByTasks, Names, Parameters, Functions, OtherMethod, Mixture)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 5, WIDTH, generator=generator) for _ in range(3)]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Trains, then computes a loss without gradients. Returns all losses."""
    losses = []
    for batch in batches():
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, model(batches()[0]).item()]
