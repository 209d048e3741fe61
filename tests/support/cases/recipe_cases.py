"""What the tests of recipes share.

Words used here:

**recipe**: a function of a `Run` that trains a tiny model for a few steps, as a script of its
domain would, and logs what such a script logs. **plain**: run with torch alone. **at home**: run
with a wrapped model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import at_home
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

import infinity

SEED = 7


class Run:
    """One run of a recipe. ``config``: that of the wraps, or None for a plain run."""

    def __init__(self, config: dict[str, Any] | None) -> None:
        self._config = config
        self._logged: list[Any] = []
        self._models: list[nn.Module] = []

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[nn.Module, Any]:
        """Wraps both, unless the run is plain. The final state of ``model`` is part of what the run
        logged."""
        if self._config is not None:
            model, optimizer = infinity.wrap_model(model, optimizer, self._config)
        self._models.append(model)
        return model, optimizer

    def start(self, model: nn.Module, lr: float = 0.1, **more: Any) -> tuple[nn.Module, Any]:
        """Wraps ``model`` and an SGD with momentum for it."""
        return self.wrap(model, sgd(model.parameters(), lr, **more))

    def keep(self, model: nn.Module) -> nn.Module:
        """Logs the final state of a model that is not wrapped. Returns it."""
        self._models.append(model)
        return model

    def log(self, *values: Any) -> None:
        """Notes numbers, tensors and texts as they are now."""
        for value in tree_flatten(values)[0]:
            is_tensor = isinstance(value, torch.Tensor)
            self._logged.append(value.detach().clone() if is_tensor else value)

    def end(self) -> list[Any]:
        """Returns all that was logged, and the final states."""
        for model in self._models:
            self.log(dict(model.state_dict()))
        return self._logged


Recipe = Callable[[Run], None]


def sgd(params: Iterable[Any], lr: float = 0.1, **more: Any) -> torch.optim.Optimizer:
    """The optimizer whose bits are torch's."""
    return torch.optim.SGD(params, lr=lr, **{"momentum": 0.9, **more})


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, following in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(size, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def draw(*shape: int, at: int = 0) -> torch.Tensor:
    """Normal numbers, the same ones for the same ``at``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + at))


def pick(below: int, *shape: int, at: int = 0) -> torch.Tensor:
    """Whole numbers, the same ones for the same ``at``."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(SEED + at))


def descend(optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    """One step down ``loss``, which is returned."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def fit(model: nn.Module, at: int = 0, size: int = 8, classes: int = 4) -> torch.Tensor:
    """The loss of a classifier for one batch."""
    return F.cross_entropy(model(draw(6, size, at=at)), pick(classes, 6, at=at))


def run_recipe(recipe: Recipe, config: dict[str, Any] | None) -> list[Any]:
    run = Run(config)
    torch.manual_seed(SEED)
    recipe(run)
    return run.end()


def differences(ours: list[Any], theirs: list[Any]) -> list[str]:
    """What differs by at least one bit, by its place in the log."""
    if len(ours) != len(theirs):
        return [f"{len(ours)} values instead of {len(theirs)}"]
    return [
        f"number {place}: {_said(mine)} instead of {_said(other)}"
        for place, (mine, other) in enumerate(zip(ours, theirs))
        if not _is_same(mine, other)
    ]


def _said(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.numel() < 2:
        return repr(value)
    norm = value.double().norm().item()
    return f"{value.dtype} of {tuple(value.shape)} with norm {norm!r}"


def _is_same(mine: Any, other: Any) -> bool:
    if type(mine) is not type(other):
        return False
    if not isinstance(mine, torch.Tensor):
        return mine == other
    if mine.dtype != other.dtype or mine.shape != other.shape:
        return False
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if mine.is_floating_point():  # bits, so that a NaN is itself and zero has a sign
        mine, other = (each.contiguous().view(whole[each.itemsize]) for each in (mine, other))
    return torch.equal(mine, other)


def assert_same_at_home(recipe: Recipe, folder: Path) -> None:
    """Runs ``recipe`` plain and at the hostile home, and compares all that both logged."""
    expected = run_recipe(recipe, None)
    assert expected, "the recipe logs nothing"
    found = run_recipe(recipe, at_home("hostile", "hostile", folder))
    differing = differences(found, expected)
    assert not differing, "\n".join(differing[:5])


class Recipes(list[Recipe]):
    """The recipes of one file, in their order."""

    def add(self, recipe: Recipe) -> Recipe:
        """Adds one, as a decorator."""
        self.append(recipe)
        return recipe

    def each(self) -> pytest.MarkDecorator:
        """Makes the parameter ``recipe`` of a test."""
        return pytest.mark.parametrize("recipe", self, ids=lambda recipe: recipe.__name__)
