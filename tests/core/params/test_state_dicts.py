"""State dicts are the whole state: a model's and an optimizer's together resume bit for bit, with
16-bit weights and masters too."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from models import at_home, differing
from torch import nn

import infinity

STEPS = 3


def make(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(3))).to(dtype)


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
}


def wrap(
    kind: str, dtype: torch.dtype, config: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(dtype)
    return infinity.wrap_model(model, OPTIMIZERS[kind](model), config)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
    first: int,
    steps: int = STEPS,
) -> None:
    for step in range(first, first + steps):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        state |= {
            f"{index} {name}": value.clone() for name, value in entry.items() if value is not None
        }
    return state


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "dtype, master",
    [
        (torch.bfloat16, "split"),
        (torch.bfloat16, "fp32"),
        (torch.float16, "split"),
        (torch.float32, "split"),
    ],
)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_both_state_dicts_resume_bit_for_bit(order, dtype, master, kind, home, tmp_path, caplog):
    """Method: train, put both state dicts through a file and into a new model (or the optimizer's
    first, into a model that has the weights already), train on; all is as without the break, and no
    warning was said."""
    config = at_home(home, home, tmp_path) | {"master": master}
    model, optimizer = wrap(kind, dtype, config)
    train(model, optimizer, dtype, 0)
    saved = through_a_file((model.state_dict(), optimizer.state_dict()))
    middle = everything(model, optimizer)
    train(model, optimizer, dtype, STEPS)
    expected = everything(model, optimizer)
    del model, optimizer
    model, optimizer = wrap(kind, dtype, config)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "infinity"):
        if order == "model first":
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            model.load_state_dict(saved[0])
    assert caplog.records == []
    assert differing(everything(model, optimizer), middle) == []
    train(model, optimizer, dtype, STEPS)
    assert differing(everything(model, optimizer), expected) == []


def test_a_model_that_is_loaded_alone_has_those_weights_and_no_more(tmp_path):
    """Method: after steps, the weights of the beginning are loaded without the optimizer's state;
    what the masters hid is gone, so that training from there has the bits of a run in which the
    steps never were."""

    def run(disturbed: bool) -> dict[str, torch.Tensor]:
        model, optimizer = wrap("sgd", torch.bfloat16, at_home("host", "host", tmp_path))
        first = copy.deepcopy(dict(model.state_dict()))
        if disturbed:
            train(model, optimizer, torch.bfloat16, 0, 1)
            model.load_state_dict(first)
        train(model, optimizer, torch.bfloat16, 5)
        return everything(model, optimizer)

    assert differing(run(True), run(False)) == []


def test_a_state_dict_without_masters_loads_and_says_so(tmp_path, caplog):
    model, optimizer = wrap("adamw", torch.bfloat16, at_home("host", "host", tmp_path))
    train(model, optimizer, torch.bfloat16, 0)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        del entry["master"]
    with caplog.at_level(logging.WARNING, "infinity"):
        optimizer.load_state_dict(state)
    (record,) = caplog.records
    assert "no fp32 masters of 6 16-bit parameters" in record.getMessage()


def test_masters_of_other_weights_do_not_count_and_that_is_said(tmp_path, caplog):
    """Method: the optimizer's state of one run, and the weights of another; the model's weights
    stay."""
    model, optimizer = wrap("adamw", torch.bfloat16, at_home("host", "host", tmp_path))
    train(model, optimizer, torch.bfloat16, 0)
    state = through_a_file(optimizer.state_dict())
    model, optimizer = wrap("adamw", torch.bfloat16, at_home("host", "host", tmp_path))
    train(model, optimizer, torch.bfloat16, 7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "infinity"):
        optimizer.load_state_dict(state)
    assert "load the model's state dict first" in caplog.records[-1].getMessage()
    assert differing(dict(model.state_dict()), before) == []


def test_a_master_of_another_shape_is_refused_before_anything_changes(tmp_path):
    model, optimizer = wrap("adamw", torch.bfloat16, at_home("host", "host", tmp_path))
    train(model, optimizer, torch.bfloat16, 0)
    before, state = everything(model, optimizer), optimizer.state_dict()
    state["state"][0]["master"] = torch.zeros(3)
    with pytest.raises(infinity.UsageError, match="master of 0.weight"):
        optimizer.load_state_dict(state)
    assert differing(everything(model, optimizer), before) == []


def test_plain_torch_loads_a_state_dict_with_masters(tmp_path):
    """Method: our state dict into plain AdamW, its step, and the state dict of that into ours
    again."""
    model, optimizer = wrap("adamw", torch.bfloat16, at_home("host", "host", tmp_path))
    train(model, optimizer, torch.bfloat16, 0)
    plain = make(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    theirs = OPTIMIZERS["adamw"](plain)
    theirs.load_state_dict(optimizer.state_dict())
    train(plain, theirs, torch.bfloat16, STEPS, 1)
    optimizer.load_state_dict(theirs.state_dict())
    train(model, optimizer, torch.bfloat16, STEPS, 1)


def test_unwrapped_optimizers_have_no_masters(tmp_path):
    model, optimizer = wrap("adamw", torch.bfloat16, at_home("host", "host", tmp_path))
    train(model, optimizer, torch.bfloat16, 0)
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert all(
        set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in optimizer.state.values()
    )
