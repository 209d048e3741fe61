"""State dict hooks: errors of the engine come out of ``load_state_dict`` as they were raised."""

from __future__ import annotations

import pytest
import torch
from models import seeded
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

import infinity
from infinity.core.homes.store import ArrayStore
from infinity.core.params import state_dict as hooks
from infinity.errors import (
    CapacityError,
    CorruptionError,
    InfinityError,
    PeerError,
    StorageError,
    UsageError,
)

LOADS = {
    "a model": lambda model, state: model.load_state_dict(state),
    "a part of it": lambda model, state: model[0].load_state_dict(
        {"weight": state["0.weight"], "bias": state["0.bias"]}
    ),
    "not strict": lambda model, state: model.load_state_dict(state, strict=False),
    "a model around it": lambda model, state: nn.ModuleDict({"m": model}).load_state_dict(
        {f"m.{name}": value for name, value in state.items()}
    ),
    "as DCP sets it": set_model_state_dict,
}


def made() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = seeded(3, lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = {"params": "host", "optimizer": "host"}
    return infinity.wrap_model(model, optimizer, config)[0], state


def fail_once(monkeypatch, error: Exception) -> None:
    own, errors = ArrayStore.write, [error]

    def write(*given, **more):
        if errors:
            raise errors.pop()
        own(*given, **more)

    monkeypatch.setattr(ArrayStore, "write", write)


@pytest.mark.parametrize(
    ("load", "kind"),
    list(zip(LOADS, (PeerError, StorageError, CapacityError, CorruptionError, UsageError))),
)
def test_an_error_of_a_load_is_raised_as_it_is(load, kind, monkeypatch):
    """Lets the write to the home fail. Then the same load works, and torch's own error for another
    shape is torch's."""
    model, state = made()
    error = kind("the write failed")
    with monkeypatch.context() as patched:
        fail_once(patched, error)
        with pytest.raises(kind) as raised:
            LOADS[load](model, state)
    assert raised.value is error
    LOADS[load](model, state)
    assert torch.equal(model[0].weight.detach().clone(), state["0.weight"])
    with pytest.raises(RuntimeError, match=r"size mismatch for .*0\.weight"):
        model.load_state_dict(state | {"0.weight": torch.ones(3, 3)})
    infinity.unwrap_model(model)
    assert all("_load_from_state_dict" not in module.__dict__ for module in model.modules())


def test_torch_alone_makes_another_error_of_it(monkeypatch):
    """The twin: with torch's own list of messages."""
    monkeypatch.setattr(hooks, "_Messages", list)
    model, state = made()
    fail_once(monkeypatch, PeerError("the write failed"))
    with pytest.raises(RuntimeError, match="an exception occurred") as raised:
        model.load_state_dict(state)
    assert not isinstance(raised.value, InfinityError)
