"""What the tests of microbatch share.

Words used here: **whole**: the same model run by plain torch on the whole batch. **by hand**: by
plain torch, with every block called on chunk after chunk and the results put together. **close**:
rtol 1e-4, atol 1e-6 in fp32, for sums over samples are added in another order; a sample left out,
counted twice or given another's mask is off by 1e-2 and more. **refused**: an InfinityError, at the
wrap or in the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import TinyTransformer, seeded, transformer
from torch import nn

import infinity

SEED = 80
LR = 0.1
WIDTH, LENGTH = 16, 5
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
DEVICE = {"params": "device", "optimizer": "device"}

State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def no_hooks_left() -> Iterator[None]:
    """Whatever happened, torch's stack of saved-tensor hooks is as it was."""
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)


def rows_of(rows: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        rows, *(shape or (LENGTH, WIDTH)), generator=torch.Generator().manual_seed(SEED + seed)
    )


class Wrapped:
    """A wrapped model with its optimizer."""

    def __init__(self, build: Callable[[], nn.Module], **config: Any) -> None:
        model = seeded(SEED, build)
        self.model, self.optimizer = infinity.wrap_model(model, sgd(model), config)

    def moved(self, edge: str) -> int:
        return infinity.stats(self.model).edges[edge].nbytes


def gradients_of(model: nn.Module) -> State:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def differentiated(model: nn.Module, compute: Callable[[nn.Module], torch.Tensor]) -> State:
    """The loss and every gradient."""
    torch.manual_seed(SEED)
    loss = compute(model)
    loss.backward()
    return {"loss": loss.detach().clone()} | gradients_of(model)


def assert_like_whole(
    build: Callable[[], nn.Module], compute: Callable[[nn.Module], torch.Tensor], **config: Any
) -> None:
    """Loss and gradients are close to those of the whole batch in plain torch."""
    whole = differentiated(seeded(SEED, build), compute)
    found = differentiated(Wrapped(build, **{"micro_batch": 2, **DEVICE, **config}).model, compute)
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(
            found[name], value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_right_or_refused(
    build: Callable[[], nn.Module], compute: Callable[[nn.Module], torch.Tensor], **config
) -> None:
    try:
        assert_like_whole(build, compute, **config)
    except infinity.InfinityError as refused:
        assert "micro_batch" in str(refused)


def quiet() -> TinyTransformer:
    return transformer(SEED, blocks=3, dropout=0.0)


class Stack(nn.Module):
    """Blocks of a class between a layer and a mean; ``call`` says how a block is called with the
    step's input."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        call: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    ):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.call = call or (lambda block, x: block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x


class Simple(nn.Module):
    """A block of one layer and ``function(layer's output, **what it was called with)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layer(x).tanh() + x, *args, **kwargs)


def stack(function: Callable[..., Any], call: Callable | None = None) -> Callable[[], nn.Module]:
    return lambda: Stack(lambda: Simple(function), call)


def mean_square(rows: int = 7, *shape: int) -> Callable[[nn.Module], torch.Tensor]:
    weights = (
        rows_of(rows, seed=5)[:, :1, :1] ** 2 if not shape else 1.0
    )  # samples count differently
    return lambda model: (model(rows_of(rows, *shape)).square() * weights).mean()


MASK = (rows_of(7, 1, LENGTH, LENGTH, seed=9) > -0.5).logical_or(
    torch.eye(LENGTH, dtype=torch.bool)
)


def attend(
    h: torch.Tensor, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    heads = h.unflatten(-1, (2, -1)).transpose(1, 2)
    scores = heads @ heads.transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores.masked_fill(~mask, -1e4)
    return (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)
