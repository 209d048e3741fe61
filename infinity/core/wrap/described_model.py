"""DescribedModel: a model's modules, parameters and buffers, read once.

Checks, comparisons over the ranks, the layout and what a wrap restores work on it, so each sees the
same names in the same order. Extensions add what they know of a model
(:meth:`infinity.core.seams.Extension.describe_model`).
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import nn

from ... import native
from ...config import Config
from ...errors import ConfigError
from ..params import mistakes
from ..seams import Place, kinds
from ..units.added import always_rests, named_tensors, own_tensors
from ..units.forms import form_of, is_plain, local_of
from ..units.rows import RowReader
from .parts import merged_in, parts_of

UNMOVED = "_infinity_unmoved"  # attribute of a parameter


class Unmoved:
    """Parameters that stay in place though their class could be moved."""

    def __init__(self, params: Iterable[torch.Tensor]):
        self._params = list(params)
        for param in self._params:
            setattr(param, UNMOVED, True)

    def remove(self) -> None:
        """Lets the engine move them again. Idempotent."""
        for param in self._params:
            vars(param).pop(UNMOVED, None)


def is_managed(param: torch.Tensor) -> TypeGuard[nn.Parameter]:
    """Tells whether the engine moves ``param``: every Parameter and carrier, but for unknown
    subclasses and what :class:`Unmoved` names."""
    can_move = form_of(param).moves(param) or always_rests(param)
    return can_move and not hasattr(param, UNMOVED)


def unlisted_in(module: nn.Module) -> list[tuple[str, Place]]:
    """Lists the places of what no module lists, with their names."""
    return [each for kind in kinds() for each in kind.unlisted(module)]


def can_step(param: torch.Tensor, config: Config) -> bool:
    """Tells whether there are kernels to step ``param`` with, at a home."""
    dtype = config.param_dtype or param.dtype
    return is_managed(param) and param.dtype in native.DTYPES and dtype in native.DTYPES


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """The modules, parameters and buffers of one model. A carrier counts as a parameter. Valid
    until a module, a buffer or a tie of it is replaced."""

    module: nn.Module
    parts: list[nn.Module]  # called from outside: the model, or its stages here
    merged: dict[nn.Module, list[nn.Module]]  # modules that others are merged into, and these
    modules: dict[nn.Module, str]  # each once, by its first name, in torch's order
    children: dict[nn.Module, list[tuple[str, nn.Module]]]
    own: dict[nn.Module, list[nn.Parameter]]  # of each module itself
    named: list[tuple[str, nn.Parameter]]  # all names, of tied parameters too
    names: dict[torch.Tensor, list[str]]  # of each parameter, all
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    unlisted: list[tuple[str, Place]] = field(default_factory=list)  # see Extension.unlisted

    # What extensions add.
    alone: set[torch.Tensor] = field(default_factory=set)  # a unit each
    # Modules with other parameters on other data ranks, and these
    divided: dict[nn.Module, list[nn.Parameter]] = field(default_factory=dict)
    # Modules whose forward reads some rows only
    read_by_rows: dict[nn.Module, RowReader] = field(default_factory=dict)
    # Parameters whose gradients land use by use, on one rank, and the modules that use each
    tables: dict[nn.Parameter, list[nn.Module]] = field(default_factory=dict)
    codes: set[torch.Tensor] = field(default_factory=set)  # whose bytes are not numbers
    own_dtype: set[torch.Tensor] = field(default_factory=set)  # which keep it

    def read_rest(self) -> None:
        """Reads anew what stays with the modules: of a model on meta, buffers and unlisted tensors
        are others once they are real."""
        self.unlisted[:] = unlisted_in(self.module)
        buffers = self.module.named_buffers()
        self.buffers.update((name, each) for name, each in buffers if not always_rests(each))

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters, each once, by its first name."""
        return {names[0]: param for param, names in self.names.items()}  # type: ignore[misc]

    @property
    def managed(self) -> dict[str, nn.Parameter]:
        """The parameters that the engine moves."""
        return {name: param for name, param in self.params.items() if is_managed(param)}

    @property
    def unmanaged(self) -> dict[str, nn.Parameter]:
        """The other ones."""
        return {name: param for name, param in self.params.items() if not is_managed(param)}

    @property
    def distributed(self) -> dict[str, nn.Parameter]:
        """The parameters of which ranks have parts, managed or not."""
        return {name: param for name, param in self.params.items() if not is_plain(param)}

    @cached_property
    def divided_params(self) -> set[nn.Parameter]:
        """The parameters of which other data ranks have others."""
        return {param for params in self.divided.values() for param in params}

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's parts of the managed parameters."""
        return sum(local_of(param).nbytes for param in self.managed.values())

    @cached_property
    def users(self) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
        """The modules that have each parameter, and their names for it."""
        by_param: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self.modules:
            for name, param in module._parameters.items():
                if param is not None:
                    by_param.setdefault(param, []).append((module, name))
        return by_param

    @cached_property
    def containers(self) -> set[nn.Module]:
        """The modules that are never called, because they have no forward."""
        return {
            module
            for module in self.modules
            if module is not self.module
            and all(
                inspect.getattr_static(each, "forward", None) is nn.Module.forward
                for each in self.meant(module)
            )
        }

    def meant(self, module: nn.Module) -> list[nn.Module]:
        """Lists the modules that a call of ``module`` means: itself, or those merged into it."""
        return self.merged.get(module, [module])

    def inside(self, module: nn.Module) -> list[nn.Module]:
        """Lists ``module`` and all modules inside, each once, in torch's order."""
        modules: dict[nn.Module, None] = {}
        pending = [module]
        while pending:
            if (each := pending.pop()) not in modules:
                modules[each] = None
                pending += [child for _, child in reversed(self.children.get(each, []))]
        return list(modules)

    def reader_of(self, module: nn.Module, taken: Container[torch.Tensor]) -> RowReader | None:
        """Returns how a forward of ``module`` reads some rows only of its own parameters, if these
        move, are not ``taken``, and no other module's."""
        reader = self.read_by_rows.get(module)
        own = [] if reader is None else reader.params
        alone = own and all(len(self.names[param]) == 1 and param not in taken for param in own)
        return reader if alone else None

    def tensors_in(self, module: nn.Module) -> list[nn.Parameter]:
        """Lists the parameters of ``module`` and the modules inside, each once."""
        return list(dict.fromkeys(p for each in self.inside(module) for p in self.own[each]))

    def called_in(self, module: nn.Module) -> list[nn.Module]:
        """Lists ``module``, or the outermost modules inside a container that are called."""
        if module not in self.containers:
            return [module]
        inside = (part for _, child in self.children[module] for part in self.called_in(child))
        return list(dict.fromkeys(inside))


def read_model(module: Any) -> DescribedModel:
    """Reads the modules, parameters and buffers of ``module``, whose bytes it does not touch.
    Raises ConfigError for what is not a module."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model is a {type(module).__name__}, not a torch.nn.Module:"
            f" {mistakes.instead_of_model(module)}"
        )
    modules = {each: name for name, each in module.named_modules()}
    named = list(named_tensors(module))
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in named:
        names.setdefault(param, []).append(name)
    model = DescribedModel(
        module,
        parts_of(module),
        merged_in(module),
        modules,
        {each: list(each.named_children()) for each in modules},
        {each: own_tensors(each) for each in modules},
        named,
        names,
    )
    model.read_rest()
    for kind in kinds():
        kind.describe_model(model)
    return model
