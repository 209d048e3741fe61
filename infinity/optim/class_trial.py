"""ClassTrial: tries on small matrices whether a class steps one parameter at a time.

A class step (:mod:`.class_step`) is the class's only if no parameter's step depends on another
one, and if all that it keeps beside an array at home is small. Both depend on the settings, so the
optimizer's own are tried.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..errors import ConfigError
from ..state.flat_param_spec import EVERY_MOMENT
from .class_code import class_step, step_as
from .known import Known

logger = logging.getLogger(__name__)

SHAPES = (4, 6), (5, 3)
STEPS = 3
State = dict[str, Any]


def with_moments(known: Known, optimizer: torch.optim.Optimizer) -> Known:
    """Returns ``known`` with the moments that the class keeps for each element. Raises ConfigError
    if it cannot be stepped one parameter at a time, or keeps more than there is room for."""
    moments: list[str] = []
    for group in optimizer.param_groups:
        state = _tried(known, optimizer, group)
        numel = torch.Size(SHAPES[0]).numel()
        own = {name: value for name, value in state.items() if _shape(value) != SHAPES[0]}
        large = [name for name, value in own.items() if _numel(value) >= numel]
        if large and known.measured is not None:
            logger.info("%s keeps %s in host memory", known.name, " and ".join(large))
        elif large:
            raise ConfigError(
                f"optimizer {known.name} keeps {', '.join(large)}, which are as large as a"
                " parameter and have another shape, so that there is no home for them"
            )
        moments += [name for name in state if name not in own and name not in moments]
    if len(moments) > len(EVERY_MOMENT):
        raise ConfigError(
            f"optimizer {known.name} keeps {', '.join(moments)} for each element of a parameter:"
            f" there is room for {len(EVERY_MOMENT)}"
        )
    others = iter([name for name in EVERY_MOMENT if name not in moments])
    at_home = {name: name if name in EVERY_MOMENT else next(others) for name in moments}
    return replace(known, moments=at_home)


def _tried(known: Known, optimizer: torch.optim.Optimizer, group: State) -> State:
    """Runs :func:`_try` on the processor, or on the device that the class needs. Raises ConfigError
    if it cannot step on either."""
    try:
        return _try(known, optimizer, group, torch.device("cpu"))
    except ConfigError:
        raise
    except Exception as error:
        if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
            return _try(known, optimizer, group, device)
        raise ConfigError(
            f"optimizer {known.name}: a step of it on a small tensor on the CPU raised {error!r}"
        ) from error


def _try(
    known: Known, optimizer: torch.optim.Optimizer, group: State, where: torch.device
) -> State:
    """Steps two parameters together, and one at a time. Returns the state of the first. Raises
    ConfigError if the results differ."""
    alone, together = list(_params(where)), list(_params(where))
    states: list[State] = [{} for _ in alone]
    states_together: list[State] = [{} for _ in alone]
    settings = dict(group)
    if hasattr(optimizer, "train"):  # else it may refuse to step
        settings |= step_as(optimizer, settings, [], [], "train")[1]
    settings_together = dict(settings)
    for turn in range(STEPS):
        changed: State = {}
        for index, param in enumerate(alone):
            param.grad = _grad(param, turn)
            states[index], changed = class_step(optimizer, settings, param, states[index])
        settings |= changed
        for param in together:
            param.grad = _grad(param, turn)
        states_together, changed = step_as(optimizer, settings_together, together, states_together)
        settings_together |= changed
    if known.measured is None and not all(map(torch.equal, alone, together)):
        raise ConfigError(
            f"optimizer {known.name}, with these settings, steps all parameters at once: here each"
            " is stepped when it is there. Its update cannot run at any home."
        )
    return states[0]


def _params(where: torch.device) -> Iterator[torch.nn.Parameter]:
    for shape in SHAPES:
        numel = torch.Size(shape).numel()
        yield torch.nn.Parameter(torch.linspace(-1, 1, numel, device=where).view(shape))


def _grad(param: torch.Tensor, turn: int) -> torch.Tensor:
    """Makes gradients of several sizes: some settings clip."""
    values = torch.arange(param.numel(), dtype=torch.float32, device=param.device)
    return torch.cos(values * (turn + 1)).view(param.shape) * 10.0 ** (param.shape[1] - 4)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _numel(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, (list, tuple)):
        return sum(map(_numel, value))
    return 0
