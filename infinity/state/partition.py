"""Partition: groups the parameters that move together, from the model's structure.

block   a child of a ModuleList, ModuleDict or Sequential with a sibling of the same class: the
        repeated part of a model
rest    everything else: a module with large parameters of its own is a unit, small ones share one
owner   a module whose forward needs a unit: the block, or any module that holds one of the unit's
        parameters
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import nn

from ..errors import ConfigError
from .coded import Coded
from .dtensors import is_distributed_parameter, span_of
from .experts import divided_parameters, has_experts, is_frozen_table
from .packed import (
    has_inner,
    is_packed,
    moved_tensors,
    named_tensors,
    own_tensors,
    tensors_of,
)
from .shared import is_shared

SMALL_NBYTES = 256 * 1024


@dataclass(eq=False)
class Group:
    """One future unit."""

    name: str
    params: list[nn.Parameter]
    owners: list[nn.Module]
    block: nn.Module | None = None  # the module that is this unit, if it is one
    # Its one weight is brought to the device in tiles of this many rows; 0: whole.
    tile_rows: int = 0
    chosen: nn.Module | None = None  # the module, if a forward reads some of its rows only
    is_divided: bool = False  # experts, of which other data ranks have others
    place: int = 0  # of its first parameter in the model: about the order of use


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
    own_class = type(param) is nn.Parameter or is_distributed_parameter(param) or is_packed(param)
    return own_class and not hasattr(param, STAYS)


def partition(
    model: nn.Module, units: str | tuple[str, ...], tiled: Mapping[nn.Parameter, int] | None = None
) -> list[Group]:
    """Makes the groups of ``model`` in the order of its modules; every managed parameter is in
    exactly one.

    ``units``: "auto", or class names of the modules that are units. ``tiled``: weights that run in
    tiles -> rows of a tile; each is a group of its own without an owner. Raises ConfigError for a
    name without a module.
    """
    blocks = (
        list(_repeated_blocks("", model)) if isinstance(units, str) else _named_blocks(model, units)
    )
    names = parameter_names(model)
    groups = [
        Group(names[param][0], [param], [], tile_rows=rows) for param, rows in (tiled or {}).items()
    ]
    taken = set(tiled or ())
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
            groups.append(Group(name, params, [block], block))
    largest = max((_nbytes(group.params) for group in groups if not group.tile_rows), default=0)
    groups += _rest(
        model, taken, small=max(SMALL_NBYTES, largest // 4), cap=max(4 * SMALL_NBYTES, largest)
    )
    _add_outside_owners(model, groups)
    places = {param: place for place, param in enumerate(names)}
    for group in groups:
        group.place = min(places[param] for param in group.params)
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
    return sum(span_of(param) * param.element_size() for param in params)


def _repeated_blocks(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost blocks in module order, without searching inside a block."""
    repeated: set[type] = set()
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        counts = Counter(type(child) for child in module.children())
        repeated = {cls for cls, count in counts.items() if count >= 2}
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if type(child) in repeated and next(child.parameters(), None) is not None:
            yield path, child
        else:
            yield from _repeated_blocks(path, child)


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
        if _nbytes(params) > small:
            groups.append(Group(name or "model", params, [module]))
            continue
        if shared is None or _nbytes(shared.params) + _nbytes(params) > cap:
            shared = Group(f"rest:{name or 'model'}", [], [])
            groups.append(shared)
        shared.params += params
        shared.owners.append(module)
    return groups


def _add_outside_owners(model: nn.Module, groups: list[Group]) -> None:
    """Makes every module that holds a tied parameter an owner of that parameter's group."""
    group_of = {param: group for group in groups for param in group.params}
    inside = {id(group): {m for owner in group.owners for m in owner.modules()} for group in groups}
    for module in model.modules():
        for param in own_tensors(module):
            group = group_of.get(param)
            if (
                group is not None
                and not group.tile_rows
                and module not in inside[id(group)]
                and module not in group.owners
            ):
                group.owners.append(module)


def held_nbytes(model: nn.Module, groups: list[Group], nbytes_of: dict[int, int]) -> int:
    """Returns the most weight bytes that a forward or backward holds at once. ``nbytes_of``:
    id(group) -> bytes.

    Nested forwards hold the units of all of them. A backward holds a unit of several owners (tied
    weights, small ones that share a unit) from its first use to its last.
    """
    owned: dict[nn.Module, list[Group]] = {}
    for group in groups:
        for owner in group.owners:
            owned.setdefault(owner, []).append(group)
    most = 0
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
    return most + sum(nbytes_of[id(group)] for group in groups if len(group.owners) > 1)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Maps each parameter and carrier to all its names, in the order of
    ``named_parameters(remove_duplicate=False)``, carriers last."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in named_tensors(model):
        names.setdefault(param, []).append(name)
    return names
