"""Loads: has ``load_state_dict`` set packed weights that are tensor subclasses, at any home.

A subclass copies its inner tensors past the rules of parameters at rest. So torch loads into a copy
of the weight, in memory of its own, whose inner tensors then go home.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from ...core.run.replaced_forward import ReplacedForward
from ...core.units.handle import handle_of
from ...core.units.inner import filled, has_inner, inner_tensors


def loads_into_home(module: nn.Module) -> ReplacedForward:
    """Replaces how torch loads the parameters of ``module`` itself. Returns the replacement."""
    given, reference = module.__dict__.get("_load_from_state_dict"), weakref.ref(module)

    def load(state: dict[str, Any], prefix: str, *args: Any) -> None:
        here = cast("nn.Module", reference())
        torchs = given or MethodType(type(here)._load_from_state_dict, here)
        # Hooks of the module may rename them.
        keys = [key for key in state if key.startswith(prefix)]
        params = here._parameters
        own = {name: param for name, param in params.items() if keys and has_inner(param)}
        copies = {name: filled(param) for name, param in own.items()}
        for key in keys:
            if has_inner(state[key]):  # of a state dict that keeps parameters, at rest
                state[key] = filled(state[key])
        try:
            params.update(copies)
            torchs(state, prefix, *args)
        finally:
            params.update({name: own[name] for name in own if params[name] is copies[name]})
        for name in own:
            _send(own[name], copies[name])

    return ReplacedForward(module, load, "_load_from_state_dict")


@torch.no_grad()
def _send(weight: Any, value: Any) -> None:
    """Sends the inner tensors of ``value`` to those of ``weight``, at home or with the module."""
    for inner, given in zip(inner_tensors(weight), inner_tensors(value), strict=True):
        if (handle := handle_of(inner)) is not None:
            handle.engine.write_value(handle, given)
        elif given is not inner:
            inner.copy_(given)
