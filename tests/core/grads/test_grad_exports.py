"""A proxy for a gradient is copied and pickled as its values, and refuses to share memory.

Words used here: a **door** is a way to a tensor's memory that torch's operations do not go through.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing.reductions
from contract_cases import every_home, save, wrapped
from models import ChildDied, in_child
from torch import nn

import infinity
from infinity.core.machine import storage_guard

SEED = 40
KINDS = ("landed", "stepped")
every_kind = pytest.mark.parametrize("kind", KINDS)

DOORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "from_dlpack": torch.from_dlpack,
    "numpy's from_dlpack": np.from_dlpack,
    "share_memory_": lambda g: g.share_memory_(),
    "untyped_storage": lambda g: g.untyped_storage(),
    "storage": lambda g: g.storage(),
    "data_ptr": lambda g: g.data_ptr(),
    "reduce_tensor": torch.multiprocessing.reductions.reduce_tensor,
    "set_": lambda g: g.set_(torch.ones(3)),
    "resize_": lambda g: g.resize_(1, 2),
    "t_": lambda g: g.t_(),
    "data =": lambda g: setattr(g, "data", torch.ones(3)),
}
UNHEARD: dict[str, Callable[[torch.Tensor], Any]] = {
    "to_dlpack": torch._C._to_dlpack,
}
COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "save": lambda g: torch.load(io.BytesIO(save({"a": g})), weights_only=True)["a"],
    "queue": lambda g: pickle.loads(ForkingPickler.dumps(g)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def model_and_optimizer(home: str, folder: Path) -> tuple[nn.Module, Any]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    model, optimizer = wrapped(home, folder, model)
    model(torch.ones(2, 12)).square().sum().backward()
    return model, optimizer


def stand_in(kind: str, model: nn.Module, optimizer: Any) -> torch.Tensor:
    if kind != "landed":
        optimizer.step()
    return model[0].weight.grad


@every_kind
@every_home
def test_what_would_share_memory_says_what_to_do(home, kind, tmp_path):
    """Method: every door, in a child, for they were the end of the process; afterwards the gradient
    reads as before."""

    def work() -> list[str]:
        model, optimizer = model_and_optimizer(home, tmp_path)
        grad, wrong = stand_in(kind, model, optimizer), []
        before = grad.clone()
        for name, go in (DOORS | UNHEARD).items():
            try:
                go(grad)
            except infinity.UsageError as error:
                wrong += [] if "grad" in str(error) else [f"{name}: {error}"]
            except RuntimeError as error:
                wrong += (
                    []
                    if name in UNHEARD and "Cannot access data pointer" in str(error)
                    else [f"{name}: {error!r}"]
                )
            else:
                wrong.append(f"{name} passed")
        assert not grad.is_shared() and not grad.is_pinned()
        assert not hasattr(grad, "__cuda_array_interface__")
        assert torch.equal(grad.clone(), before)
        return wrong

    assert in_child(work) == []


def test_a_storage_that_is_not_closed_is_the_end_of_the_process(tmp_path, monkeypatch):
    """Method: the failing twin: the same door where the stand-in's storage is left open."""
    monkeypatch.setattr(storage_guard, "close", lambda storage: None)

    def work() -> None:
        model, _ = model_and_optimizer("device", tmp_path)
        torch._C._from_dlpack(torch._C._to_dlpack(model[0].weight.grad)).sum().item()

    with pytest.raises(ChildDied):
        in_child(work)


@every_kind
@every_home
def test_copies_have_the_values_of_torchs(home, kind, tmp_path):
    """Method: pickled, saved, queued and copied; plain tensors of the same bits. Twin: once the
    gradient is gone each raises."""
    model, optimizer = model_and_optimizer(home, tmp_path)
    grad = stand_in(kind, model, optimizer)
    expected = grad.clone()
    for name, take in COPIES.items():
        found = take(grad)
        assert torch.equal(found + 0, expected), name
        assert name == "copy" or type(found) is torch.Tensor, name
    both = copy.deepcopy([grad, grad])
    assert both[0] is both[1]
    optimizer.zero_grad()
    for name in ("pickle", "save", "queue", "deepcopy"):
        with pytest.raises(infinity.UsageError, match="zero_grad"):
            COPIES[name](grad)


@every_home
def test_safetensors_is_told_to_take_a_copy(home, tmp_path):
    """Method: safetensors reads addresses: refused for a stand-in, and right for its clone."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = model_and_optimizer(home, tmp_path)
    grad = model[0].weight.grad
    with pytest.raises(infinity.UsageError, match="clone"):
        safetensors.save({"a": grad})
    loaded = safetensors.load(safetensors.save({"a": grad.detach().clone()}))["a"]
    assert torch.equal(loaded, grad.clone())


@every_home
def test_a_copy_writes_to_the_gradient_as_torchs_does(home, tmp_path):
    """Method: copy.copy(grad).mul_(2), detach_() and model.float(), where the last two change
    nothing."""
    model, _ = model_and_optimizer(home, tmp_path)
    grad = model[0].weight.grad
    before = grad.clone()
    copy.copy(grad).mul_(2)
    grad.detach_()
    model.float()
    assert torch.equal(model[0].weight.grad.clone(), before * 2)
