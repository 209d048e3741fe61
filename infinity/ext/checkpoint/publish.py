"""Publish: writes the files of a save, and makes them the current checkpoint.

draft   what a save writes, from before its first byte: values at home are read as they are written
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import native
from ...core.homes.transfers import TransferQueue
from ...core.run.job import Job
from ...core.units.unit import ParamUnit
from ...errors import PeerError, StorageError
from ...progress import progress
from ...ranks.collectives import Collectives
from .content import Entry, kept_files, unit_files
from .file_writer import FileWriter, make_slots, start_file
from .folder import OF_READERS, remove_data, writing
from .home_values import HomeValues
from .manifest import MANIFEST, seal_manifest, sync_file, sync_folder, write_synced
from .parts import PARTS_KEY
from .removal import wait_for_space

FILES_AT_ONCE = 3  # one is read while two are in flight to the disk
FileEntries = dict[str, dict[str, Any]]  # of the manifest, by file


@dataclass(frozen=True, eq=False)
class UnitFile:
    """A file of values of one unit."""

    name: str
    unit: ParamUnit
    values: dict[str, Entry]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value, _ in self.values.values())


@dataclass(frozen=True, eq=False)
class Draft:
    """What a save writes to ``root``: this rank's ``files``, and by the first rank ``tensors`` and
    the manifest's ``content``."""

    root: Path
    content: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    files: list[UnitFile]

    @property
    def data(self) -> Path:
        """The folder of the data files."""
        return self.root / self.content["data"]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def files_of_rank(job: Job, told: Mapping[str, Any]) -> list[UnitFile]:
    """Lists the files that this rank writes. ``told``: by the keepers of arrays."""
    if not job.ranks.writes:
        return []
    rank = "" if job.ranks.alone else f"-rank-{job.ranks.job_rank:05d}"
    listed = []
    for unit in job.units:
        files_of = {"unit": unit_files(job, unit)} | {
            name: kept_files(job, kept, unit)
            for name, kept in job.kept.saved().items()
            if told[name]
        }
        for kind, files in files_of.items():
            for number, values in enumerate(files):
                part = f"-{number}" if number else ""
                name = f"{kind}-{unit.index:05d}{rank}{part}.safetensors"
                listed.append(UnitFile(name, unit, values))
    return listed


def publish(draft: Draft, collectives: Collectives) -> None:
    """Writes a checkpoint and makes it the current one. Raises StorageError, which says which one
    is current. Every rank calls this."""
    with saying_what_stands(draft):
        with writing(draft.root) if collectives.ranks.is_first else nullcontext():
            wait_for_space()  # of the checkpoint before the last one
            # Before any rank makes a folder.
            collectives.barrier(f"writing to {draft.data.name}, which the first rank may")
            _write_data(draft, collectives)
            if collectives.ranks.is_first:
                make_current(draft)


@contextmanager
def saying_what_stands(draft: Draft) -> Iterator[None]:
    """Raises an OSError in the block as a StorageError that says which checkpoint is current."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        state = (
            "is written, but may not be on the disk yet"
            if is_current(draft)
            else "was not written; the old one stands"
        )
        raise StorageError(
            error.errno,
            f"checkpoint {draft.root} {state}: {os.strerror(error.errno or 0)}",
            str(error.filename or draft.root),
        ) from error


def is_current(draft: Draft) -> bool:
    """Tells whether the checkpoint of the folder is this one."""
    try:
        content = json.loads((draft.root / MANIFEST).read_bytes())
        return bool(content["data"] == draft.data.name)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def make_current(draft: Draft) -> None:
    """Makes the written data the current checkpoint, and removes the old data."""
    os.replace(draft.data / MANIFEST, draft.root / MANIFEST)
    # From here on the new data is the checkpoint, even if a later step fails.
    sync_folder(draft.root)
    remove_data(draft.root, keep=draft.data.name)


def _write_data(draft: Draft, collectives: Collectives) -> None:
    """Writes all data of a checkpoint, and its manifest beside the data. After a failed save the
    first rank removes the data, once all ranks have stopped writing."""
    try:
        failure, files = None, {}
        try:
            draft.data.mkdir(parents=True, exist_ok=not collectives.ranks.alone)
            with progress("saving the checkpoint", draft.nbytes) as advance:
                files = write_files(draft, make_slots(draft.nbytes), advance=advance)
        except Exception as error:
            if collectives.ranks.alone:
                raise
            failure = error
        failed = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            everyones = collectives.collect(
                (collectives.ranks.world_rank, files, failed), "the files of a checkpoint"
            )
        except PeerError as error:
            raise failure or error from None  # this rank's own may have ended the job
        if failure is not None:
            raise failure
        for rank, _, why in everyones:
            if why is not None:
                raise failed_rank(draft, rank, why)
        if collectives.ranks.is_first:
            slots = make_slots(sum(tensor.nbytes for tensor in draft.tensors.values()))
            write_manifest(draft, [files for _, files, _ in everyones], slots)
    except BaseException:
        if collectives.ranks.is_first:
            shutil.rmtree(draft.data, ignore_errors=True)
        raise


def failed_rank(draft: Draft, rank: int, why: str) -> PeerError:
    """Makes the error that tells of a rank which could not write its part."""
    return PeerError(
        f"rank {rank} could not write its part of the checkpoint {draft.root}: {why}. The old one"
        " stands."
    )


def write_manifest(
    draft: Draft, everyones: Sequence[FileEntries], slots: native.PinnedPool
) -> None:
    """Writes what the first rank writes beside the files of all ranks, and then the manifest.
    Raises StorageError if a file is missing."""
    files = {name: entry for of_one in everyones for name, entry in of_one.items()}
    files[OF_READERS] = write_tensors(draft.data / OF_READERS, draft.tensors, slots)
    if missing := [name for name in files if not (draft.data / name).exists()]:
        raise StorageError(
            errno.ENOENT,
            f"{missing[0]}, which another rank wrote, is not there: all ranks must see the"
            " same folder",
            str(draft.data / missing[0]),
        )
    write_synced(draft.data / MANIFEST, seal_manifest(draft.content | {"files": files}))
    sync_folder(draft.data)


def write_files(
    draft: Draft,
    slots: native.PinnedPool,
    *,
    service: native.PinnedPool | None = None,
    advance: Callable[[int], None] = lambda nbytes: None,
    written: Callable[[UnitFile], None] = lambda file: None,
) -> FileEntries:
    """Writes this rank's files: reads one while others are written. Returns their entries.

    service
        A buffer for reads from disks; None: the store's.
    written
        Called with each file when its values are no longer read.
    """
    entries: FileEntries = {}

    def finish(started: tuple[UnitFile, FileWriter]) -> None:
        file, writer = started
        with writer:
            entries[file.name] = writer.finish()
        advance(entries[file.name]["nbytes"])
        written(file)

    with TransferQueue[tuple[UnitFile, FileWriter]](
        FILES_AT_ONCE, finish, lambda started: started[1].__exit__()
    ) as under_way:
        for file in draft.files:
            values = {name: value for name, (value, _) in file.values.items()}
            entries_of = {name: entry for name, (_, entry) in file.values.items()}
            path = draft.data / file.name
            under_way.add((file, _start_file(path, values, slots, entries_of, service=service)))
            under_way.make_room()
    # At the end: the first sync makes the file system flush its journal for all of them.
    for name in entries:
        sync_file(draft.data / name)
    return entries


def _start_file(
    path: Path,
    values: dict[str, HomeValues] | dict[str, torch.Tensor],
    slots: native.PinnedPool,
    told: dict[str, Any],
    *,
    service: native.PinnedPool | None = None,
) -> FileWriter:
    metadata = {"format": "pt", "DCP_VERSION": "1.0", PARTS_KEY: json.dumps(told)}
    return start_file(path, values, slots, metadata=metadata, service=service)


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], slots: native.PinnedPool
) -> dict[str, Any]:
    """Writes a file of whole ``tensors``. Returns its entry in the manifest."""
    entries = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
    with _start_file(path, tensors, slots, entries) as file:
        entry = file.finish()
    sync_file(path)
    return entry
