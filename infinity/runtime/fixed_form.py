"""FixedForm: keeps the form of a wrapped model: which parameters its modules have, on what device
and in what dtype.

Conversions walk over the modules and change buffers on the way. Functions that replace a parameter
remove the old one first. So both are refused at their start, not at the first weight that they
reach.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..state import mistakes
from ..state.handle import handle_of


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
            _refuse_conversion(fn, module.parameters(recurse))
            return (
                type(module)._apply(module, fn, recurse)
                if of_class is None
                else of_class(fn, recurse)
            )

        module.__dict__["_apply"] = apply
        module.__dict__["_parameters"] = FixedParameters(module._parameters)

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


def _refuse_conversion(
    fn: Callable[[torch.Tensor], torch.Tensor], params: Iterable[nn.Parameter]
) -> None:
    """Raises UsageError if ``fn`` would make another tensor of a managed parameter."""
    for param in params:
        if (handle := handle_of(param)) is None:
            continue
        with torch.no_grad():
            converted = fn(param)  # a parameter at home raises here, or comes back unchanged
        if converted is not param:
            raise handle.engine.refusal(handle, "a conversion of the model")


class FixedParameters(dict):
    """The parameters of one module by name. A managed one cannot be removed or registered under
    another name, except inside a forward: some modules rebuild their parameters there."""

    def __setitem__(self, name: str, param: Any) -> None:
        if name not in self:
            _refuse_another_form(param, f"registered as {name}")
        super().__setitem__(name, param)

    def __delitem__(self, name: str) -> None:
        _refuse_another_form(self.get(name), "taken off its module")
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Removes ``name``. Raises UsageError for a managed parameter."""
        _refuse_another_form(self.get(name), "taken off its module")
        return super().pop(name, *default)


def _refuse_another_form(param: Any, what: str) -> None:
    handle = handle_of(param)
    if handle is not None and not handle.engine.computing:
        raise UsageError(
            f"parameter {handle.name} is managed by Infinity and cannot be {what}."
            f" {mistakes.advice() or mistakes.UNWRAP}"
        )
