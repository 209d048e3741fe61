"""load_checkpoint: reads a checkpoint, checks all of it, and only then changes model and optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed.collectives import Collectives
from ..errors import CorruptionError, InfinityError, UsageError
from ..optim.optimizer import InfinityOptimizer
from ..runtime.engine import Engine
from ..state.handle import ParamHandle
from ..state.shard_spec import MOMENTS
from ..state.tensors import overwrite
from .content import SAVED, buffers_of, describe_groups, describe_parameter, engine_of_pair, unmanaged_parameters
from .folder import OF_READERS, reading
from .manifest import MANIFEST, MOST_STEPS, check_file, read_manifest
from .parts import list_parts, read_parts
from .random_state import check_random_state, restore_random_state
from .values import decode_value


def load_checkpoint(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Puts a checkpoint's values into a wrapped model, its optimizer and the random number generators; returns its
    ``extra``.

    Everything is checked before anything is changed: raises CorruptionError for damaged files, UsageError naming the
    parameters when the checkpoint is of another model.
    """
    engine = engine_of_pair(model, optimizer)
    with engine.using(repairing=True), engine.collectives.together("load_checkpoint"):
        with checkpoint_of(Path(path), engine.collectives) as (manifest, data):
            return _load(manifest, data, engine, model, optimizer)


@contextmanager
def checkpoint_of(root: Path, collectives: Collectives) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yields the manifest of the checkpoint in ``root`` and its data, which stays as it is until the block ends: a save may replace
    the checkpoint meanwhile. All ranks get the same one."""
    found: dict[str, Any] = {}

    def read_name() -> str:
        found.update(manifest=read_manifest(root))
        return found["manifest"]["data"]

    with reading(root, read_name) as data:
        first = collectives.collect(found["manifest"], "the checkpoint to load")[0]
        if first["data"] == data.name:
            yield found["manifest"], data
            collectives.rendezvous(f"having read {data.name}, with which this rank is done")
            return
        with reading(root, lambda: first["data"]) as data:  # a save came between: the first rank holds the older one
            yield first, data
            collectives.rendezvous(f"having read {data.name}, with which this rank is done")


@dataclass(frozen=True)
class _Checked:
    """Holds what is read and checked before anything changes."""

    other: dict[str, torch.Tensor]  # everything but the units' arrays
    groups: list[dict] | None
    extra: Any
    generators: tuple | None  # None: a rank that did not exist then goes on with the generators it has


def _load(manifest: dict[str, Any], data: Path, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    checked = _check(manifest, data, engine, model, optimizer)
    engine.collectives.rendezvous(f"loading {manifest['data']}, which every rank can")
    engine.begin_repair("loading a checkpoint was cut short")  # until all of it is there
    engine.steps.resume(manifest["step_index"])
    _load_units(manifest, data, engine)
    if optimizer is not None and checked.groups is not None:
        for group, saved in zip(optimizer.param_groups, checked.groups):
            group.update({key: value for key, value in saved.items() if key != "params"})
    rank = engine.ranks.data_rank
    _load_rest(model, checked.other, rank)
    engine.count_backwards(0)
    if checked.generators is not None:
        restore_random_state(checked.generators, checked.other, rank)
    engine.go_on()
    return checked.extra


def _check(
    manifest: dict[str, Any], data: Path, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> _Checked:
    """Raises CorruptionError or UsageError where the checkpoint is not whole, or is another model's. Nothing is changed."""
    rank = engine.ranks.data_rank
    try:
        _check_parameters(engine, manifest["parameters"])
        for name, entry in manifest["files"].items():
            check_file(data / name, entry)
        other = {key: tensor for key, _, tensor in read_parts(data / OF_READERS)}
        groups, extra = decode_value(manifest["groups"], other), decode_value(manifest["extra"], other)
        _check_complete(engine, manifest, data)
        generators = check_random_state(manifest["random"][rank], other, rank) if rank < len(manifest["random"]) else None
        if optimizer is not None:
            _check_optimizer(optimizer, manifest["optimizer"], groups)
        for prefix, targets in _rest(model, rank):
            _check_shapes({prefix + name: value for name, value in targets.items()}, other)
    except InfinityError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        # Its checksum is right, so it was written like this: by something else, or by another version.
        raise CorruptionError(f"{data.parent / MANIFEST} does not describe a checkpoint: {error!r}") from error
    return _Checked(other, groups, extra, generators)


def _rest(model: nn.Module, rank: int) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Tensors of the model that the engine does not move, under the prefixes of their names in a checkpoint."""
    buffers = buffers_of(model)
    return [("buffer/", buffers), (f"buffer-of-rank/{rank}/", buffers), ("unmanaged/", unmanaged_parameters(model))]


@torch.no_grad()
def _load_rest(model: nn.Module, other: dict[str, torch.Tensor], rank: int) -> None:
    for prefix, targets in _rest(model, rank):
        for name, target in targets.items():
            if prefix + name in other:
                overwrite(target, other[prefix + name])


def _load_units(manifest: dict[str, Any], data: Path, engine: Engine) -> None:
    by_name = {handle.name: handle for unit in engine.units for handle in unit.handles}
    for handle in by_name.values():
        handle.changed()
    for name in manifest["files"]:
        if name.startswith("unit-"):
            for key, begin, tensor in read_parts(data / name):
                array, _, parameter = key.partition("/")
                handle = by_name[parameter]
                if array in handle.shard.arrays:
                    handle.shard.write_part(engine.store, array, handle.index, tensor, begin=begin, version=engine.step_index)
    for handle in by_name.values():
        _restore_step(engine, handle, manifest["parameters"][handle.name]["step"])


def _restore_step(engine: Engine, handle: ParamHandle, step: int) -> None:
    """A parameter that had no step when saved starts with zero moments again."""
    if handle.step and not step:
        for name in MOMENTS:
            if name in handle.shard.arrays:
                zeros = torch.zeros(handle.shard.layout.placements[handle.index].shape, device="cpu")
                handle.shard.write_moment(engine.store, name, handle.index, zeros, version=engine.step_index)
    handle.step = step
    if handle.grad is not None:
        engine.gradients.clear(handle)


def _check_parameters(engine: Engine, saved: dict[str, Any]) -> None:
    ours = {handle.name: describe_parameter(handle) for unit in engine.units for handle in unit.handles}
    only_saved, only_ours = sorted(saved.keys() - ours.keys()), sorted(ours.keys() - saved.keys())
    if only_saved or only_ours:
        raise UsageError(
            f"the checkpoint is of another model: {len(only_saved)} of its parameters are not in this one "
            f"({', '.join(only_saved[:3])}), {len(only_ours)} of this one's are not in it ({', '.join(only_ours[:3])})"
        )
    for name, mine in ours.items():
        # A model wrapped without an optimizer takes the weights and leaves the rest.
        keys = ("shape", "stride", "dtype", "master", "moments") if mine["master"] else ("shape", "stride", "dtype")
        for key in keys:
            if saved[name][key] != mine[key]:
                raise UsageError(f"{name}: {key} is {saved[name][key]} in the checkpoint and {mine[key]} in this model")


def _check_complete(engine: Engine, manifest: dict[str, Any], data: Path) -> None:
    """The unit files together hold every array that the manifest's steps ask for, each at its length here."""
    if type(manifest["step_index"]) is not int or not 0 <= manifest["step_index"] < MOST_STEPS:
        raise TypeError(f"step_index is {manifest['step_index']!r}")
    parts: dict[str, list[tuple[int, int]]] = {}
    dtypes: dict[str, set[torch.dtype | None]] = {}
    for name in manifest["files"]:
        if name.startswith("unit-"):
            for key, begin, end, dtype in list_parts(data / name):
                parts.setdefault(key, []).append((begin, end))
                dtypes.setdefault(key, set()).add(dtype)
    if strange := parts.keys() - {f"{array}/{name}" for name in manifest["parameters"] for array in SAVED}:
        raise CorruptionError(f"{data} holds {sorted(strange)[0][:80]!r}, which is of no parameter of the checkpoint")
    lengths = {key: _covered(spans) for key, spans in parts.items()}
    for unit in engine.units:
        for handle in unit.handles:
            step = manifest["parameters"][handle.name]["step"]
            if type(step) is not int or not 0 <= step < MOST_STEPS:
                raise ValueError(f"{handle.name} has taken {step!r} steps")
            for array in handle.shard.arrays:
                begin, end = handle.shard.part(array, handle.index)
                wanted = array in ("weight", "master") or (step and array in SAVED)
                if wanted and lengths.get(f"{array}/{handle.name}") != end - begin:
                    raise CorruptionError(f"{data} holds no {array} of {handle.name} with {end - begin} elements")
                if wanted and end > begin and dtypes[f"{array}/{handle.name}"] != {handle.shard.arrays[array].dtype}:
                    raise CorruptionError(
                        f"{data} holds {array} of {handle.name} in another dtype than {handle.shard.arrays[array].dtype}"
                    )


def _covered(spans: list[tuple[int, int]]) -> int:
    """How far from the first element on ``spans`` follow each other without a gap."""
    reached = 0
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if begin != reached:
            return -1
        reached = end
    return reached


def _check_optimizer(optimizer: InfinityOptimizer, rule_name: str | None, groups: list[dict] | None) -> None:
    if rule_name != optimizer.rule_name:
        raise UsageError(f"the checkpoint's optimizer is {rule_name}, this one is {optimizer.rule_name}")
    ours = [group["params"] for group in describe_groups(optimizer)]
    theirs = [group["params"] for group in groups or []]
    if ours != theirs:
        raise UsageError(
            f"the checkpoint's optimizer groups ({[len(names) for names in theirs]} parameters) are not this optimizer's "
            f"({[len(names) for names in ours]})"
        )
    optimizer.check_groups(groups or [], "this checkpoint")


def _check_shapes(ours: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    for name, mine in ours.items():
        if name in saved and saved[name].shape != mine.shape:
            raise UsageError(f"{name} has shape {tuple(saved[name].shape)} in the checkpoint, {tuple(mine.shape)} here")
