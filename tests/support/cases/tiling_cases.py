"""What the tests of tiling share.

Words used here:

**pair**: two equal models, one wrapped within `DEVICE` bytes so that its large layer runs in tiles,
one plain. **close**: within 1e-5 of the largest element, relative; sums over tiles are added in
another order than one product. **twin**: the same model with a budget that holds it, which must not
be tiled.
"""

from __future__ import annotations

import torch
from inside import parts_of
from lazily import Lazily
from models import at_home, seeded
from runs import adamw
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.machine.tiers import Tier

pytorch_utils = Lazily("transformers.pytorch_utils")

SEED = 11
KIB = 1024
DEVICE = 272 * KIB  # a tile is then 64 KiB, and in bf16 its sum in fp32 is twice as large
WIDTH, ROWS = 64, 2100  # 525 KiB in fp32, and a ragged last tile


class Holder(nn.Module):
    """One large layer between two small ones."""

    def __init__(self, layer: nn.Module, outputs: int, *, embeds: bool = False) -> None:
        super().__init__()
        self.before = nn.Identity() if embeds else nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.scale = nn.Parameter(torch.randn(outputs))
        self.around: dict | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        y = self.layer(x) if self.around is None else checkpoint(self.layer, x, **self.around)
        return y * self.scale


class Wide(nn.Module):
    """A Conv1D whose inputs are many: its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.layer = nn.Linear(WIDTH, WIDTH), pytorch_utils.Conv1D(WIDTH, ROWS)
        self.around: dict | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x).repeat(*[1] * (x.dim() - 1), 33)[..., :ROWS]
        return self.layer(x) if self.around is None else checkpoint(self.layer, x, **self.around)


BUILDERS = {
    "linear": lambda: Holder(nn.Linear(WIDTH, ROWS), ROWS),
    "linear without bias": lambda: Holder(nn.Linear(WIDTH, ROWS, bias=False), ROWS),
    "linear down": lambda: nn.Sequential(nn.Linear(WIDTH, ROWS), nn.GELU(), nn.Linear(ROWS, WIDTH)),
    "conv1d": lambda: Wide(),
    "embedding": lambda: Holder(nn.Embedding(ROWS, WIDTH), WIDTH, embeds=True),
    "embedding with padding": lambda: Holder(
        nn.Embedding(ROWS, WIDTH, padding_idx=-3), WIDTH, embeds=True
    ),
}


def build(name: str, seed: int = SEED) -> nn.Module:
    return seeded(seed, BUILDERS[name])


def batch_for(model: nn.Module, seed: int, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(getattr(model, "layer", None), nn.Embedding):
        ids = torch.randint(ROWS, shape, generator=generator)
        if ids.numel() > 1:
            ids.view(-1)[0] = ids.view(-1)[-1] = (
                ROWS - 3
            )  # repeated, and the padding where there is one
        return ids
    return torch.randn(*shape, WIDTH, generator=generator)


def config(folder=None, home: str = "host", **more) -> dict:
    return at_home(home, home, folder, **{"device_memory": DEVICE, **more})


def wrap(model: nn.Module, folder=None, home: str = "host", *, optimizer=adamw, **more):
    return infinity.wrap_model(model, optimizer(model, 1e-2), config(folder, home, **more))


def tiled_units(model: nn.Module) -> list[str]:
    return [unit.name for unit in parts_of(model).planned.sizes if unit.at_once_nbytes]


def device(model: nn.Module):
    return parts_of(model).ledger.accounts[Tier.DEVICE]


def check_close(
    ours: torch.Tensor, theirs: torch.Tensor, what: str = "", *, tolerance: float = 1e-5
) -> None:
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} and {tuple(theirs.shape)}"
    scale = theirs.detach().abs().max().item() if theirs.numel() else 0.0
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=tolerance * max(scale, 1e-30), msg=lambda m: f"{what}: {m}"
    )


def check_grads(model: nn.Module, plain: nn.Module, *, tolerance: float = 1e-5) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        assert (ours.grad is None) == (theirs.grad is None), f"{name}: only one has a gradient"
        if theirs.grad is not None:
            check_close(ours.grad.clone(), theirs.grad, name, tolerance=tolerance)


def check_peak(model: nn.Module) -> None:
    account = device(model)
    assert account.peak_nbytes <= account.planned_nbytes <= account.budget_nbytes


def steps(
    model, optimizer, count: int, *, seed: int, backward=lambda out: out.square().mean().backward()
):
    for step in range(count):
        backward(model(batch_for(model, seed + step)))
        optimizer.step()
        optimizer.zero_grad()
