"""Meeting: finds the model of an optimizer, and wraps both in the middle of a script.

root  the module that is wrapped: it has all parameters of the optimizer that are of any module
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...core.run.registry import is_wrapped
from ...core.units.handle import handle_of

# Calls of the optimizer that a script holds, which the one that steps answers.
CALLS = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
STEPPING = "_infinity_step"  # attribute of that optimizer: the same step, whatever replaces it
TOGETHER = "_infinity_together"  # attribute of each of them: all


class Together(nn.ModuleList):
    """Models that one optimizer steps."""


def params_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Lists the parameters of all groups."""
    return [
        param for each in optimizers for group in each.param_groups for param in group["params"]
    ]


def inner(module: nn.Module) -> nn.Module:
    """Returns what `torch.compile` or DistributedDataParallel was given, or the module itself."""
    compiled = type(torch.compile(nn.Identity(), backend="eager"))
    while isinstance(module, (compiled, nn.parallel.DistributedDataParallel, nn.DataParallel)):
        module = next(module.children())
    return module


def find_root(params: Sequence[torch.Tensor], called: nn.Module | None = None) -> nn.Module | None:
    """Finds the module to wrap for an optimizer of ``params``: ``called`` if it has all of them
    that are of live modules, else the smallest module that has. Models without a module in common
    are put together. Returns None if no module has any of ``params``."""
    here = () if called is None else called.modules()  # gc does not list what it was told to keep
    modules = [
        (each, set(each.parameters()))
        for each in {id(each): each for each in (*here, *gc.get_objects())}.values()
        if issubclass(type(each), nn.Module)
        and "_parameters" in vars(each)  # else its __init__ is running
        and not isinstance(each, Together)
    ]
    needed = set(params).intersection(*[set().union(*(own for _, own in modules))])
    if not needed:
        return None
    if called is not None and needed.issubset((root := inner(called)).parameters()):
        return root
    order = {param: number for number, param in enumerate(params)}  # the same on every rank

    def rank(each: tuple[nn.Module, set[torch.Tensor]]) -> tuple[int, int]:
        return len(each[1]), -min((order[param] for param in needed & each[1]), default=0)

    modules.sort(key=rank)
    having = [each for each, own in modules if needed <= own]
    if any(handle_of(param) is not None for param in needed):
        having = [each for each in having if is_wrapped(each)] or having
    if having:
        return inner(having[0])
    together: list[nn.Module] = []
    for each, own in reversed(modules):
        if needed & own:
            together.append(inner(each))
            needed -= own
    root = Together(together)
    for each in together:
        vars(each)[TOGETHER] = root  # it has to live as long as they do
    return root


class Answer:
    """Calls the optimizer ``stepping`` in the place of the ``given`` one, which a script holds,
    while ``root`` is wrapped."""

    _wrapped_by_lr_sched = True  # else a scheduler that was made before warns

    def __init__(
        self,
        name: str,
        root: nn.Module,
        given: torch.optim.Optimizer,
        stepping: torch.optim.Optimizer,
    ):
        self._name, self._root, self._given, self._stepping = name, root, given, stepping

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_wrapped(self._root):
            return getattr(self._stepping, self._name)(*args, **kwargs)
        for name in (STEPPING, *(each for each in CALLS if vars(self._given).get(each) is self)):
            vars(self._given).pop(name, None)
        return getattr(self._given, self._name)(*args, **kwargs)


def hand_over(
    root: nn.Module, given: torch.optim.Optimizer, stepping: torch.optim.Optimizer
) -> None:
    """Lets ``stepping`` answer the calls of the optimizer ``given``, which the script holds."""
    if stepping is given:
        return  # it has no parameter that the engine moves
    for name in CALLS:
        setattr(given, name, Answer(name, root, given, stepping))
    vars(given)[STEPPING] = given.step
    # GradScaler would leave the unscaling to its kernel
    given._step_supports_amp_scaling = False  # type: ignore[attr-defined]
