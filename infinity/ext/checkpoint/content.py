"""Content: names all tensors that a checkpoint holds of a model and its optimizer.

Tensors are stored per parameter, under its name: ``weight/<name>`` in the dtype in which the model
computes, ``master/<name>`` (low halves or fp32) if there is one, ``exp_avg/<name>`` and
``exp_avg_sq/<name>``. The names of 8-bit moments and their scales end in ``#`` and the offset of
their local part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.homes.arrays import StateArray
from ...core.run.engine import Engine
from ...core.run.job import Job
from ...core.run.registry import engine_of, wrapped
from ...core.step.optimizer import InfinityOptimizer
from ...core.step.recognised import as_given
from ...core.units.flat_layout import is_dense
from ...core.units.flat_param_spec import ARRAYS
from ...core.units.forms import division_of, is_plain
from ...core.units.handle import ParamHandle, handle_of
from ...core.units.inner import has_inner
from ...core.units.kept import Kept
from ...core.units.unit import ParamUnit
from ...errors import UsageError
from ...files.boxes import Box, boxes_of_run, order_of
from ...files.values import encode_value
from ...ranks.collectives import Collectives
from ..packed.packed import small_parts
from .home_values import HomeValues
from .saved_tensors import LocalPart

SAVED = [name for name in ARRAYS if name != "grad"]


def flat_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


class Pair(NamedTuple):
    """A wrapped model and its optimizers, of which a save or a load is."""

    engine: Engine
    model: nn.Module  # that has all local parameters
    optimizers: list[InfinityOptimizer]
    plain: list[torch.optim.Optimizer]  # without a parameter at home


def pair_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
) -> Pair:
    """Returns the pair that a user gave. Raises UsageError for what is not one."""
    engine, record = engine_of(model), wrapped(model)
    return Pair(engine, record.model, *record.take_optimizers(as_given(optimizer)))


def part_of_rank(handle: ParamHandle) -> LocalPart:
    """Returns the part of a parameter's global tensor with which its unit computes on this rank."""
    place = handle.flat_param.layout.placements[handle.index]
    return LocalPart(
        Box(division_of(handle.param).offset, tuple(place.shape)),
        order_of(place.shape, place.stride),
    )


Entry = tuple[HomeValues, dict[str, Any]]  # values, and their entry in the header


def unit_files(job: Job, unit: ParamUnit) -> list[dict[str, Entry]]:
    """Lists the unit's values that are at home here and that this rank writes, grouped by file.

    A run of elements is several boxes, and a file has at most one part of a tensor.
    """
    files: list[dict[str, Entry]] = []
    for handle in unit.handles:
        if not job.gradients.values.counts(handle):
            continue  # several ranks of the mesh hold it whole, and another one writes it
        for name in SAVED:
            wanted = (
                name == "weight"
                or handle.has_state
                or (name == "master" and handle.grad is not None)
            )
            if name in handle.flat_param.arrays and wanted:
                for number, (key, entry) in enumerate(_entries(job, handle, name)):
                    if number == len(files):
                        files.append({})
                    files[number][key] = entry
    return files


def _entries(job: Job, handle: ParamHandle, name: str) -> Iterator[tuple[str, Entry]]:
    flat_param, part = handle.flat_param, part_of_rank(handle)
    array, layout = flat_param.arrays[name], flat_param.layout
    begin, end = layout.part_of_param(name, handle.index)
    at_home, _ = layout.part_at_home(name, handle.index)
    if flat_param.spec.moment_dtype == torch.uint8 and name not in ("weight", "master"):
        if begin < end or (not part.box.numel and job.ranks.rank == 0):
            values = HomeValues(job.store, array, at_home, (end - begin,), (0,))
            place = {"saved_offsets": [begin], "part": part.describe()}
            yield (
                f"{name}/{handle.name}#{'-'.join(map(str, part.box.offset)) or 0}",
                (values, place),
            )
        return
    for entry in _boxes(job, part, array, at_home - begin, begin, end):
        yield f"{name}/{handle.name}", entry


def _boxes(
    job: Job, part: LocalPart, array: StateArray, first: int, begin: int, end: int
) -> Iterator[Entry]:
    """Yields elements ``begin`` to ``end`` of a local part, as boxes of the global tensor. The
    part's first element is at ``first`` of ``array``."""
    boxes = list(boxes_of_run(part.box.shape, part.order, begin, end))
    if not part.box.numel and job.ranks.rank == 0:
        boxes = [(Box((0,) * len(part.box.shape), part.box.shape), begin)]
    for box, at in boxes:
        values = HomeValues(job.store, array, first + at, box.shape, tuple(part.order))
        yield values, {"saved_offsets": list(box.moved(part.box.offset).offset)}


def kept_files(job: Job, kept: Sequence[Kept], unit: ParamUnit) -> list[dict[str, Entry]]:
    """Lists the unit's values of ``kept`` arrays that this rank writes, as :func:`unit_files`
    does."""
    files: list[dict[str, Entry]] = []
    for handle in filter(job.gradients.values.counts, unit.handles):
        layout = handle.flat_param.layout
        begin, end = layout.part_of_param("weight", handle.index)
        first = layout.part_at_home("weight", handle.index)[0] - begin
        for each in kept:
            if not each.has(handle):
                continue
            array = each.array_of(handle.flat_param)
            entries = _boxes(job, part_of_rank(handle), array, first, begin, end)
            for number, entry in enumerate(entries):
                if number == len(files):
                    files.append({})
                files[number][f"{each.name}/{handle.name}"] = entry
    return files


def describe_parameter(handle: ParamHandle) -> dict[str, Any]:
    spec, param = handle.flat_param.spec, handle.param
    place = handle.flat_param.layout.placements[handle.index]
    return {
        "shape": list(param.shape),  # of the global tensor
        "stride": list(place.stride if is_plain(param) else _dense_stride(param)),
        "dtype": str(spec.dtype).removeprefix("torch."),
        # Not every parameter of a stepped flat param is trained.
        "master": spec.master.name if handle.grad is not None else None,
        "moments": str(spec.moment_dtype).removeprefix("torch."),
        "step": handle.step,
    } | ({"keeps_moments": True} if handle.keeps_moments else {})


def _dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    return (
        param.stride()
        if is_dense(param.shape, param.stride())
        else torch.empty(param.shape, device="meta").stride()
    )


def describe_groups(optimizer: InfinityOptimizer) -> list[dict[str, Any]]:
    optimizer.read_groups()
    names = names_in_groups(optimizer)
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def names_in_groups(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Names the parameters of an optimizer's groups; those that the engine does not move by their
    place."""
    return {
        param: handle.name
        if (handle := handle_of(param)) is not None
        else f"outside {index}.{number}"
        for index, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
    }


def values_outside(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the parameters that the engine does not move, by :func:`names_in_groups`. Packed
    ones are left out, whose parts it moves."""
    return {
        name: param
        for param, name in names_in_groups(optimizer).items()
        if handle_of(param) is None and not (has_inner(param) and not param.requires_grad)
    }


def every_value_outside(pair: Pair) -> dict[str, torch.Tensor]:
    """Returns the parameters of all optimizers that the engine does not move, by their names in a
    checkpoint."""
    return {
        f"outside/{place}/{name}": param
        for place, optimizer in enumerate([*pair.optimizers, *pair.plain])
        for name, param in values_outside(optimizer).items()
    }


def describe_own_state(optimizer: InfinityOptimizer) -> dict[str, dict[Any, Any]]:
    """Lists users' entries in ``optimizer.state`` beside torch's keys: of ``parameters``, by name,
    and ``others``."""
    described: dict[str, dict[Any, Any]] = {"parameters": {}, "others": {}}
    names = names_in_groups(optimizer)
    for key, own in optimizer.state.own_values().items():
        if isinstance(key, torch.Tensor) and key in names:
            described["parameters"] |= {names[key]: own} if own else {}
        elif (handle := handle_of(key)) is not None:
            described["parameters"] |= {handle.name: own} if own else {}
        elif not isinstance(key, torch.Tensor):
            described["others"][key] = own
    return described


def put_own_state(optimizer: InfinityOptimizer, saved: dict[str, dict[Any, Any]]) -> None:
    """Replaces users' entries in ``optimizer.state`` by those that :func:`describe_own_state`
    listed."""
    params = {handle.name: handle.param for handle in optimizer.context.trained}
    params |= values_outside(optimizer)
    of_params = {
        params[name]: own for name, own in saved.get("parameters", {}).items() if name in params
    }
    optimizer.state.take_own(of_params | saved.get("others", {}))


def describe_plain(
    optimizers: Sequence[torch.optim.Optimizer], tensors: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """Describes the optimizers that have no parameter at home. Tensors go to ``tensors``."""
    return [
        {
            "kind": type(optimizer).__name__,
            "state": encode_value(optimizer.state_dict(), tensors, f"plain/{place}"),
        }
        for place, optimizer in enumerate(optimizers)
    ]


def groups_of_stages(
    optimizer: InfinityOptimizer, collectives: Collectives
) -> list[dict[str, Any]]:
    """Describes an optimizer's groups with the parameters of all pipeline stages. Raises UsageError
    if stages have different group counts. Every rank calls this."""
    own_groups, stages = describe_groups(optimizer), collectives.ranks.pp_group
    if stages is None:
        return own_groups
    everyones = collectives.collect(
        [group["params"] for group in own_groups], "the optimizer's groups", [stages]
    )
    if len({len(groups) for groups in everyones}) > 1:
        raise UsageError(
            f"the stages' optimizers have {', '.join(str(len(groups)) for groups in everyones)}"
            " parameter groups: give every stage as many, in the same order, and empty ones where"
            " it has no such parameters"
        )
    # A parameter on two stages is one.
    return [
        group | {"params": list(dict.fromkeys(n for names in everyones for n in names[i]))}
        for i, group in enumerate(own_groups)
    ]


class Rest(NamedTuple):
    """The tensors of a model that the engine does not move, by their names in a checkpoint.
    ``persistent``: the buffers that torch saves."""

    buffers: dict[str, torch.Tensor]
    persistent: list[str]
    unmanaged: dict[str, torch.Tensor]


def rest_of(model: nn.Module, prefix: str) -> Rest:
    """Finds the rest of ``model``. ``prefix``: of names, if stages have the same ones."""
    buffers = {
        prefix + name: buffer
        for name, buffer in model.named_buffers()
        if not buffer.is_meta and handle_of(buffer) is None
    }
    persistent = [
        prefix + (f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]
    whole = {
        name: param
        for name, param in model.named_parameters()
        if handle_of(param) is None and not has_inner(param)
    }
    return Rest(
        buffers,
        [name for name in persistent if name in buffers],
        {prefix + name: tensor for name, tensor in (whole | small_parts(model)).items()},
    )
