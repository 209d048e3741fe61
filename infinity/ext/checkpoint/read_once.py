"""ReadOnce: reads files of a checkpoint straight to their homes, and restores the old values if one
is damaged.

[Note: why a file is read once] A load changes nothing before all of it is verified, which takes two
reads. A file whose values all belong to homes in memory needs only one: the old values are kept
until it is verified, if memory has room for them.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import native
from ...core.homes.transfers import never_freed
from ...core.machine.limits import for_the_engine, memory_left
from ...core.machine.tiers import Tier
from ...core.run.job import Job
from ...core.units.handle import ParamHandle
from ...errors import CapacityError, CorruptionError, StorageError
from ...files.boxes import boxes_of_run
from ...files.weight_files import keep_header, tensors_told
from ...progress import progress
from .content import part_of_rank
from .file_reader import Destination, WholeFile, read_files, stop
from .repair import begin_repair, is_sound
from .saved_tensors import SavedTensors

Home = tuple[ParamHandle, str]  # parameter, and name of the array


@dataclass(frozen=True)
class _Wanted:
    """An entry of a file, and the flat bytes of its home."""

    file: str
    key: str
    home: Home
    memory: torch.Tensor


@dataclass
class ReadOnce:
    """The files of a checkpoint that are read once, and the homes of their values."""

    files: dict[str, WholeFile] = field(default_factory=dict)
    homes: set[Home] = field(default_factory=set)
    # Path, header as parsed, and header as read with the file.
    headers: list[tuple[Path, bytes, torch.Tensor]] = field(default_factory=list)
    nbytes: int = 0  # bytes of the old values
    _kept: native.Region | None = None  # memory for the old values
    _charge: native.Charge | None = None
    _used: int = 0  # bytes used of it
    # Home and old values; None: zeros.
    _replaced: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)

    def take_room(self, job: Job) -> bool:
        """Reserves memory for the old values, until :meth:`load` is done. Returns whether there is
        enough."""
        try:
            self._charge = job.ledger.reserve(Tier.HOST, self.nbytes, "what a load replaces")
            self._kept = native.Region(
                max(self.nbytes, native.BLOCK_NBYTES), huge_pages=True, touch_threads=0
            )
        except (CapacityError, StorageError, MemoryError):
            self._let_go()
            return False
        return True

    def load(self, job: Job, why: str) -> None:
        """Reads the files to their homes. If it raises, all old values are restored.

        why
            The error text of every use of the engine if the old values cannot be restored.

        Raises CorruptionError if a file is not as it was written, StorageError if it cannot be
        read. If a disk has not answered, it may still write to the homes, and the engine's store is
        unusable.
        """
        running: list[native.IoEngine] = []
        try:
            begin_repair(job, why)
            for handle, _ in self.homes:
                handle.flat_param.homes.wait_idle()
            with progress(
                "loading the checkpoint", sum(file.nbytes for file in self.files.values())
            ) as advance:
                read_files(list(self.files.values()), running, before=self._keep, after=advance)
            for path, believed, read in self.headers:
                if bytes(read.numpy()) != believed:
                    raise CorruptionError(
                        f"{path} was read twice and had two headers: its disk is not to be trusted"
                    )
        except BaseException:
            native.insist(partial(self._put_back, job, running))
            raise
        finally:
            self._let_go()

    def _keep(self, destination: Destination) -> None:
        home, before = destination.memory, None
        if not is_zero(home):  # a new job has no moments yet
            before = native.tensor_at(
                self._kept, self._kept.address + self._used, home.numel(), torch.uint8
            )
            native.copy_flat(before, home)
            self._used += home.numel()
        self._replaced.append((home, before))

    def _put_back(self, job: Job, running: list[native.IoEngine]) -> None:
        """Restores the homes' old values, once no read is in flight. Idempotent."""
        if folder := stop(running):
            never_freed.extend(home for home, _ in self._replaced)
            with job.store.guard:
                raise StorageError(
                    errno.ETIMEDOUT,
                    "the disk did not answer, and may still write to the memory it was given: end"
                    " this process and resume from the last checkpoint",
                    folder,
                )
        for home, before in self._replaced:
            if before is None:
                home.zero_()
            else:
                native.copy_flat(home, before)
        job.uses.go_on()

    def _let_go(self) -> None:
        self._replaced.clear()
        if self._charge is not None:
            self._charge.release()
        self._kept = self._charge = None


def choose_files(manifest: dict[str, Any], data: Path, job: Job, homes: Sequence[Home]) -> ReadOnce:
    """Chooses the files that are read once. Chooses none with other ranks, which would have to
    restore together, or if the engine's state is not sound, or memory has no room. Does not verify
    the files; their check does.

    homes
        The homes to load.
    """
    chosen = ReadOnce()
    if not job.ranks.alone or not is_sound(job):
        return chosen
    by_file: dict[str, list[_Wanted]] = {}
    with SavedTensors(data, manifest) as saved:
        for home in homes:
            for wanted in _entries(saved, *home):
                by_file.setdefault(wanted.file, []).append(wanted)
    room = _room(job)
    for name, entries in sorted(by_file.items()):
        count = sum(each.memory.numel() for each in entries)
        if (
            chosen.nbytes + count <= room
            and (whole := _whole_file(data / name, manifest["files"][name], entries)) is not None
        ):
            chosen.files[name], header = whole
            chosen.headers.append((data / name, *header))
            chosen.nbytes += count
    rest = {
        each.home
        for name, entries in by_file.items()
        if name not in chosen.files
        for each in entries
    }
    chosen.homes = {each.home for name in chosen.files for each in by_file[name]} - rest
    return chosen


def _entries(saved: SavedTensors, handle: ParamHandle, name: str) -> list[_Wanted]:
    """Returns the entries whose values are one home, in memory order; none if no entries cover
    exactly all of it."""
    flat_param, part, array = (
        handle.flat_param,
        part_of_rank(handle),
        handle.flat_param.arrays[name],
    )
    if array.flat is None or not array.flat.is_cpu:
        return []
    begin, end = flat_param.layout.part_of_param(name, handle.index)
    memory = array.flat[slice(*flat_param.layout.part_at_home(name, handle.index))]
    if saved.is_coded(name, handle.name):
        entries = [(saved.entry_of_codes(name, handle.name, part, begin, end), memory)]
    elif part.order == tuple(range(len(part.order))):
        boxes = boxes_of_run(part.box.shape, part.order, begin, end)
        entries = [
            (
                saved.entry_of(name, handle.name, box.moved(part.box.offset)),
                memory[at - begin : at - begin + box.numel],
            )
            for box, at in boxes
        ]
    else:
        return []
    wanted = [
        _Wanted(*entry, (handle, name), here.view(torch.uint8))
        for entry, here in entries
        if entry is not None
    ]
    return wanted if len(wanted) == len(entries) else []


def _whole_file(
    path: Path, entry: dict[str, Any], wanted: list[_Wanted]
) -> tuple[WholeFile, tuple[bytes, torch.Tensor]] | None:
    """Returns the file if all of its values are wanted, with its header as parsed and the buffer
    for its second read."""
    nbytes, checksum = entry["nbytes"], entry["crc32c"]
    if type(nbytes) is not int or type(checksum) is not int or nbytes <= 0:
        return None
    header = keep_header(path)
    stored = {
        key: tensor
        for key, tensor in tensors_told(path, header).items()
        if tensor.begin < tensor.end
    }
    memory = {each.key: each.memory for each in wanted if each.memory.numel()}
    if {key: tensor.end - tensor.begin for key, tensor in stored.items()} != {
        key: here.numel() for key, here in memory.items()
    }:
        return None
    again = torch.zeros(len(header), dtype=torch.uint8)
    places = [(0, again), *((tensor.begin, memory[key]) for key, tensor in stored.items())]
    destinations = [
        Destination(begin, here) for begin, here in sorted(places, key=lambda place: place[0])
    ]
    return WholeFile(path, nbytes, checksum, destinations), (header, again)


def _room(job: Job) -> int:
    """Returns the bytes of memory that this rank may use during a load."""
    left, room = for_the_engine(memory_left()), job.ledger.room(Tier.HOST)
    return left if room is None else min(left, room)


def is_zero(raw: torch.Tensor) -> bool:
    """Returns whether all bytes of flat ``raw`` are zeros. Tests the first ones before the rest."""
    words = raw[: raw.numel() // 8 * 8]
    return (
        not raw[:4096].any()
        and not words.numpy().view(np.int64).any()
        and not raw[words.numel() :].any()
    )
