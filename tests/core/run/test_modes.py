"""Modes and transforms that a user's operations run in: the engine's own work runs outside of them,
and what has no bytes is refused.

Words used here: **mode** and **transform** as in infinity/core/params/apart.py. **counting** modes
let every operation be.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from models import differing
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import infinity

X = torch.linspace(-1, 1, 32).view(4, 8)


def made(home: str | None, folder) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if home is not None:
        model, optimizer = infinity.wrap_model(
            model, optimizer, {"params": home, "optimizer": home, "nvme_paths": [os.fspath(folder)]}
        )
    return model, optimizer


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(X).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def faked() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_forward(model, optimizer):
    with faked():
        model(torch.ones(4, 8))


def fake_backward(model, optimizer):
    loss = model(X).sum()
    with faked():
        loss.backward()


def fake_gradients(model, optimizer):
    with faked() as mode:
        x = mode.from_tensor(torch.ones(4, 8))
    model(x).sum().backward()


def fake_step(model, optimizer):
    model(X).sum().backward()
    with faked():
        optimizer.step()


def fake_state_dict(model, optimizer):
    with faked():
        model.state_dict()


WITHOUT_BYTES: dict[str, Callable] = {
    "FakeTensorMode": fake_forward,
    "a backward under FakeTensorMode": fake_backward,
    "gradients of fake tensors": fake_gradients,
    "a step under FakeTensorMode": fake_step,
    "state_dict under FakeTensorMode": fake_state_dict,
    "make_fx": lambda model, _: make_fx(lambda x: model(x))(X),
    "export": lambda model, _: torch.export.export(model, (X,), strict=False),
    "jit.trace": lambda model, _: torch.jit.trace(model, (X,)),
    "func.grad": lambda model, _: torch.func.grad(lambda x: model(x).sum())(X),
    "func.jvp": lambda model, _: torch.func.jvp(model, (X,), (X,)),
    "func.jacrev": lambda model, _: torch.func.jacrev(model)(X[0]),
    "func.vmap": lambda model, _: torch.func.vmap(model)(X),
}


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_a_pass_without_bytes_is_refused_and_changes_nothing(home, tmp_path):
    """Method: each is tried on one model, whose values are compared behind it; then it trains as
    plain torch does that never saw any."""
    model, optimizer = made(home, tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for what, run in WITHOUT_BYTES.items():
        with pytest.raises(infinity.UsageError):
            run(model, optimizer)
            print(what)  # pytest shows it where nothing was raised
        optimizer.zero_grad()
        assert differing(dict(model.state_dict()), before) == [], what
    plain, plain_optimizer = made(None, tmp_path)
    assert trained(model, optimizer) == trained(plain, plain_optimizer)
    assert differing(dict(model.state_dict()), dict(plain.state_dict())) == []


@pytest.mark.parametrize(
    "what",
    sorted(set(WITHOUT_BYTES) - {"gradients of fake tensors", "state_dict under FakeTensorMode"}),
)
def test_a_plain_model_is_asked_the_same(what, tmp_path):
    """Method: the twin; what is refused above is nothing that torch refuses."""
    WITHOUT_BYTES[what](*made(None, tmp_path))


class Doubling(TorchDispatchMode):
    """Doubles what copies and sums return: nothing that a Linear computes, and much of what an
    engine does."""

    CHANGED = {
        torch.ops.aten.sum.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.clone.default,
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.mul_(2) if func in self.CHANGED else result


def doubling(model: nn.Module) -> torch.Tensor:
    with Doubling():
        out = model(X)
    return out.square().sum()


def selective(model: nn.Module, saved: set | None) -> torch.Tensor:
    def policy(context, op, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE
            if saved is None or op in saved
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(model, X, use_reentrant=False, context_fn=contexts).square().sum()


def counted(model: nn.Module) -> torch.Tensor:
    with FlopCounterMode(display=False) as counter:
        loss = model(X).square().sum()
    assert counter.get_total_flops() == 2 * 4 * (8 * 8 + 8 * 8 + 8 * 4)
    return loss


WITH_BYTES: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "a mode that changes copies": doubling,
    "a selective checkpoint that saves everything": lambda model: selective(model, None),
    "a selective checkpoint that saves products and copies": lambda model: selective(
        model, {torch.ops.aten.addmm.default, torch.ops.aten.copy_.default}
    ),
    "FlopCounterMode": counted,
}


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("what", WITH_BYTES)
def test_modes_see_nothing_of_the_engine(what, home, tmp_path):
    """Method: a forward and backward in a mode, beside plain torch's; the gradients are equal in
    bits, and so is what is trained then."""
    plain, plain_optimizer = made(None, tmp_path)
    model, optimizer = made(home, tmp_path)
    for each in (plain, model):
        WITH_BYTES[what](each).backward()
    assert all(
        torch.equal(mine.grad.clone(), theirs.grad)
        for mine, theirs in zip(model.parameters(), plain.parameters())
    )
    assert trained(model, optimizer) == trained(plain, plain_optimizer)
    assert differing(dict(model.state_dict()), dict(plain.state_dict())) == []


@pytest.mark.parametrize("home", ["device", "host"])
def test_transforms_that_need_no_graph_are_torchs(home, tmp_path):
    """Method: vmap without gradients, and batched gradients of an ordinary forward, beside plain
    torch."""

    def results(model: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            found = [torch.func.vmap(model)(X)]
        x = X.clone().requires_grad_()
        found += torch.autograd.grad(model(x).sum(0), x, torch.eye(4), is_grads_batched=True)
        return [*found, torch.autograd.functional.jacobian(model, X[0], vectorize=True)]

    assert all(map(torch.equal, results(made(home, tmp_path)[0]), results(made(None, tmp_path)[0])))
