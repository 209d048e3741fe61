"""A weight of another block, in a forward: it comes where a function asks, and is named where none
does."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from models import differing
from torch import nn
from torch.nn import functional as F

import infinity


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ASKING: dict[str, Use] = {
    "linear": F.linear,
    "a product of aten": lambda x, w: torch.ops.aten.mm(x, w),
    "tensor of the detached": lambda x, w: x @ torch.tensor(w.detach()),
    "as_tensor": lambda x, w: x @ torch.as_tensor(w),
    "an array of NumPy": lambda x, w: x @ torch.from_numpy(w.detach().numpy()),
    "DLPack": lambda x, w: x @ torch.from_dlpack(w.detach()),
    "set_ of the detached": lambda x, w: x @ torch.empty(0).set_(w.detach()),
    "functional_call": lambda x, w: torch.func.functional_call(
        nn.Linear(8, 8, bias=False), {"weight": w}, (x,)
    ),
    "vmap": lambda x, w: torch.func.vmap(lambda row: row @ w)(x),
    "tensor": lambda x, w: x @ torch.tensor(w),
    "new_tensor": lambda x, w: x @ x.new_tensor(w),
    "as_tensor of another dtype": lambda x, w: x @ torch.as_tensor(w, dtype=torch.float64).float(),
    "a sparse tensor": lambda x, w: (
        x * torch.sparse_coo_tensor(torch.arange(8)[None], w, (8, 8)).to_dense().sum()
    ),
    "a scripted function": lambda x, w: scripted(x, w),
    "a subclass": lambda x, w: x @ w.as_subclass(torch.Tensor),
}
NOT_ASKING: dict[str, Use] = {
    "a storage": lambda x, w: x @ torch.empty(0).set_(w.untyped_storage(), 0, (8, 8), (8, 1)),
    "a Parameter": lambda x, w: x @ nn.Parameter(w),
    "a Parameter of the detached": lambda x, w: x @ nn.Parameter(w.detach()),
}


class Using(nn.Module):
    """Uses the weight of one block with the output of another."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.one, self.other, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.other(x), self.one.weight) + self.one(x)


def made(use: Use, home: str | None, folder) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Using(use)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if home is not None:
        config = {
            "params": home,
            "optimizer": home,
            "units": ["Linear"],
            "nvme_paths": [os.fspath(folder)],
        }
        model, optimizer = infinity.wrap_model(model, optimizer, config)
    return model, optimizer


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(torch.linspace(-1, 1, 16).view(2, 8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("use", ASKING)
def test_a_weight_of_another_block_is_gathered(use, home, tmp_path):
    """Method: two steps beside plain torch."""
    plain, model = made(ASKING[use], None, tmp_path), made(ASKING[use], home, tmp_path)
    assert trained(*model) == trained(*plain)
    assert differing(dict(model[0].state_dict()), dict(plain[0].state_dict())) == []


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("use", NOT_ASKING)
@pytest.mark.filterwarnings("ignore")
def test_where_no_function_asks_the_weight_is_named(use, home, tmp_path):
    """Method: a UsageError out of the module call, with the weight's name; then the model trains
    without that as plain torch does."""
    model, optimizer = made(NOT_ASKING[use], home, tmp_path)
    with pytest.raises(infinity.UsageError, match=r"one\.weight.*clone\(\)"):
        trained(model, optimizer)
    model.use = ASKING["linear"]
    plain = made(model.use, None, tmp_path)
    assert trained(model, optimizer) == trained(*plain)


@pytest.mark.parametrize("use", NOT_ASKING)
@pytest.mark.filterwarnings("ignore")
def test_a_plain_weight_is_used_so(use, tmp_path):
    """Method: the twin; torch does what is refused above."""
    trained(*made(NOT_ASKING[use], None, tmp_path))


def test_another_error_of_a_forward_stays_what_it_is(tmp_path):
    """Method: the twin; a RuntimeError that is nothing of the engine's comes out as it was
    raised."""

    def fails(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    model, optimizer = made(fails, "host", tmp_path)
    with pytest.raises(RuntimeError, match="^mine$") as error:
        trained(model, optimizer)
    assert not isinstance(error.value, infinity.InfinityError)
