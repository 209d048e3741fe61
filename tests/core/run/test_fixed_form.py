"""The form of a wrapped model is fixed: what would change it is refused before anything has
changed, and what asks for a shape only works."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from models import differing
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrize, prune

import infinity


class Model(nn.Module):
    """Has buffers before its first weight, in modules without weights, and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.BatchNorm1d(8))
        self.rnn, self.head = nn.LSTM(8, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.first(x))[0])


def made(home: str, folder) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    config = {"params": home, "optimizer": home, "nvme_paths": [os.fspath(folder)]}
    return infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to a dtype": lambda m: m.to(torch.float64),
    "to as a tensor": lambda m: m.to(torch.ones(1, dtype=torch.float64)),
    "to meta": lambda m: m.to("meta"),
    "to the device meta": lambda m: m.to(device=torch.device("meta")),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "to_empty on meta": lambda m: m.to_empty(device="meta"),
    "type": lambda m: m.type(torch.float64),
    "share_memory": lambda m: m.share_memory(),
    "half of a container": lambda m: m.first.half(),
    "half of a recurrent layer": lambda m: m.rnn.half(),
    "prune by size": lambda m: prune.l1_unstructured(m.head, "weight", 0.5),
    "prune at random": lambda m: prune.random_unstructured(m.head, "weight", 0.5),
    "prune nothing": lambda m: prune.identity(m.head, "weight"),
    "prune by a mask": lambda m: prune.custom_from_mask(m.head, "weight", torch.ones(4, 8)),
    "prune globally": lambda m: prune.global_unstructured(
        [(m.head, "weight")], prune.L1Unstructured, amount=0.5
    ),
    "weight_norm": lambda m: utils.weight_norm(m.head),
    "spectral_norm": lambda m: utils.spectral_norm(m.head),
    "parametrize unseen": lambda m: parametrize.register_parametrization(
        m.head, "weight", nn.Identity(), unsafe=True
    ),
    "del": lambda m: delattr(m.head, "weight"),
    "another name": lambda m: m.head.register_parameter("other", m.head.weight),
}


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_a_change_of_form_is_refused_before_anything_changed(home, tmp_path):
    """Method: each is tried on one model, whose parameters, buffers and names are compared behind
    it; then it trains and is unwrapped."""
    model, optimizer = made(home, tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for what, change in CHANGES.items():
        with pytest.raises(
            infinity.UsageError, match="before wrap_model|unwrap_model|Choose them before"
        ):
            change(model)
            print(what)  # pytest shows it where nothing was raised
        assert differing(dict(model.state_dict()), before) == [], what
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}, what
        assert [name for name, _ in model.named_parameters()] == names, what
    model(torch.ones(5, 8)).sum().backward()
    optimizer.step()
    model, _ = infinity.unwrap_model(model, optimizer)
    prune.l1_unstructured(model.head, "weight", 0.5)
    assert model.half().scale.dtype == torch.float16
    assert all(
        type(module._parameters) is dict and "_apply" not in module.__dict__
        for module in model.modules()
    )


@pytest.mark.parametrize("what", CHANGES)
def test_a_plain_model_is_changed(what):
    """Method: the twin; what is refused above is nothing that torch refuses."""
    torch.manual_seed(0)
    CHANGES[what](Model())


ASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": lambda p: torch.ones_like(p, dtype=torch.float64),
    "full_like": lambda p: torch.full_like(p, 2.0),
    "empty_like": lambda p: torch.empty_like(p).fill_(1),
    "rand_like": lambda p: torch.rand_like(p) * 0,
    "of the detached": lambda p: torch.zeros_like(p.detach()),
    "new_zeros": lambda p: p.new_zeros(3),
    "new_ones": lambda p: p.data.new_ones((2, 2)),
    "new_full": lambda p: p.new_full((2,), 3.0),
    "new_tensor": lambda p: p.new_tensor([1, 2]),
}


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_what_asks_for_a_shape_only_works_at_rest(home, tmp_path):
    """Method: what these return of parameters at rest, contiguous and not, beside what a plain
    parameter's do."""
    plain = nn.ParameterList([torch.ones(3, 5), torch.ones(5, 4).t()])
    model, _ = infinity.wrap_model(
        nn.ParameterList([p.detach().clone() for p in plain]),
        None,
        {"params": home, "nvme_paths": [str(tmp_path)]},
    )
    for mine, theirs in zip(model, plain):
        for what, ask in ASKS.items():
            found, expected = ask(mine), ask(theirs)
            assert torch.equal(found, expected) and type(found) is torch.Tensor, what
            assert (found.stride(), found.dtype, found.requires_grad) == (
                expected.stride(),
                expected.dtype,
                expected.requires_grad,
            ), what


def test_a_mistake_is_refused_at_its_first_question():
    """Method: the twin of the last; another optimizer's step asks for zeros of a weight's shape,
    and gets none."""
    model, _ = infinity.wrap_model(*trainable(), {"params": "host", "optimizer": "host"})
    other = torch.optim.RMSprop(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(infinity.UsageError, match="not the optimizer that wrap_model returned"):
        other.step()
    assert all("square_avg" not in state for state in other.state.values())


def trainable() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
