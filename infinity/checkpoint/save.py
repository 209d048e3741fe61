"""save_checkpoint: writes all state to resume bit for bit, and replaces the last checkpoint
atomically.

[Note: why a checkpoint is always whole] A checkpoint folder holds ``manifest.json`` and one folder
``infinity-<random>`` of data files, new at every save. A save writes its data, syncs it, and then
replaces the manifest in one rename. Until then the old manifest names the old data, which is
removed afterwards. So the manifest always names complete data. :mod:`infinity.checkpoint.folder`
has the locks of writers and readers.

With several ranks each rank writes the arrays that it has at home, in files of its own. A file's
header gives the elements of each tensor that it holds. Any number of ranks reads them: each reads
what its own homes need. The header's form is that of torch.distributed.checkpoint, whose
``HuggingFaceStorageReader`` also loads the data folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import native
from ..distributed.collectives import Collectives
from ..errors import ConfigError, PeerError, StorageError, UsageError
from ..gradients.record import would_be_lost
from ..machine.outputs import folder_of
from ..machine.progress import progress
from ..optim.optimizer import InfinityOptimizer
from ..optim.recognised import as_given
from ..runtime.engine import Engine
from ..runtime.job import Job
from ..runtime.registry import whole_of
from ..state.operations import Operation
from ..state.parts import parts_of
from ..storage.transfers import Window
from .content import (
    Books,
    Entry,
    average_files,
    buffers_of,
    describe_own_state,
    describe_parameter,
    describe_plain,
    engine_of_pair,
    every_value_outside,
    flat_bytes,
    groups_of_stages,
    persistent_buffers,
    unit_files,
    unmanaged_parameters,
)
from .described import description_of
from .file_writer import FileWriter, make_slots, start_file
from .folder import OF_READERS, remove_data, writing
from .manifest import (
    FORMAT,
    MANIFEST,
    check_same_model,
    seal_manifest,
    sync_file,
    sync_folder,
    write_synced,
)
from .parts import PARTS_KEY
from .random_state import random_state_tensors, read_random_state
from .removal import wait_for_space
from .values import encode_value

FILES_AT_ONCE = 3  # one is read while two are in flight to the disk


def save_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    extra: Any = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes model, optimizer, random number generators and ``extra`` to the folder ``path``,
    replacing the model's last checkpoint. Every rank calls this.

    extra
        Nested dicts, lists, numbers, strings, None, tensors; :func:`load_checkpoint` returns it.
    overwrite
        Also replaces the checkpoint of another model.

    One unit at a time is in memory. Blocks until everything is on the disk. Raises StorageError
    with the old checkpoint intact, UsageError while another process saves to that folder,
    ConfigError if another model's checkpoint is there.
    """
    root = folder_of(path, "save_checkpoint's path")
    if not isinstance(overwrite, bool):
        raise ConfigError(f"overwrite={overwrite!r} must be True or False")
    engine, books = engine_of_pair(model, as_given(optimizer))
    job = engine.job
    with (
        job.uses.operation(Operation.SAVE_CHECKPOINT),
        job.collectives.together("save_checkpoint"),
    ):
        _save_all(root, engine, whole_of(model), books, extra, overwrite)


def _save_all(
    root: Path,
    engine: Engine,
    model: nn.Module,
    books: Books,
    extra: Any,
    overwrite: bool,
) -> None:
    job = engine.job
    collectives = job.collectives
    engine.wait_idle()
    if landed := [handle.name for handle in job.trained if would_be_lost(handle)]:
        raise UsageError(
            f"save_checkpoint between backward and step: the gradients of {len(landed)} parameters"
            f" ({landed[0]}, ...) would be lost. Save after step(), or call zero_grad() first."
        )
    tensors: dict[str, torch.Tensor] = {}
    content = {
        "format": FORMAT,
        "data": f"infinity-{_token(collectives)}",
        "parameters": _describe_parameters(root, job, overwrite=overwrite),
        "optimizers": [
            _describe_optimizer(optimizer, place, tensors, collectives)
            for place, optimizer in enumerate(books[0])
        ],
        "plain": describe_plain(books[1], tensors),
        "random": collectives.collect(read_random_state(), "random state"),
        "data_ranks": job.ranks.data_size,
        "parts": job.ranks.tp_size,
        "step_index": engine.step_index,
        "average": engine.average.count if engine.average is not None else 0,  # number of updates
        "extra": encode_value(extra, tensors, "extra"),
        "persistent_buffers": list(
            _of_stages(dict.fromkeys(persistent_buffers(model)), collectives)
        ),
        "config": description_of(parts_of(model)[0]),
    }
    tensors |= {name: p.detach().clone() for name, p in every_value_outside(books).items()}
    buffers = {name: buffer.detach().clone() for name, buffer in buffers_of(model).items()}
    rest = {f"buffer/{name}": buffer for name, buffer in buffers.items()}
    rest |= {
        f"unmanaged/{name}": param.detach().clone()
        for name, param in unmanaged_parameters(model).items()
    }
    tensors |= _of_stages(rest, collectives) | _buffers_of_others(buffers, collectives)
    for rank, states in enumerate(collectives.collect(random_state_tensors(), "random state")):
        tensors |= {f"random/{rank}/{name}": state for name, state in states.items()}
    _publish(root, engine, content, tensors)


def _publish(
    root: Path, engine: Engine, content: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Writes a checkpoint and makes it the current one in ``root``. Raises StorageError, which
    names the one that is current. Every rank calls this."""
    collectives, published = engine.job.collectives, False
    try:
        with writing(root) if collectives.ranks.is_first else nullcontext():
            wait_for_space()  # of the checkpoint before the last one
            # Before any rank makes a folder.
            collectives.barrier(f"writing to {content['data']}, which the first rank may")
            _write_data(root / content["data"], engine, content, tensors)
            if collectives.ranks.is_first:
                os.replace(root / content["data"] / MANIFEST, root / MANIFEST)
                # From here on the new data is the checkpoint, even if a later step fails.
                published = True
                sync_folder(root)
                remove_data(root, keep=content["data"])
    except StorageError:
        raise
    except OSError as error:
        state = (
            "is written, but may not be on the disk yet"
            if published
            else "was not written; the old one stands"
        )
        raise StorageError(
            error.errno,
            f"checkpoint {root} {state}: {os.strerror(error.errno or 0)}",
            str(error.filename or root),
        ) from error


def _describe_optimizer(
    optimizer: InfinityOptimizer,
    place: int,
    tensors: dict[str, torch.Tensor],
    collectives: Collectives,
) -> dict[str, Any]:
    """Describes an optimizer's rule, groups, and the users' entries in ``optimizer.state``. Tensors
    in them go to ``tensors``."""
    own = describe_own_state(optimizer)
    own = {kind: _of_stages(values, collectives) for kind, values in own.items()}
    groups = groups_of_stages(optimizer, collectives)
    told = {
        "rule": optimizer.rule_name,
        "groups": encode_value(groups, tensors, f"groups/{place}"),
    }
    if any(own.values()):
        told["own_state"] = encode_value(own, tensors, f"own_state/{place}")
    return told


def _describe_parameters(root: Path, job: Job, *, overwrite: bool) -> dict[str, Any]:
    """Returns the manifest's entries. Raises ConfigError if ``root`` has another model's
    checkpoint, which must not be replaced."""
    mine = {
        handle.name: describe_parameter(handle) for unit in job.units for handle in unit.handles
    }
    parameters = _of_stages(mine, job.collectives)
    if job.ranks.is_first and not overwrite:
        check_same_model(root, parameters)
    return parameters


def _write_data(
    data: Path, engine: Engine, content: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Writes all data of a checkpoint, and its manifest beside the data. After a failed save the
    first rank removes the data, once all ranks have stopped writing."""
    collectives = engine.job.collectives
    try:
        failure, files = None, {}
        try:
            data.mkdir(parents=True, exist_ok=not collectives.ranks.alone)
            files = _write_units(engine, data) if collectives.ranks.writes else {}
        except Exception as error:
            if collectives.ranks.alone:
                raise
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        everyones = collectives.collect(
            (collectives.ranks.world_rank, files, told), "the files of a checkpoint"
        )
        if failure is not None:
            raise failure
        for rank, _, why in everyones:
            if why is not None:
                raise PeerError(
                    f"rank {rank} could not write its part of the checkpoint {data.parent}: {why}."
                    " The old one stands."
                )
        if collectives.ranks.is_first:
            content["files"] = {
                name: entry for _, of_one, _ in everyones for name, entry in of_one.items()
            }
            content["files"][OF_READERS] = _write_tensors(data / OF_READERS, tensors)
            if missing := [name for name in content["files"] if not (data / name).exists()]:
                raise StorageError(
                    errno.ENOENT,
                    f"{missing[0]}, which another rank wrote, is not there: all ranks must see the"
                    " same folder",
                    str(data / missing[0]),
                )
            write_synced(data / MANIFEST, seal_manifest(content))
            sync_folder(data)
    except BaseException:
        if collectives.ranks.is_first:
            shutil.rmtree(data, ignore_errors=True)
        raise


def _buffers_of_others(
    mine: dict[str, torch.Tensor], collectives: Collectives
) -> dict[str, torch.Tensor]:
    """Returns the buffers of other ranks that differ from the first one's, such as running
    statistics of other batches. Every rank calls this."""
    if collectives.ranks.alone:
        return {}
    digests = {
        name: hashlib.blake2b(flat_bytes(buffer), digest_size=16).digest()
        for name, buffer in mine.items()
    }
    first = collectives.collect(digests, "digests of the buffers", collectives.ranks.unit_channels)[
        0
    ]
    others = collectives.collect(
        {name: mine[name].cpu() for name in mine if digests[name] != first.get(name)},
        "buffers that differ",
    )
    # Ranks of a stage; each stage's buffers have their own names.
    each = collectives.ranks.data_size * collectives.ranks.tp_size
    return {
        f"buffer-of-rank/{rank % each}/{name}": buffer
        for rank, of_one in enumerate(others)
        for name, buffer in of_one.items()
    }


def _of_stages(mine: dict[str, Any], collectives: Collectives) -> dict[str, Any]:
    """Joins the dicts of all pipeline stages; earlier stages take precedence. Every rank calls
    this."""
    if collectives.ranks.pp_group is None:
        return mine
    found: dict[str, Any] = {}
    for theirs in collectives.collect(mine, "what each stage has", [collectives.ranks.pp_group]):
        found |= {key: value for key, value in theirs.items() if key not in found}
    return found


def _token(collectives: Collectives) -> str:
    """Returns a new unique name, the same on all ranks. Every rank calls this."""
    return collectives.collect(secrets.token_hex(6), "naming a checkpoint")[0]


def _write_units(engine: Engine, data: Path) -> dict[str, dict[str, Any]]:
    """Writes the arrays that this rank has at home: reads a unit while the previous one is written.
    Returns the manifest's entries."""
    entries: dict[str, dict[str, Any]] = {}
    total = sum(
        array.nbytes
        for unit in engine.job.units
        for flat in unit.flat_params
        for array in flat.arrays.values()
    )
    slots = make_slots(total)

    def finish(started: tuple[str, FileWriter]) -> None:
        with started[1] as file:
            entries[started[0]] = file.finish()
        advance(entries[started[0]]["nbytes"])

    with (
        progress("saving the checkpoint", total) as advance,
        Window[tuple[str, FileWriter]](
            FILES_AT_ONCE, finish, lambda started: started[1].__exit__()
        ) as files,
    ):
        for name, parts, stay in _files_of_rank(engine):
            tensors, told = ({key: entry[at] for key, entry in parts.items()} for at in (0, 1))
            files.add((name, _start_file(data / name, tensors, slots, told, stay=stay)))
            files.make_room()
    # At the end: the first sync makes the file system flush its journal for all of them.
    for name in entries:
        sync_file(data / name)
    return entries


def _files_of_rank(engine: Engine) -> Iterator[tuple[str, dict[str, Entry], bool]]:
    """Yields the name and the entries of each file that this rank writes, and whether their values
    stay in memory until it is written."""
    job = engine.job
    rank = "" if job.ranks.alone else f"-rank-{job.ranks.job_rank:05d}"
    for unit in job.units:
        arrays = [array for flat in unit.flat_params for array in flat.arrays.values()]
        stays = all(array.flat is not None and array.flat.is_cpu for array in arrays)
        for kind, files in (
            ("unit", unit_files(job, unit)),
            ("average", average_files(engine, unit)),
        ):
            for number, entries in enumerate(files):
                part = f"-{number}" if number else ""
                name = f"{kind}-{unit.index:05d}{rank}{part}.safetensors"
                yield name, entries, stays and kind == "unit"


def _start_file(
    path: Path,
    tensors: dict[str, torch.Tensor],
    slots: native.PinnedPool,
    told: dict[str, Any] | None = None,
    *,
    stay: bool = False,
) -> FileWriter:
    told = told or {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
    return start_file(
        path,
        tensors,
        slots,
        metadata={"format": "pt", "DCP_VERSION": "1.0", PARTS_KEY: json.dumps(told)},
        stay=stay,
    )


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    with _start_file(
        path, tensors, make_slots(sum(tensor.nbytes for tensor in tensors.values()))
    ) as file:
        entry = file.finish()
    sync_file(path)
    return entry
