"""ClassCode: runs the code of an optimizer's class on other parameters than the optimizer's."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.params.books import same_form
from ...core.step.rules import plain_step

Group = Mapping[str, Any]


def step_as(
    optimizer: torch.optim.Optimizer,
    group: Group,
    params: Sequence[torch.nn.Parameter],
    states: Sequence[Mapping[str, Any]],
    method: str = "step",
    first: Group | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Steps ``params`` by their gradients as the class of ``optimizer`` does with ``group``'s
    settings. Returns their states after that, and the settings that the class has changed. Changes
    none of the user's objects. ``method``: of the class, in place of ``step``; ``first``: the first
    group, if that is another one, which some classes look at."""
    kind = type(optimizer)
    other, settings = _over(optimizer, group, params, states, first)
    if method == "step":  # without the profiler and the hooks of all optimizers
        with torch.no_grad():
            plain_step(kind.step)(other)
    else:
        getattr(other, method)()
    changed = {
        key: value
        for key, value in other.param_groups[-1].items()
        if key != "params" and not (key in settings and is_equal(value, settings[key]))
    }
    return [dict(other.state.get(param, {})) for param in params], changed


def like_it(
    optimizer: torch.optim.Optimizer, group: Group, params: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Makes an optimizer of the same class and attributes, without state, over other ``params``
    with ``group``'s settings."""
    return _over(optimizer, group, params, [{} for _ in params], None)[0]


def _over(
    optimizer: torch.optim.Optimizer,
    group: Group,
    params: Sequence[torch.nn.Parameter],
    states: Sequence[Mapping[str, Any]],
    first: Group | None,
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """Makes the optimizer of :func:`step_as`. Returns it, and the settings that it began with."""
    kind = type(optimizer)
    other = kind.__new__(kind)
    for name, value in vars(optimizer).items():
        if name not in ("step", "state", "param_groups"):
            is_shared = not isinstance(value, (list, dict, set))
            other.__dict__[name] = value if is_shared else copy.copy(value)
    other._optimizer_step_pre_hooks = OrderedDict()
    other._optimizer_step_post_hooks = OrderedDict()
    other.state = defaultdict(dict)
    other.state.update({param: dict(state) for param, state in zip(params, states) if state})
    settings = {key: value for key, value in group.items() if key != "params"}
    if all(param.grad is None for param in params):  # with foreach some classes raise
        for each in (settings, other.defaults):
            each |= {"foreach": False} if each.get("foreach") else {}
    own = copy.deepcopy(settings) | {"params": list(params)}
    other.param_groups = [own]
    if first is not None and first is not group:
        of_first = {key: value for key, value in first.items() if key != "params"}
        other.param_groups.insert(0, copy.deepcopy(of_first) | {"params": []})
    return other, settings


def class_step(
    optimizer: torch.optim.Optimizer,
    group: Group,
    param: torch.nn.Parameter,
    state: Mapping[str, Any],
    method: str = "step",
    first: Group | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps one parameter as :func:`step_as` does. Returns its state, and the changed settings."""
    (stepped,), changed = step_as(optimizer, group, [param], [state], method, first)
    return stepped, changed


def is_equal(one: Any, other: Any) -> bool:
    """Tells whether two settings are the same."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return same_form(one, other) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
