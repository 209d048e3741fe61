"""FixedForm: keeps the form of a wrapped model: which parameters its modules have, on what device
and in what dtype.

Conversions walk over the modules and change buffers on the way. Functions that replace a parameter
remove the old one first. So both are refused at their start, not at the first weight that they
reach.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..params import mistakes
from ..units.handle import handle_of

REGISTER = nn.Module.register_parameter.__code__  # what an assignment calls


def fix_forms(roots: Iterable[nn.Module]) -> list[FixedForm]:
    """Keeps the form of every module of ``roots`` that has managed parameters, itself or in a
    child."""
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    holding = [
        module
        for module in modules
        if any(handle_of(param) is not None for param in module.parameters())
    ]
    return [FixedForm(module) for module in holding]


class FixedForm:
    """The form of one module, fixed until :meth:`remove`."""

    def __init__(self, module: nn.Module):
        self._module = reference = weakref.ref(module)
        self._apply = of_class = module.__dict__.get("_apply")

        def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            module = reference()
            for param in module.parameters(recurse):
                if (handle := handle_of(param)) is None:
                    continue
                with torch.no_grad():
                    converted = fn(param)  # a parameter at home raises, or comes back unchanged
                if converted is not param:
                    raise handle.engine.refusal(handle, "a conversion of the model")
            return (
                type(module)._apply(module, fn, recurse)
                if of_class is None
                else of_class(fn, recurse)
            )

        module.__dict__["_apply"] = apply
        module.__dict__["_parameters"] = FixedParameters(module._parameters)
        module.__dict__["_modules"] = FixedModules(module._modules)

    def remove(self) -> None:
        """Lets the module's form be changed again. Idempotent."""
        module = self._module()
        if module is None or type(module._parameters) is not FixedParameters:
            return
        if self._apply is None:
            module.__dict__.pop("_apply", None)
        else:
            module.__dict__["_apply"] = self._apply
        module.__dict__["_parameters"] = dict(module._parameters)
        module.__dict__["_modules"] = dict(module._modules)


class FixedParameters(dict):
    """The parameters of one module by name. A managed one cannot be removed, registered under
    another name, or replaced by assigning another parameter, except inside a forward: some modules
    rebuild their parameters there. torch's functional_call replaces values for a call, without
    registering them."""

    def __setitem__(self, name: str, param: Any) -> None:
        if name not in self:
            _refuse_another_form(param, f"registered as {name}")
        elif handle_of(param) is None and sys._getframe(1).f_code is REGISTER:
            _refuse_another_form(self[name], "replaced by another parameter")
        super().__setitem__(name, param)

    def __delitem__(self, name: str) -> None:
        _refuse_another_form(self.get(name), "taken off its module")
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Removes ``name``. Raises UsageError for a managed parameter."""
        _refuse_another_form(self.get(name), "taken off its module")
        return super().pop(name, *default)


class FixedModules(dict):
    """The children of one module by name. One with managed parameters cannot be removed, nor
    replaced by a module that does not have them."""

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        present = set() if module is None else {id(param) for param in module.parameters()}
        _refuse_without(self.get(name), present, "replaced with its module")
        super().__setitem__(name, module)

    def __delitem__(self, name: str) -> None:
        _refuse_without(self.get(name), set(), "removed with its module")
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Removes ``name``. Raises UsageError for a module with managed parameters."""
        _refuse_without(self.get(name), set(), "removed with its module")
        return super().pop(name, *default)


def _refuse_without(module: nn.Module | None, present: set[int], action: str) -> None:
    """Raises UsageError for the first managed parameter of ``module`` that is not ``present``."""
    for param in module.parameters() if module is not None else ():
        if id(param) not in present:
            _refuse_another_form(param, action)


def _refuse_another_form(param: Any, action: str) -> None:
    handle = handle_of(param)
    if handle is not None and not handle.engine.computing:
        raise UsageError(
            f"parameter {handle.name} is managed by Infinity and cannot be {action}."
            f" {mistakes.advice() or mistakes.UNWRAP}"
        )
