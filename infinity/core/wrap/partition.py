"""Partition: groups the parameters that move together, from the model's structure.

container
        a module without a forward, which is never called: a ModuleList, ModuleDict, ParameterList,
        or a module that only gives names to others
block   a child of a container or a Sequential with a sibling of the same class: the repeated part
        of a model. It may be a container itself
rest    everything else: a module with large parameters of its own is a unit, small ones share one
owner   a module whose forward needs a unit: the block, or any module that holds one of the unit's
        parameters. For a container, the outermost modules inside that are called
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import torch
from torch import nn

from ...errors import ConfigError
from ...ext.coded.coded import Coded
from ...ext.packed.packed import (
    has_inner,
    is_packed,
    moved_tensors,
    named_tensors,
    own_tensors,
    tensors_of,
)
from ...ext.pipeline.shared import is_shared
from ...ext.rows.experts import divided_parameters, has_experts, is_frozen_table
from ..units.forms import division_of, form_of
from .parts import called_for

SMALL_NBYTES = 256 * 1024


class RowsAtOnce(NamedTuple):
    """How many rows of a weight its layers compute with at once. ``summed_itemsize``: bytes of each
    element in which a backward sums the gradient of such rows, beside that itself."""

    rows: int
    summed_itemsize: int = 0


@dataclass(eq=False)
class Group:
    """One future unit."""

    name: str
    params: list[nn.Parameter]
    owners: list[nn.Module]
    block: nn.Module | None = None  # the module that is this unit, if it is one
    at_once: RowsAtOnce | None = None  # of its one weight; None: it is gathered whole
    chosen: nn.Module | None = None  # the module, if a forward reads some of its rows only
    is_divided: bool = False  # experts, of which other data ranks have others
    place: int = 0  # of its first parameter in the model: about the order of use
    tied: set[nn.Parameter] = field(default_factory=set)  # those that have several names
    # Those whose gradients land use by use, and the modules that use them.
    tables: dict[nn.Parameter, list[nn.Module]] = field(default_factory=dict)

    @property
    def called(self) -> list[nn.Module]:
        """The block, or the modules that are called inside a block that is a container."""
        inside = set() if self.block is None else set(self.block.modules())
        return [owner for owner in self.owners if owner in inside]

    @property
    def is_used_apart(self) -> bool:
        """Whether several modules use it, and not only those of one block, or any module may."""
        if self.block is None:
            return len(self.owners) != 1 and self.at_once is None
        return len(self.owners) > len(self.called)


STAYS = "_infinity_stays"  # attribute of a parameter


class Staying:
    """Parameters that stay in place though their class could be moved."""

    def __init__(self, params: Iterable[torch.Tensor]):
        self._params = list(params)
        for param in self._params:
            setattr(param, STAYS, True)

    def remove(self) -> None:
        """Lets the engine move them again. Idempotent."""
        for param in self._params:
            vars(param).pop(STAYS, None)


def is_managed(param: torch.Tensor) -> TypeGuard[nn.Parameter]:
    """Tells whether the engine moves ``param``: every Parameter and carrier, but for unknown
    subclasses and what :class:`Staying` names."""
    own_class = form_of(param).moves(param) or is_packed(param)
    return own_class and not hasattr(param, STAYS)


def partition(
    model: nn.Module,
    units: str | tuple[str, ...],
    at_once: Mapping[nn.Parameter, RowsAtOnce] | None = None,
) -> list[Group]:
    """Makes the groups of ``model`` in the order of its modules; every managed parameter is in
    exactly one.

    ``units``: "auto", or class names of the modules that are units. ``at_once``: weights
    that are not gathered whole; each is a group of its own without an owner. Raises ConfigError for
    a name without a module.
    """
    blocks = (
        list(_repeated_blocks(model, "", model))
        if isinstance(units, str)
        else _named_blocks(model, units)
    )
    names = parameter_names(model)
    groups = [
        Group(names[param][0], [param], [], at_once=rows) for param, rows in (at_once or {}).items()
    ]
    taken = set(at_once or ())
    for param in [
        param
        for param in tensors_of(model)
        if is_shared(param) and is_managed(param) and param not in taken
    ]:
        # Alone, so that both of its stages have the same layout.
        groups.append(Group(names[param][0], [param], []))
        taken.add(param)
    for name, module in model.named_modules():
        if params := [p for p in divided_parameters(module) if is_managed(p) and p not in taken]:
            # On other ranks than the modules around them.
            chosen = module if _brings_rows(module, names, taken) else None
            groups.append(Group(name, params, [module], chosen=chosen, is_divided=True))
            taken |= set(params)
    for name, module in model.named_modules():
        if _brings_rows(module, names, taken):
            groups.append(Group(name, moved_tensors(module), [module], chosen=module))
            taken |= set(groups[-1].params)
    for name, block in blocks:
        params = [p for p in tensors_of(block) if is_managed(p) and p not in taken]
        if params:
            taken |= set(params)
            owners = [part for part in called_parts(model, block) if _holds(part, params)]
            groups.append(Group(name, params, owners, block))
    largest = max((_nbytes(group.params) for group in groups if group.at_once is None), default=0)
    groups += _rest(
        model, taken, small=max(SMALL_NBYTES, largest // 4), cap=max(4 * SMALL_NBYTES, largest)
    )
    _add_outside_owners(model, groups)
    places = {param: place for place, param in enumerate(names)}
    for group in groups:
        group.place = min(places[param] for param in group.params)
        group.tied = {param for param in group.params if len(names[param]) > 1}
    return groups


def _brings_rows(
    module: nn.Module,
    names: Mapping[torch.Tensor, list[str]],
    taken: Container[torch.Tensor],
) -> bool:
    """Tells whether a forward of ``module`` reads some rows only of its own parameters, which are
    in no group yet and no other module's."""
    own = moved_tensors(module) if has_experts(module) or is_frozen_table(module) else []
    packed = filter(has_inner, module.parameters(recurse=False))
    return (
        bool(own)
        and all(isinstance(param, Coded) for param in packed)  # which tells the rows that it reads
        and all(
            is_managed(param) and len(names[param]) == 1 and param not in taken for param in own
        )
    )


def _nbytes(params: list[nn.Parameter]) -> int:
    return sum(division_of(param).span * param.element_size() for param in params)


def _is_container(model: nn.Module, module: nn.Module) -> bool:
    """Tells whether ``module``, in ``model``, is never called."""
    return module is not model and all(
        inspect.getattr_static(each, "forward", None) is nn.Module.forward
        for each in called_for(model, module)
    )


def called_parts(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """Lists ``module``, or the outermost modules inside a container that are called."""
    if not _is_container(model, module):
        return [module]
    parts = (part for child in module.children() for part in called_parts(model, child))
    return list(dict.fromkeys(parts))


def _holds(module: nn.Module, params: list[nn.Parameter]) -> bool:
    return not set(params).isdisjoint(tensors_of(module))


def _longest_list(model: nn.Module, module: nn.Module) -> int:
    """Counts the modules of the longest list of one class in ``module``, a container, and in the
    containers inside."""
    if not _is_container(model, module):
        return 0
    children = list(module.children())
    is_list = isinstance(module, nn.ModuleList) and len(set(map(type, children))) == 1
    return max(len(children) * is_list, *(_longest_list(model, each) for each in children), 0)


def _repeated_blocks(
    model: nn.Module, prefix: str, module: nn.Module
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost blocks in module order, without searching inside a block. A container of
    a longer list than the one it is in has the blocks inside, not beside it."""
    counts: Counter[type] = Counter()
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or _is_container(
        model, module
    ):
        counts.update(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if (
            counts[type(child)] >= 2
            and next(child.parameters(), None) is not None
            and _longest_list(model, child) <= counts[type(child)]
        ):
            yield path, child
        else:
            yield from _repeated_blocks(model, path, child)


def _named_blocks(model: nn.Module, units: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    blocks, inside = [], set()
    for name, module in model.named_modules():
        if type(module).__name__ in units and module not in inside:
            blocks.append((name or "model", module))
            inside |= set(module.modules())
    classes = {type(module).__name__ for module in model.modules()}
    if missing := [unit for unit in units if unit not in classes]:
        raise ConfigError(
            f"units: no module of class {', '.join(missing)}; the model has"
            f" {', '.join(sorted(classes))}"
        )
    return blocks


def _rest(model: nn.Module, taken: set[nn.Parameter], *, small: int, cap: int) -> list[Group]:
    """Groups the parameters outside blocks: one group per module with more than ``small`` bytes;
    smaller ones share groups of up to ``cap`` bytes."""
    groups: list[Group] = []
    shared: Group | None = None
    for name, module in model.named_modules():
        params = [p for p in own_tensors(module) if is_managed(p) and p not in taken]
        params = list(dict.fromkeys(params))
        if not params:
            continue
        taken |= set(params)
        owners = [] if _is_container(model, module) else [module]
        if _nbytes(params) > small:
            groups.append(Group(name or "model", params, owners))
            continue
        if shared is None or _nbytes(shared.params) + _nbytes(params) > cap:
            shared = Group(f"rest:{name or 'model'}", [], [])
            groups.append(shared)
        shared.params += params
        shared.owners += owners
    return groups


def _add_outside_owners(model: nn.Module, groups: list[Group]) -> None:
    """Makes every called module that holds a tied parameter an owner of that parameter's group."""
    group_of = {param: group for group in groups for param in group.params}
    inside = {id(group): {m for owner in group.owners for m in owner.modules()} for group in groups}
    for module in model.modules():
        for param in own_tensors(module):
            group = group_of.get(param)
            if (
                group is not None
                and group.at_once is None
                and module not in inside[id(group)]
                and module not in group.owners
                and not _is_container(model, module)
            ):
                group.owners.append(module)


def held_nbytes(model: nn.Module, groups: list[Group], nbytes_of: dict[int, int]) -> int:
    """Returns the most weight bytes that a forward or backward holds at once. ``nbytes_of``:
    id(group) -> bytes.

    Nested forwards hold the units of all of them; an operation outside of owners holds what it
    uses. A backward holds a unit that is used apart (tied weights, small ones that share a unit)
    from its first use to its last.
    """
    owned: dict[nn.Module, list[Group]] = {}
    for group in groups:
        for owner in group.owners:
            owned.setdefault(owner, []).append(group)
    unowned = (group for group in groups if group.block is not None and not group.owners)
    most = max((nbytes_of[id(group)] for group in unowned), default=0)
    pending: list[tuple[nn.Module, frozenset[int]]] = [(model, frozenset())]
    seen: set[tuple[int, frozenset[int]]] = set()
    while pending:
        module, above = pending.pop()
        here = above | {id(group) for group in owned.get(module, ())}
        if (id(module), here) in seen:
            continue
        seen.add((id(module), here))
        most = max(most, sum(nbytes_of[group] for group in here))
        pending += [(child, here) for child in module.children()]
    return most + sum(nbytes_of[id(group)] for group in groups if group.is_used_apart)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Maps each parameter and carrier to all its names, in the order of
    ``named_parameters(remove_duplicate=False)``, carriers last."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in named_tensors(model):
        names.setdefault(param, []).append(name)
    return names
