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

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from ...errors import ConfigError
from ..units.forms import division_of
from ..units.rows import RowReader
from .described_model import DescribedModel

SMALL_NBYTES = 256 * 1024


class RowsAtOnce(NamedTuple):
    """The rows of a weight with which its layers compute at once. ``numel``: the elements of these
    rows. ``summed_itemsize``: bytes of each element in which a backward sums the gradient of such
    rows, beside that itself."""

    numel: int
    summed_itemsize: int = 0


@dataclass(eq=False)
class Group:
    """One future unit."""

    name: str
    params: list[nn.Parameter]
    owners: list[nn.Module]
    block: nn.Module | None = None  # the module that is this unit, if it is one
    at_once: RowsAtOnce | None = None  # of its one weight; None: it is gathered whole
    reader: RowReader | None = None  # if a forward of its owner reads some of its rows only
    is_divided: bool = False  # experts, of which other data ranks have others
    place: int = 0  # of its first parameter in the model: about the order of use
    tied: set[nn.Parameter] = field(default_factory=set)  # those that have several names
    tables: set[nn.Parameter] = field(default_factory=set)  # whose gradients land use by use

    @property
    def called(self) -> list[nn.Module]:
        """The block, or the modules that are called inside a block that is a container."""
        inside = set() if self.block is None else set(self.block.modules())
        return [owner for owner in self.owners if owner in inside]

    @property
    def has_distant_users(self) -> bool:
        """Whether several modules use it, and not only those of one block, or any module may."""
        if self.block is None:
            return len(self.owners) != 1 and self.at_once is None
        return len(self.owners) > len(self.called)


def partition(
    model: DescribedModel,
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
        list(_repeated_blocks(model, "", model.module))
        if isinstance(units, str)
        else _named_blocks(model, units)
    )
    names = model.names
    groups = [
        Group(names[param][0], [param], [], at_once=rows) for param, rows in (at_once or {}).items()
    ]
    taken = {*(at_once or ()), *model.unmanaged.values()}
    for param in model.tensors_in(model.module) if model.alone else ():
        if param in model.alone and param not in taken:
            groups.append(Group(names[param][0], [param], []))
            taken.add(param)
    for module, divided in model.divided.items():
        if params := [p for p in divided if p not in taken]:
            # On other ranks than the modules around them.
            reader = model.reader_of(module, taken)
            name = model.modules[module]
            groups.append(Group(name, params, [module], reader=reader, is_divided=True))
            taken |= set(params)
    for module in model.read_by_rows:
        if reader := model.reader_of(module, taken):
            groups.append(Group(model.modules[module], reader.params, [module], reader=reader))
            taken |= set(reader.params)
    for name, block in blocks:
        params = [p for p in model.tensors_in(block) if p not in taken]
        if params:
            taken |= set(params)
            owners = [
                part
                for part in model.called_in(block)
                if not set(params).isdisjoint(model.tensors_in(part))
            ]
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


def _nbytes(params: list[nn.Parameter]) -> int:
    return sum(division_of(param).span * param.element_size() for param in params)


def _longest_list(model: DescribedModel, module: nn.Module) -> int:
    """Counts the modules of the longest list of one class in ``module``, a container, and in the
    containers inside."""
    if module not in model.containers:
        return 0
    children = [child for _, child in model.children[module]]
    is_list = isinstance(module, nn.ModuleList) and len(set(map(type, children))) == 1
    return max(len(children) * is_list, *(_longest_list(model, each) for each in children), 0)


def _repeated_blocks(
    model: DescribedModel, prefix: str, module: nn.Module
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost blocks in module order, without searching inside a block. A container of
    a longer list than the one it is in has the blocks inside, not beside it."""
    children = model.children[module]
    counts: Counter[type] = Counter()
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or (
        module in model.containers
    ):
        counts.update(type(child) for _, child in children)
    for name, child in children:
        path = f"{prefix}.{name}" if prefix else name
        if (
            counts[type(child)] >= 2
            and next(child.parameters(), None) is not None
            and _longest_list(model, child) <= counts[type(child)]
        ):
            yield path, child
        else:
            yield from _repeated_blocks(model, path, child)


def _named_blocks(model: DescribedModel, units: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    blocks, inside = [], set()
    for module, name in model.modules.items():
        if type(module).__name__ in units and module not in inside:
            blocks.append((name or "model", module))
            inside |= set(model.inside(module))
    classes = {type(module).__name__ for module in model.modules}
    if missing := [unit for unit in units if unit not in classes]:
        raise ConfigError(
            f"units: no module of class {', '.join(missing)}; the model has"
            f" {', '.join(sorted(classes))}"
        )
    return blocks


def _rest(model: DescribedModel, taken: set[nn.Parameter], *, small: int, cap: int) -> list[Group]:
    """Groups the parameters outside blocks: one group per module with more than ``small`` bytes;
    smaller ones share groups of up to ``cap`` bytes."""
    groups: list[Group] = []
    shared: Group | None = None
    for module, name in model.modules.items():
        params = [p for p in model.own[module] if p not in taken]
        params = list(dict.fromkeys(params))
        if not params:
            continue
        taken |= set(params)
        owners = [] if module in model.containers else [module]
        if _nbytes(params) > small:
            groups.append(Group(name or "model", params, owners))
            continue
        if shared is None or _nbytes(shared.params) + _nbytes(params) > cap:
            shared = Group(f"rest:{name or 'model'}", [], [])
            groups.append(shared)
        shared.params += params
        shared.owners += owners
    return groups


def _add_outside_owners(model: DescribedModel, groups: list[Group]) -> None:
    """Makes every called module that holds a tied parameter an owner of that parameter's group."""
    group_of = {param: group for group in groups for param in group.params}
    inside = {
        id(group): {m for owner in group.owners for m in model.inside(owner)} for group in groups
    }
    for module, own in model.own.items():
        for param in own:
            group = group_of.get(param)
            if (
                group is not None
                and group.at_once is None
                and module not in inside[id(group)]
                and module not in group.owners
                and module not in model.containers
            ):
                group.owners.append(module)


def held_nbytes(model: DescribedModel, groups: list[Group], nbytes_of: dict[int, int]) -> int:
    """Returns the most weight bytes that a forward or backward holds at once. ``nbytes_of``:
    id(group) -> bytes.

    Nested forwards hold the units of all of them; an operation outside of owners holds what it
    uses. A backward holds a unit that has distant users (tied weights, small ones that share a
    unit) from its first use to its last.
    """
    owned: dict[nn.Module, list[Group]] = {}
    for group in groups:
        for owner in group.owners:
            owned.setdefault(owner, []).append(group)
    unowned = (group for group in groups if group.block is not None and not group.owners)
    most = max((nbytes_of[id(group)] for group in unowned), default=0)
    pending: list[tuple[nn.Module, frozenset[int]]] = [(model.module, frozenset())]
    seen: set[tuple[int, frozenset[int]]] = set()
    while pending:
        module, above = pending.pop()
        here = above | {id(group) for group in owned.get(module, ())}
        if (id(module), here) in seen:
            continue
        seen.add((id(module), here))
        most = max(most, sum(nbytes_of[group] for group in here))
        pending += [(child, here) for _, child in model.children[module]]
    return most + sum(nbytes_of[id(group)] for group in groups if group.has_distant_users)
