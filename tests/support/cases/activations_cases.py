"""What the tests of activations share.

Words used here: **home**, **least**, **child** as in `models.py`. **at home**: with
`Config(activations=...)` as "host" or "nvme", or as "auto" with so little device memory that most
leave it. **scenario**: a model and a loop over it; what it yields are the losses (or whatever else
has to be the same). **moved**: bytes over the edge "device->host". **small ones too**: with the
size below which activations stay set to one byte, so that awkward tensors can be small.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    at_home,
    least_host_memory,
    loss_of,
    seeded,
    tokens,
    transformer,
)
from runs import adamw
from torch import nn

import infinity
from infinity.core.run import activation_store

SEED = 70
LR = 1e-2
KIB, MIB = 1024, 1024 * 1024

both_homes = pytest.mark.parametrize("home", ("host", "nvme"))
Loop = Callable[[nn.Module, torch.optim.Optimizer], Iterator[torch.Tensor]]
Scenario = tuple[Callable[[], nn.Module], Loop]


@pytest.fixture(autouse=True)
def no_hooks_left() -> Iterator[None]:
    """Whatever happened, torch's stack of saved-tensor hooks is as it was. What a failure left is
    collected here."""
    yield
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def configuration(
    home: str, build: Callable[[], nn.Module], folder: Path, **more: Any
) -> dict[str, Any]:
    """Everything at the tier that ``home`` names, under the least host memory; "auto" spills from
    the device."""

    def a_pair():
        model = build()
        return model, adamw(model, LR)

    if home == "device":
        return {"params": "device", "optimizer": "device", "activations": "device", **more}
    if home == "host":
        return {"params": "host", "optimizer": "host", "activations": "host", **more}
    if home == "auto":
        config = {"params": "device", "optimizer": "device", "activations": "auto", **more}
        model, _ = infinity.wrap_model(*a_pair(), config)
        return {
            "device_memory": infinity.stats(model).tiers["device"].planned_nbytes + spare(),
            **config,
        }
    config = at_home("nvme", "nvme", folder, activations="nvme", **more)
    return {"host_memory": least_host_memory(*a_pair(), config), **config}


def spare() -> int:
    """Device memory that "auto" has for activations: for one or two of them."""
    return max(2 * KIB, 2 * activation_store.SMALLEST_NBYTES)


def moved(model: nn.Module) -> int:
    return infinity.stats(model).edges["device->host"].nbytes


def trained(scenario: Scenario, config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """What a scenario yields and leaves, with how much it moved. Peaks are held to the plan on the
    way."""
    build, loop = scenario
    model = seeded(SEED, build)
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), config)
    torch.manual_seed(SEED)
    found = {f"yield {i}": value.detach().clone() for i, value in enumerate(loop(model, optimizer))}
    for tier, account in infinity.stats(model).tiers.items():
        assert account.peak_nbytes <= account.planned_nbytes, f"{tier}: {account}"
        assert account.budget_nbytes is None or account.peak_nbytes <= account.budget_nbytes, (
            f"{tier}: {account}"
        )
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    return found, moved(model)


def stepped(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def rows_of(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + step))


ROWS, WIDTH = 12, 24


class Between(nn.Module):
    """Two blocks, each a Linear, then ``middle``, then a Linear."""

    class Block(nn.Module):
        def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.first, self.second, self.middle = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                middle,
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.middle(self.first(x)))

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(middle) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def language(step: int, rows: int = 32) -> torch.Tensor:
    return tokens(SEED + step, rows=rows)


def a_transformer(**recompute: Any) -> Callable[[], nn.Module]:
    def build():
        model = transformer(SEED, blocks=2)
        model.around = recompute.get("around")
        for block in model.blocks:
            block.inside = recompute.get("inside")
        return model

    return build


def language_loop(model, optimizer):
    for step in range(3):
        yield stepped(optimizer, loss_of(model, language(step)))


def two_live_graphs(model, optimizer):
    for step in range(2):
        one, other = loss_of(model, language(step)), loss_of(model, language(step + 10))
        one.backward()
        third = loss_of(model, language(step + 20, rows=8))
        other.backward()
        yield stepped(optimizer, third)
        yield one + other


def a_graph_that_is_dropped(model, optimizer):
    for step in range(3):
        loss_of(model, language(step + 10))
        dropped = loss_of(model, language(step + 20))
        yield dropped.detach()
        loss = loss_of(model, language(step))
        del dropped
        yield stepped(optimizer, loss)


def a_backward_in_parts(model, optimizer):
    """Only the last block's activations are asked for first, then all."""
    for step in range(2):
        kept = []
        handle = model.blocks[0].register_forward_hook(lambda module, args, out: kept.append(out))
        loss = loss_of(model, language(step))
        handle.remove()
        (grad,) = torch.autograd.grad(loss, kept[0], retain_graph=True)
        yield grad
        kept[0].backward(grad, retain_graph=True)
        yield stepped(optimizer, loss)


def wrapped(
    build: Callable[[], nn.Module], config: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(SEED, build)
    return infinity.wrap_model(model, adamw(model, LR), config)


@pytest.fixture(scope="module")
def right() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return trained(
        (a_transformer(), language_loop), configuration("device", a_transformer(), Path())
    )[0]
