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


class ByFunctions(Stack):
    """A Function saves weights that no operation of the forward uses; a view of one, too."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, other):
            ctx.save_for_backward(x, weight, other.t())
            return x * 0.5

        @staticmethod
        def backward(ctx, grad):
            x, weight, transposed = ctx.saved_tensors
            by_x = grad.flatten(0, -2).t() @ x.flatten(0, -2)
            return grad @ weight, by_x, by_x * transposed.t()

    def layer(self):
        return nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), nn.ParameterList([torch.ones(WIDTH, WIDTH)])]
        )

    def run(self, layer, x):
        return torch.tanh(self.Scaled.apply(x, layer[0].weight, layer[1][0]))


class Swept(Stack):
    """All layers are used, then all again."""

    def layer(self):
        return FeedForward()

    def run(self, layer, x):
        return layer(x)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return super().forward(x)


class Returned(Swept):
    """The layers are used inside of each other: the first one first and last."""

    def around(self, x, depth=0):
        if depth == LAYERS:
            return x
        layer = self.layers[depth]
        return layer(self.around(x + layer(x), depth + 1))

    def forward(self, x):
        return self.head(self.around(x)).square().mean()


class Penalized(Swept):
    """A penalty uses all weights after the layers; without gradients, they are used once more."""

    def forward(self, x):
        loss = super().forward(x)
        loss = loss + 0.001 * sum(layer.up.weight.square().sum() for layer in self.layers)
        with torch.no_grad():
            largest = max(layer.down.weight.abs().max() for layer in self.layers)
        return loss + largest


class Several(Stack):
    """One operation uses the weights of many layers."""

    def layer(self):
        return nn.Linear(WIDTH, WIDTH)

    @abstractmethod
    def several(self, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        """Uses the weights of all layers."""

    def run(self, layer, x):
        return torch.tanh(layer(x))

    def forward(self, x):
        x = x + torch.tanh(self.several(x, [layer.weight for layer in self.layers]))
        return self.head(x).square().mean()


class Chained(Several):
    def several(self, x, weights):
        return x @ torch.linalg.multi_dot(weights)


class Contracted(Several):
    def several(self, x, weights):
        return torch.einsum("bsd,de,ef,fg->bsg", x, *weights[:3])


class Diagonal(Several):
    def several(self, x, weights):
        return F.linear(x.repeat(1, 1, LAYERS), torch.block_diag(*weights))[..., :WIDTH]


class Interpolated(Several):
    def several(self, x, weights):
        return x @ torch.lerp(*weights[:3])


class Products(Several):
    """The forward has room for each two; their gradients beside them are one too many."""

    def several(self, x, weights):
        for one, other in zip(weights[::2], weights[1::2]):
            x = x @ torch.mm(one, other)
        return x


MANY = (Chained, Contracted, Diagonal, Interpolated, Products)
KINDS = (
    Lists,
    Recomputed,
    RecomputedByTasks,
    Names,
    Parameters,
    Functions,
    OtherMethod,
    Mixture,
    ByFunctions,
)
AGAIN = (Swept, Returned, Penalized)


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
