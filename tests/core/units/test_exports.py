"""What holds a weight's memory beyond a forward keeps it, and keeps the engine from nothing.

Words used here: **held** and **fixed** as in infinity/core/units/device_buffer.py. **inside**: in
the forward that owns the weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from models import differing
from torch import nn

import infinity

KEPT: list = []


def product_with_export(layer: nn.Linear, out: torch.Tensor) -> torch.Tensor:
    return out @ torch.from_dlpack(layer.weight.detach())


EXPORTS: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor | None]] = {
    "numpy, dropped": lambda layer, out: print(layer.weight.detach().numpy().mean()),
    "numpy, kept": lambda layer, out: KEPT.append(layer.weight.detach().numpy()),
    "numpy of a part, kept": lambda layer, out: KEPT.append(layer.weight.detach()[1:3].numpy()),
    "numpy, written": lambda layer, out: layer.weight.detach().numpy().__setitem__(0, 0.5),
    "a buffer, kept": lambda layer, out: KEPT.append(memoryview(layer.weight.detach().numpy())),
    "dlpack, kept": lambda layer, out: KEPT.append(torch.from_dlpack(layer.weight.detach())),
    "dlpack to numpy, kept": lambda layer, out: KEPT.append(np.from_dlpack(layer.weight.detach())),
    "dlpack, written and kept": lambda layer, out: KEPT.append(
        torch.from_dlpack(layer.weight.detach()).fill_(0.25)
    ),
    "dlpack, computed with": product_with_export,
    "a view, kept": lambda layer, out: KEPT.append(layer.weight.t()),
    "is_shared": lambda layer, out: print(layer.weight.is_shared()),
}


class Exporting(nn.Linear):
    """A Linear that exports its weight in its forward."""

    export: Callable | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        changed = None if self.export is None else self.export(self, out)
        return out if changed is None else changed


def made(
    export: Callable | None, home: str | None, folder
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Exporting(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Exporting(8, 8))
    model[0].export = model[4].export = export
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if home is not None:
        config = {"params": home, "optimizer": home, "nvme_paths": [os.fspath(folder)]}
        model, optimizer = infinity.wrap_model(model, optimizer, config)
    return model, optimizer


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.linspace(-1, 1, 16).view(2, 8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def nothing_kept():
    KEPT.clear()
    yield
    KEPT.clear()


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("export", EXPORTS)
def test_an_export_of_a_weight_inside_changes_no_bit(export, home, tmp_path):
    """Method: three steps whose forwards export weights, beside plain torch; then everything that
    follows a training."""
    plain, plain_optimizer = made(EXPORTS[export], None, tmp_path)
    expected = trained(plain, plain_optimizer)
    KEPT.clear()
    model, optimizer = made(EXPORTS[export], home, tmp_path)
    assert trained(model, optimizer) == expected
    assert differing(dict(model.state_dict()), dict(plain.state_dict())) == []
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    model, _ = infinity.unwrap_model(model, optimizer)
    assert differing(dict(model.state_dict()), dict(plain.state_dict())) == []


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("export", ["numpy, kept", "dlpack, kept"])
def test_an_export_keeps_its_values_until_the_next_forward(export, home, tmp_path):
    """Method: an export of each forward is compared with the weight there, after the unit has gone
    home and others have come."""
    model, optimizer = made(EXPORTS[export], home, tmp_path)
    values = model.state_dict()["0.weight"].clone()
    model(torch.ones(1, 8)).sum().backward()
    assert all(model[0].weight.untyped_storage().nbytes() for _ in KEPT)
    assert torch.equal(torch.as_tensor(KEPT[0]), values)
    KEPT.clear()
    model[0].export = model[4].export = None
    model(torch.ones(1, 8)).sum().backward()
    assert model[0].weight.untyped_storage().nbytes() == 0, (
        "memory that nobody holds any more goes home"
    )


def test_memory_that_nobody_holds_goes_home(tmp_path):
    """Method: the twin of the last; after an export that was dropped no memory stays, and another
    storage is there."""
    model, _ = made(EXPORTS["numpy, dropped"], "host", tmp_path)
    before = model[0].weight.untyped_storage()._cdata, model[2].weight.untyped_storage()._cdata
    model(torch.ones(1, 8)).sum().backward()
    assert [model[at].weight.untyped_storage().nbytes() for at in (0, 2)] == [0, 0]
    assert model[0].weight.untyped_storage().resizable()
    assert model[2].weight.untyped_storage()._cdata == before[1]


def test_a_write_to_an_export_outside_of_a_forward_is_told(tmp_path):
    """Method: an array of NumPy that a forward has left is written to behind it; the next forward
    refuses, and the values stand."""
    model, optimizer = made(EXPORTS["numpy, kept"], "host", tmp_path)
    trained(model, optimizer, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    KEPT[0][:] = 7
    with pytest.raises(infinity.UsageError, match="0.weight.*full_params"):
        model(torch.ones(1, 8))
    assert differing(dict(model.state_dict()), before) == []
    trained(model, optimizer, 1)


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_sharing_the_memory_of_a_weight_is_refused(home, tmp_path):
    """Method: share_memory_() inside a forward, whose weight goes on as it was; and then without
    it."""
    model, optimizer = made(
        lambda layer, out: print(layer.weight.detach().share_memory_()), home, tmp_path
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(infinity.UsageError, match="Share a copy"):
        model(torch.ones(1, 8))
    assert differing(dict(model.state_dict()), before) == []
    model[0].export = model[4].export = None
    plain, plain_optimizer = made(None, None, tmp_path)
    assert trained(model, optimizer) == trained(plain, plain_optimizer)
    assert differing(dict(model.state_dict()), dict(plain.state_dict())) == []


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_recovery_needs_no_storage_that_others_hold(home, tmp_path):
    """Method: a forward exports a weight and raises; what follows has the bits of a run without
    it."""

    def struck(layer: nn.Linear, out: torch.Tensor) -> None:
        KEPT.append(layer.weight.detach().numpy())
        raise ValueError("stop")

    model, optimizer = made(struck, home, tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="stop"):
            model(torch.ones(1, 8))
    model[0].export = model[4].export = None
    plain, plain_optimizer = made(None, None, tmp_path)
    assert trained(model, optimizer) == trained(plain, plain_optimizer)
    assert differing(dict(model.state_dict()), dict(plain.state_dict())) == []


def test_what_is_held_is_not_parked(tmp_path):
    """Method: an array of NumPy over weights at home on the device; park refuses, and parks when it
    is dropped."""
    model, optimizer = made(EXPORTS["numpy, kept"], "device", tmp_path)
    trained(model, optimizer)
    with pytest.raises(infinity.UsageError, match="clone"):
        infinity.park(model)
    KEPT.clear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert infinity.park(model) > 0
    assert differing(dict(model.state_dict()), before) == []


HOOKS: dict[str, Callable[[nn.Module, Callable[[], None]], object]] = {
    "behind the engine's hook": lambda layer, look: layer.register_forward_hook(lambda *_: look()),
    "before the forward": lambda layer, look: layer.register_forward_pre_hook(lambda *_: look()),
    "in the backward": lambda layer, look: layer.register_full_backward_hook(lambda *_: look()),
    "before the backward": lambda layer, look: layer.register_full_backward_pre_hook(
        lambda *_: look()
    ),
}


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("where", HOOKS)
def test_an_export_in_a_hook_changes_no_bit(where, home, tmp_path):
    """Method: hooks that were registered behind the wrap keep arrays of weights, of their own layer
    and of another one."""

    def run(home: str | None) -> tuple[list[float], nn.Module]:
        model, optimizer = made(None, home, tmp_path)
        HOOKS[where](model[0], lambda: KEPT.append(model[0].weight.detach().numpy()))
        HOOKS[where](model[2], lambda: KEPT.append(torch.from_dlpack(model[4].weight.detach())))
        return trained(model, optimizer), model

    (expected, plain), (losses, model) = run(None), run(home)
    assert losses == expected
    assert differing(dict(model.state_dict()), dict(plain.state_dict())) == []
