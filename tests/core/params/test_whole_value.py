"""All of a parameter at home is compared and set without a fetch to the device."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from torch import nn

import infinity
from infinity.core.units.residency import Residency


@pytest.fixture
def model():
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    made, _ = infinity.wrap_model(
        made, torch.optim.SGD(made.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )
    return made


def is_brought(model: nn.Module) -> bool:
    return any(unit.residency is Residency.RESIDENT for unit in parts_of(model).units)


def test_values_are_compared_at_home(model):
    """Twins: a NaN equals nothing, not even itself; another shape differs."""
    one, other = model[0].weight, model[1].weight
    assert torch.equal(one, one) and torch.equal(one, one.detach())
    assert not torch.equal(one, other) and not torch.equal(one, model[0].bias)
    assert not is_brought(model)
    with torch.no_grad():
        one.copy_(torch.full((3, 3), float("nan")))
    assert not torch.equal(one, one)


@pytest.mark.parametrize("how", ["copy_", "data", "set_"])
def test_a_whole_value_is_set_at_home(how, model):
    """Twin: another parameter's memory is refused, unless it is copied."""
    weight, value = model[0].weight, torch.full((3, 3), 5.0)
    with torch.no_grad():
        if how == "data":
            weight.data = value
        else:
            getattr(weight, how)(value)
    assert not is_brought(model) and torch.equal(model.state_dict()["0.weight"], value)
    with torch.no_grad():
        if how == "copy_":
            weight.copy_(model[1].weight)
            assert torch.equal(weight, model[1].weight)
        else:
            with pytest.raises(infinity.UsageError, match="would not reach its home"):
                weight.set_(model[1].weight)
            with pytest.raises(infinity.UsageError, match="would not reach its home"):
                weight.data = model[1].weight.data


def test_a_leaf_is_not_set_under_autograd(model):
    """As in torch. Twin: under no_grad it is."""
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model[0].weight.copy_(torch.ones(3, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(3, 3))


class Reaching(nn.Module):
    """Its forward assigns the data of another block's weight, which is at home then."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in "123")
        self.how, self.calls = how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.blocks[0](x)
        linear, norm = self.blocks[1]
        if self.how == "a constant":
            norm.bias.data = torch.full((8,), 0.1 * self.calls)
        elif self.how == "its own value, scaled":
            norm.weight.data = norm.weight.data * 0.9
        elif self.how == "its own value, clamped":
            linear.weight.data = linear.weight.clamp(-0.2, 0.2)
        elif self.how == "a block that ran":
            self.blocks[0][0].bias.data = torch.zeros(8)
        return self.blocks[2](self.blocks[1](x))


@pytest.mark.parametrize(
    "how, home",
    [
        ("a constant", "nvme"),
        ("its own value, scaled", "device"),
        ("its own value, clamped", "host"),
        ("a block that ran", "host"),
    ],
)
def test_data_of_another_block_is_assigned_in_a_forward(how, home, tmp_path):
    """Trains three steps beside plain torch, with the same losses and weights. Twin: in a backward
    the assignment is refused."""
    found = []
    for wraps in (False, True):
        model = Reaching(how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wraps:
            homes = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path)]}
            model, optimizer = infinity.wrap_model(model, optimizer, homes)
        losses = []
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(x) ** 3).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append([*losses, *(value.clone() for value in model.state_dict().values())])
    assert all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(*found)
    )

    def assign(_grad: torch.Tensor) -> None:
        model.blocks[0][1].bias.data = torch.zeros(8)

    out = model(x)
    out.register_hook(assign)
    with pytest.raises(infinity.UsageError, match="would not reach its home"):
        out.sum().backward()
