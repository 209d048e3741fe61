"""Matrices: those that torch's Muon steps a parameter as.

matrix   rows and columns that Newton-Schulz runs on. The elements of a parameter are those of its
         matrices, one after the other
split    the key of a group that says which matrices its parameters are:

         none        a parameter of two dimensions is one matrix; one of four or more, as that of a
                     convolution, is (out, the rest)
         "flat"      (out, the rest), also with three dimensions
         "experts"   one for each index of all dimensions but the last two
         a number    so many blocks of as many rows: the heads of a projection
         numbers     the rows of each block: of queries, keys and values in one parameter

Numbers divide every expert of three dimensions, and the flattened parameter of a convolution.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...core.step.known import NO_NAMES, Known, Names
from ...core.units.handle import handle_of
from ...errors import ConfigError
from .class_code import Group, class_step, step_as

SPLIT = "split"
FLAT, EXPERTS = "flat", "experts"
WANTED = '"flat", "experts", a number of equal blocks of rows, or a list of the rows of each'
OTHERS = (
    "give it to a second optimizer (wrap_model(model, [muon, adamw])), or to a group with"
    " use_muon=False of pytorch_optimizer's Muon"
)


def shapes_of(shape: Sequence[int], split: Any) -> list[tuple[int, int]]:
    """Lists the rows and columns of the matrices of a parameter of ``shape``, in the order of its
    elements. Raises ValueError, with the reason and the remedy, if ``split`` gives it none."""
    if len(shape) < 2:
        raise ValueError(f"is no matrix: {OTHERS}")
    by_rows = split is not None and not isinstance(split, str)
    if split == EXPERTS and len(shape) == 2:
        raise ValueError(f"has no dimension of experts: leave {SPLIT!r} out of its group")
    if split is None and len(shape) == 3:
        raise ValueError(
            f'may be experts or a convolution: set {SPLIT!r} of its group to "experts" or "flat"'
        )
    is_experts = split == EXPERTS or (by_rows and len(shape) == 3)
    count, rows = (math.prod(shape[:-2]), shape[-2]) if is_experts else (1, shape[0])
    columns = shape[-1] if is_experts else math.prod(shape[1:])
    blocks = [rows]
    if by_rows:
        blocks = list(split) if isinstance(split, Sequence) else [rows // split] * split
        if sum(blocks) != rows or 0 in blocks:
            raise ValueError(
                f"has {rows} rows, which are not those of {SPLIT}={split!r}: set it to numbers of"
                " rows whose sum they are, or to a number that divides them"
            )
    return [(each, columns) for each in blocks * count]


def multiplications(shape: Sequence[int], split: Any) -> int:
    """Estimates those of the steps of a parameter's matrices: of each by its own square."""
    return sum(rows * columns * min(rows, columns) for rows, columns in shapes_of(shape, split))


def check_split(
    known: Known,
    groups: Sequence[Mapping[str, Any]],
    is_moved: Callable[[torch.Tensor], bool],
    names: Names = NO_NAMES,
) -> None:
    """Raises ConfigError if a group has a ``split`` that cannot be honoured, or a parameter that is
    not a matrix, by its name."""
    for index, group in enumerate(groups):
        split, where = group.get(SPLIT), f"the optimizer's group {index} has {SPLIT}"
        if not known.splits:
            if "use_muon" in group and split is not None:
                raise ConfigError(f"{where}={split!r}, which only torch.optim.Muon has here")
            continue
        if not _is_valid(split):
            raise ConfigError(f"{where}={split!r}: set it to {WANTED}")
        for param in group["params"]:
            if not isinstance(param, torch.Tensor):  # a name in a checkpoint
                continue
            handle = handle_of(param)
            name = names.get(param, ["outside the model"])[0] if handle is None else handle.name
            what = f"{known.name}: parameter {name} of shape {tuple(param.shape)}"
            try:
                shapes = shapes_of(param.shape, split)
            except ValueError as error:
                raise ConfigError(f"{what} {error}") from None
            if not is_moved(param) and shapes != [tuple(param.shape)]:
                raise ConfigError(
                    f"{what} stays where it is, where torch's own step has no {SPLIT}: {OTHERS}"
                )


def _is_valid(split: Any) -> bool:
    if split is None or split in (FLAT, EXPERTS):
        return True
    numbers = split if isinstance(split, (list, tuple)) else [split]
    return bool(numbers) and all(type(each) is int and each > 0 for each in numbers)


def matrix_step(
    optimizer: torch.optim.Optimizer,
    group: Group,
    param: torch.nn.Parameter,
    state: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps one parameter as :func:`.class_code.class_step` does, with each of its matrices as a
    parameter of the class. The state has the parameter's shape."""
    shapes = shapes_of(param.shape, group.get(SPLIT))
    if shapes == [tuple(param.shape)]:
        return class_step(optimizer, group, param, state)

    def cut(value: torch.Tensor) -> list[torch.Tensor]:
        parts = value.detach().reshape(-1).split([rows * columns for rows, columns in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes)]

    def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.detach().reshape(-1) for part in parts]).view(param.shape)

    def is_of_elements(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == param.shape

    params = [torch.nn.Parameter(part) for part in cut(param)]
    for each, grad in zip(params, cut(param.grad)):
        each.grad = grad
    states: list[dict[str, Any]] = [{} for _ in shapes]
    for name, value in state.items():
        parts = cut(value) if is_of_elements(value) else [copy.deepcopy(value) for _ in shapes]
        for of_one, part in zip(states, parts):
            of_one[name] = part
    stepped, changed = step_as(optimizer, group, params, states)
    param.data.copy_(joined(params))
    return {name: joined([each[name] for each in stepped]) for name in stepped[0]}, changed
