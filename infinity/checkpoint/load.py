"""load_checkpoint: verifies all of a checkpoint, and only then changes model and optimizer."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import native
from ..distributed.collectives import Collectives
from ..errors import CorruptionError, InfinityError, UsageError
from ..machine.kernel import running_kernel
from ..optim.optimizer import InfinityOptimizer
from ..optim.step_inputs import OF_PARAMETERS
from ..runtime.engine import Engine
from ..runtime.job import Job
from ..runtime.recovery import begin_repair
from ..runtime.registry import whole_of
from ..state.handle import ParamHandle
from ..state.operations import Operation
from ..state.shard_spec import MOMENTS, SCALES, elements_each
from ..state.tensors import overwrite
from ..storage.arrays import ArrayIO
from .boxes import boxes_of_run, view_of_run
from .content import (
    SAVED,
    buffers_of,
    describe_parameter,
    engine_of_pair,
    groups_of_stages,
    part_of_rank,
    put_own_state,
    unmanaged_parameters,
)
from .folder import OF_READERS, reading
from .manifest import MANIFEST, MOST_STEPS, check_files, check_sizes, read_manifest
from .parts import read_tensors
from .random_state import check_random_state, restore_random_state
from .read_once import ReadOnce, choose_files
from .saved_tensors import SavedTensors
from .values import decode_value

logger = logging.getLogger(__name__)

CUT_SHORT = "loading a checkpoint was cut short"
NOT_A_CHECKPOINT = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)  # errors from reading another file as a checkpoint


def load_checkpoint(
    path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """Loads a checkpoint into a wrapped model, its optimizer and the random number generators.

    Every rank calls this. Returns ``extra``. Verifies everything before any change: raises
    CorruptionError for damaged files, UsageError naming the parameters when it is of another model.
    """
    engine = engine_of_pair(model, optimizer)
    with (
        engine.uses.operation(Operation.LOAD_CHECKPOINT),
        engine.collectives.together("load_checkpoint"),
    ):
        with checkpoint_of(Path(path), engine.collectives) as (manifest, data):
            return _load(manifest, data, engine, whole_of(model), optimizer)


@contextmanager
def checkpoint_of(root: Path, collectives: Collectives) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yields a checkpoint's manifest and data folder, equal on all ranks. Every rank calls this."""
    found: dict[str, Any] = {}

    def read_name() -> str:
        found.update(manifest=read_manifest(root))
        return found["manifest"]["data"]

    with reading(root, read_name) as data:
        first = collectives.collect(found["manifest"], "the checkpoint to load")[0]
        if first["data"] == data.name:
            yield found["manifest"], data
            collectives.rendezvous(
                f"having read {data.name}, with which this rank is done", wherever=True
            )
            return
        with reading(root, lambda: first["data"]) as data:  # a save came between: the older one
            yield first, data
            collectives.rendezvous(
                f"having read {data.name}, with which this rank is done", wherever=True
            )


@dataclass(frozen=True)
class _Checked:
    """The values read and verified before any change."""

    once: ReadOnce  # its files are verified as they are read
    other: dict[str, torch.Tensor]  # everything except the units' arrays
    groups: list[dict] | None
    own_state: dict[str, dict]  # users' entries in optimizer.state
    extra: Any
    generators: tuple | None  # None: this rank did not exist then, and keeps its generators


def _load(
    manifest: dict[str, Any],
    data: Path,
    engine: Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> Any:
    checked = _check(manifest, data, engine, model, optimizer)
    engine.collectives.rendezvous(
        f"loading {manifest['data']}, which every rank can", wherever=True
    )
    # Names the load, not the checkpoint: values may have changed since it was loaded before.
    origin = engine.collectives.collect(
        f"{manifest['data']}-{secrets.token_hex(4)}", "what this load is called"
    )[0]
    once = checked.once
    if once.files and not once.take_room(engine.job):
        check_files(data, {name: manifest["files"][name] for name in once.files})
        once = ReadOnce()
    if once.files:
        once.load(engine.job, CUT_SHORT)
    begin_repair(engine.job, CUT_SHORT)  # until the load is complete
    engine.steps.resume(manifest["step_index"])
    _load_units(manifest, data, engine.job, once)
    _load_average(manifest, data, engine)
    if optimizer is not None and checked.groups is not None:
        for group, saved in zip(optimizer.param_groups, checked.groups):
            group.update({key: value for key, value in saved.items() if key not in OF_PARAMETERS})
        put_own_state(optimizer, engine.job, checked.own_state)
    rank = _rank_in(manifest, engine.job)
    _load_rest(model, checked.other, _rank_in(manifest, engine.job, of_stage=True))
    engine.steps.count_backwards(0)
    if checked.generators is not None:
        restore_random_state(checked.generators, checked.other, rank)
    # Ranks report the load they hold. A rank interrupted before its load reports another, and is
    # refused: its old values must not mix with theirs.
    engine.collectives.note_origin(origin)
    engine.uses.go_on()
    return checked.extra


def _check(
    manifest: dict[str, Any],
    data: Path,
    engine: Engine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> _Checked:
    """Raises CorruptionError or UsageError for a broken or foreign checkpoint. Changes nothing."""
    try:
        rank = _rank_in(manifest, engine.job)
        _check_parameters(engine.job, manifest["parameters"])
        check_sizes(data, manifest["files"])
        once = _choose_files(manifest, data, engine)
        before = {
            name: entry for name, entry in manifest["files"].items() if name not in once.files
        }
        _check_files(data, before, engine.collectives)
        other = read_tensors(data / OF_READERS)
        groups, extra = (
            decode_value(manifest["groups"], other),
            decode_value(manifest["extra"], other),
        )
        own_state = decode_value(manifest.get("own_state", {"$dict": []}), other)
        _check_complete(engine, manifest, data)
        generators = (
            check_random_state(manifest["random"][rank], other, rank)
            if rank < len(manifest["random"])
            else None
        )
        if optimizer is not None:
            _check_optimizer(optimizer, manifest["optimizer"], groups, engine.collectives)
        for prefix, targets in _rest(model, _rank_in(manifest, engine.job, of_stage=True)):
            _check_shapes({prefix + name: value for name, value in targets.items()}, other)
    except InfinityError:
        raise
    except NOT_A_CHECKPOINT as error:
        # Its checksum is right, so another program or version wrote it like this.
        raise CorruptionError(
            f"{data.parent / MANIFEST} does not describe a checkpoint: {error!r}"
        ) from error
    return _Checked(once, other, groups, own_state, extra, generators)


def _choose_files(manifest: dict[str, Any], data: Path, engine: Engine) -> ReadOnce:
    """Chooses the files to read once; none if a file is malformed, which its check reports."""
    try:
        return choose_files(manifest, data, engine.job, list(_homes(engine.job, manifest)))
    except (InfinityError, *NOT_A_CHECKPOINT):
        return ReadOnce()


def _check_files(data: Path, files: dict[str, dict[str, Any]], collectives: Collectives) -> None:
    """Raises CorruptionError for a damaged file, PeerError if another rank found one. Ranks of one
    machine that read the same files verify a part of them each. Every rank calls this."""
    if collectives.ranks.alone:
        check_files(data, files)
        return
    rank, found = collectives.ranks.world_rank, data.parent.stat()
    place = running_kernel() or rank, found.st_dev, found.st_ino
    here = [
        peer
        for peer, theirs in collectives.collect((rank, place), "where the checkpoint is read")
        if theirs == place
    ]
    check_files(data, files, turn=(here.index(rank), len(here)))
    collectives.rendezvous(f"having checked the files of {data.name}", wherever=True)


def _rest(model: nn.Module, rank: int) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Returns the tensors that the engine does not move, by the prefixes of their saved names."""
    buffers = buffers_of(model)
    return [
        ("buffer/", buffers),
        (f"buffer-of-rank/{rank}/", buffers),
        ("unmanaged/", unmanaged_parameters(model)),
    ]


@torch.no_grad()
def _load_rest(model: nn.Module, other: dict[str, torch.Tensor], rank: int) -> None:
    for prefix, targets in _rest(model, rank):
        for name, target in targets.items():
            if prefix + name in other:
                overwrite(target, other[prefix + name])


def _rank_in(manifest: dict[str, Any], job: Job, *, of_stage: bool = False) -> int:
    """Returns the rank whose saved generators (``of_stage``: buffers) this rank takes."""
    ranks, count = job.ranks, len(manifest["random"])
    saved = manifest.get("data_ranks", count)
    if type(saved) is not int or saved < 1:
        raise TypeError(f"data_ranks is {saved!r}")
    parts = manifest.get("parts", 1)
    if type(parts) is not int or parts < 1:
        raise TypeError(f"parts is {parts!r}")
    place = ranks.data_rank + saved * (ranks.part + (0 if of_stage else parts * ranks.stage))
    return place if ranks.data_rank < saved and place < count else ranks.data_rank


def _load_units(manifest: dict[str, Any], data: Path, job: Job, once: ReadOnce) -> None:
    """Loads this rank's shards not in ``once``. Requantises 8-bit moments with other bounds."""
    handles = [handle for unit in job.units for handle in unit.handles]
    for handle in handles:
        handle.changed(by_load=True)
    encoded_anew = []
    with SavedTensors(data, manifest) as saved, job.store.writing_behind() as store:
        for handle in handles:
            saved_one = manifest["parameters"][handle.name]
            arrays = _saved_arrays(handle, saved_one)
            coded = handle.shard.spec.moment_dtype == torch.uint8 and _has_state(saved_one)
            if coded and not all(
                saved.has_part(name, handle.name, part_of_rank(handle))
                for name in MOMENTS
                if name in arrays
            ):
                encoded_anew.append(handle.name)
                _load_decoded(
                    saved, store, job, handle, [name for name in MOMENTS if name in arrays]
                )
                arrays = [name for name in arrays if name in ("weight", "master")]
            for name in arrays:
                if (handle, name) in once.homes:
                    handle.shard.arrays[name].extent.version = job.steps.index
                else:
                    _load_array(saved, store, job, handle, name)
            if handle.grad is None:
                handle.shard.settle_master(store, handle.index, version=job.steps.index)
            _restore_step(store, job, handle, saved_one)
    if encoded_anew:
        logger.warning(
            "the 8-bit moments of %d parameters (%s, ...) were saved in other parts than this mesh"
            " has: they are decoded and encoded anew, and differ from the saved ones by at most the"
            " distance of two codes",
            len(encoded_anew),
            encoded_anew[0],
        )


def _load_average(manifest: dict[str, Any], data: Path, engine: Engine) -> None:
    """Reads the averages into the model's average; without any, that restarts."""
    average, count = engine.average, manifest.get("average", 0)
    if average is None:
        if count:
            logger.warning(
                "the checkpoint has an average of the weights, and this model none: make it with"
                " infinity.ema first"
            )
        return
    average.is_exchanged = False  # weights and averages are read to their own places
    if count:
        with SavedTensors(data, manifest, files="average-") as saved:
            for handle in filter(average.has, engine.trained):
                begin, end = handle.shard.layout.part_of_param("weight", handle.index)
                average.write_own(
                    handle,
                    _read_run(saved, handle, "average", begin, end, average.dtype_of(handle))[0],
                )
    average.resume(count)


def _homes(job: Job, manifest: dict[str, Any]) -> Iterator[tuple[ParamHandle, str]]:
    """Yields the homes that a checkpoint is loaded to: parameter and array name."""
    for unit in job.units:
        for handle in unit.handles:
            for name in _saved_arrays(handle, manifest["parameters"][handle.name]):
                yield handle, name


def _has_state(saved: dict[str, Any]) -> bool:
    """Returns whether a checkpoint has moments of the parameter that ``saved`` describes."""
    return bool(saved["step"]) or saved.get("keeps_moments") is True


def _saved_arrays(handle: ParamHandle, described: dict[str, Any]) -> list[str]:
    """Returns the names of a parameter's arrays that a checkpoint has."""
    saved = (
        ("weight",)
        if handle.grad is None
        else SAVED
        if _has_state(described)
        else ("weight", "master")
    )
    return [name for name in handle.shard.arrays if name in saved]


def _load_array(
    saved: SavedTensors, store: ArrayIO, job: Job, handle: ParamHandle, name: str
) -> None:
    shard, part, stays = handle.shard, part_of_rank(handle), False
    begin, end = shard.layout.part_of_param(name, handle.index)
    dtype = shard.arrays[name].dtype
    if shard.spec.moment_dtype == torch.uint8 and name not in ("weight", "master"):
        values = saved.read_codes(name, handle.name, part, begin, end)
    else:
        values, stays = _read_run(saved, handle, name, begin, end, dtype)
    shard.parts.write(
        store, name, handle.index, values, begin=begin, version=job.steps.index, stays=stays
    )


def _load_decoded(
    saved: SavedTensors, store: ArrayIO, job: Job, handle: ParamHandle, names: list[str]
) -> None:
    shard = handle.shard
    for name in names:
        begin, end = shard.layout.part_of_param(name, handle.index)
        if begin < end:
            values, _ = _read_run(saved, handle, name, begin, end, torch.float32)
            codes, scales = native.encode_moments(values, sq=name == "exp_avg_sq")
            shard.parts.write(
                store, name, handle.index, codes, begin=begin, version=job.steps.index
            )
            at = begin // elements_each(SCALES[name])
            shard.parts.write(
                store, SCALES[name], handle.index, scales, begin=at, version=job.steps.index
            )


def _read_run(
    saved: SavedTensors, handle: ParamHandle, name: str, begin: int, end: int, dtype: torch.dtype
) -> tuple[torch.Tensor, bool]:
    """Reads elements ``begin`` to ``end`` of this rank's part, in memory order; read-only. Also
    returns whether they are in the mapped file: those stay, and take no memory of the engine."""
    part = part_of_rank(handle)
    boxes = list(boxes_of_run(part.box.shape, part.order, begin, end))
    if len(boxes) == 1 and part.order == tuple(range(len(part.order))):
        mapped = saved.mapped(name, handle.name, boxes[0][0].moved(part.box.offset))
        if mapped is not None and mapped.dtype == dtype:
            return mapped.reshape(-1), True
    values = torch.empty(end - begin, dtype=dtype, device="cpu")
    for box, at in boxes:
        here = view_of_run(values[at - begin : at - begin + box.numel], box, part.order)
        saved.read_into(here, name, handle.name, box.moved(part.box.offset))
    return values, False


def _restore_step(store: ArrayIO, job: Job, handle: ParamHandle, saved: dict[str, Any]) -> None:
    """Restores the step count. A parameter saved without state gets zero moments."""
    if handle.has_state and not _has_state(saved):
        for name in MOMENTS:
            if name in handle.shard.arrays:
                zeros = torch.zeros(
                    handle.shard.layout.placements[handle.index].shape, device="cpu"
                )
                handle.shard.write_moment(store, name, handle.index, zeros, version=job.steps.index)
    handle.step = saved["step"]
    handle.keeps_moments = _has_state(saved) and not handle.step
    if handle.grad is not None:
        job.gradients.clear(handle)


def _check_parameters(job: Job, saved: dict[str, Any]) -> None:
    ours = {
        handle.name: describe_parameter(handle) for unit in job.units for handle in unit.handles
    }
    everyones = ours.keys()
    if (stages := job.ranks.stages) is not None:
        everyones = set().union(
            *job.collectives.collect(set(ours), "names of the stages' parameters", [stages])
        )
    only_saved, only_ours = sorted(saved.keys() - everyones), sorted(everyones - saved.keys())
    if only_saved or only_ours:
        raise UsageError(
            f"the checkpoint is of another model: {len(only_saved)} of its parameters are not in"
            f" this one ({', '.join(only_saved[:3])}), {len(only_ours)} of this one's are not in it"
            f" ({', '.join(only_ours[:3])})"
        )
    for name, mine in ours.items():
        # A model wrapped without an optimizer takes only the weights.
        keys = ("shape", "dtype", "master", "moments") if mine["master"] else ("shape", "dtype")
        for key in keys:
            if saved[name][key] != mine[key]:
                raise UsageError(
                    f"{name}: {key} is {saved[name][key]} in the checkpoint and {mine[key]} in this"
                    " model"
                )


def _check_complete(engine: Engine, manifest: dict[str, Any], data: Path) -> None:
    """Raises an error unless the files hold every array that the manifest's steps need."""
    if type(manifest["step_index"]) is not int or not 0 <= manifest["step_index"] < MOST_STEPS:
        raise TypeError(f"step_index is {manifest['step_index']!r}")
    saved = SavedTensors(data, manifest)
    for unit in engine.units:
        for handle in unit.handles:
            step = manifest["parameters"][handle.name]["step"]
            if type(step) is not int or not 0 <= step < MOST_STEPS:
                raise ValueError(f"{handle.name} has taken {step!r} steps")
            for array in _saved_arrays(handle, manifest["parameters"][handle.name]):
                saved.check(array, handle.name, handle.shard.arrays[array].dtype)
    _check_average(engine, manifest, data)


def _check_average(engine: Engine, manifest: dict[str, Any], data: Path) -> None:
    count = manifest.get("average", 0)
    if type(count) is not int or not 0 <= count < MOST_STEPS:
        raise TypeError(f"average is {count!r}")
    if engine.average is not None and count:
        saved = SavedTensors(data, manifest, files="average-")
        for handle in filter(engine.average.has, engine.trained):
            saved.check("average", handle.name, engine.average.dtype_of(handle))


def _check_optimizer(
    optimizer: InfinityOptimizer,
    rule_name: str | None,
    groups: list[dict] | None,
    collectives: Collectives,
) -> None:
    if rule_name != optimizer.rule_name:
        raise UsageError(
            f"the checkpoint's optimizer is {rule_name}, this one is {optimizer.rule_name}"
        )
    ours = [group["params"] for group in groups_of_stages(optimizer, collectives)]
    theirs = [group["params"] for group in groups or []]
    if list(map(sorted, ours)) != list(map(sorted, theirs)):
        raise UsageError(
            f"the checkpoint's optimizer groups ({[len(names) for names in theirs]} parameters) are"
            f" not this optimizer's ({[len(names) for names in ours]})"
        )
    optimizer.check_groups(groups or [], "this checkpoint")


def _check_shapes(ours: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    for name, mine in ours.items():
        if name in saved and saved[name].shape != mine.shape:
            raise UsageError(
                f"{name} has shape {tuple(saved[name].shape)} in the checkpoint,"
                f" {tuple(mine.shape)} here"
            )
