"""ReadOnce: reads files of a checkpoint straight to where their values belong, and puts back what was there where one is damaged.

A load changes nothing before all of it is checked, which takes two readings. A file that is one rank's alone, at homes in memory, needs
one: what it replaces is kept meanwhile, where the memory has room for it, until every rank has read all of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import native
from ..errors import CapacityError, StorageError
from ..machine.limits import for_the_engine, memory_left
from ..machine.progress import progress
from ..machine.tiers import Tier
from ..runtime.engine import Engine
from ..state.handle import ParamHandle
from .boxes import boxes_of_run
from .content import part_of_rank
from .file_reader import Destination, DiskHung, WholeFile, read_files
from .saved_tensors import SavedTensors
from .weight_files import tensors_of

Home = tuple[ParamHandle, str]  # and the name of the array


@dataclass(frozen=True)
class _Wanted:
    """An entry of a file, and the home that it is the values of: flat bytes."""

    file: str
    key: str
    home: Home
    memory: torch.Tensor


@dataclass
class ReadOnce:
    """The files of a checkpoint that this rank reads once, and the homes whose values they are."""

    files: dict[str, WholeFile] = field(default_factory=dict)
    homes: set[Home] = field(default_factory=set)
    _kept: native.Region | None = None  # room for what they replace
    _charge: native.Charge | None = None
    _replaced: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)  # home and what was there; None: zeros

    def take_room(self, engine: Engine, nbytes: int) -> bool:
        """Takes memory for ``nbytes`` that are replaced. Returns whether there is as much."""
        if self.files:
            try:
                self._charge = engine.ledger.reserve(Tier.HOST, nbytes, "what a load replaces")
                self._kept = native.Region(nbytes, huge_pages=True, touch_threads=0)
            except (CapacityError, StorageError, MemoryError):
                return False
        return True

    @contextmanager
    def replacing(self, engine: Engine, why: str) -> Iterator[None]:
        """Lets :meth:`read` replace values in the block. One that raises puts everything back; after one that ends all are new. ``why``:
        what every use of the engine is told where neither comes to its end."""
        if not self.files:
            yield
            return
        engine.begin_repair(why)
        for handle, _ in self.homes:
            handle.shard.wait_idle()
        try:
            yield
        except DiskHung as error:  # what it still writes nobody can put back
            with engine.store.guarding():
                raise StorageError(
                    error.errno, f"{error.strerror}: end this process and resume from the last checkpoint", error.filename
                ) from error
        except BaseException:
            for home, before in self._replaced:
                if before is None:
                    home.zero_()
                else:
                    native.copy_flat(home, before)
            engine.go_on()
            raise
        finally:
            self._replaced.clear()
            self._kept = self._charge = None

    def read(self) -> None:
        """Reads the files to their homes. Raises CorruptionError where one is not as it was written, StorageError."""
        if not self.files:
            return
        files, at = list(self.files.values()), 0
        kept = native.tensor_at(self._kept, self._kept.address, self._kept.nbytes, torch.uint8)

        def keep(destination: Destination) -> None:
            nonlocal at
            home, before = destination.memory, None
            if not is_zero(home):  # a job that has just begun has no moments yet
                before = kept[at : at + home.numel()]
                native.copy_flat(before, home)
                at += before.numel()
            self._replaced.append((home, before))

        with progress("loading the checkpoint", sum(file.nbytes for file in files)) as advance:
            read_files(files, before=keep, after=advance)


def choose_files(manifest: dict[str, Any], data: Path, engine: Engine, homes: Sequence[Home]) -> ReadOnce:
    """Chooses the files that this rank reads once: none where the engine's state is not whole, or the memory has no room. Nothing that the
    files say is relied on; what is wrong with them is for others to tell.

    homes
        What is to be loaded.
    """
    chosen = ReadOnce()
    if not engine.is_sound:
        return chosen
    by_file: dict[str, list[_Wanted]] = {}
    with SavedTensors(data, manifest) as saved:
        for home in homes:
            for wanted in _entries(saved, *home):
                by_file.setdefault(wanted.file, []).append(wanted)
    room, nbytes = _room(engine), 0
    for name, entries in sorted(by_file.items()):
        file = _whole_file(data / name, manifest["files"][name], entries)
        if file is not None and nbytes + (wanted := sum(each.memory.numel() for each in entries)) <= room:
            chosen.files[name], nbytes = file, nbytes + wanted
    rest = {each.home for name, entries in by_file.items() if name not in chosen.files for each in entries}
    chosen.homes = {each.home for name in chosen.files for each in by_file[name]} - rest
    return chosen if chosen.take_room(engine, nbytes) else ReadOnce()


def _entries(saved: SavedTensors, handle: ParamHandle, name: str) -> list[_Wanted]:
    """The entries that are the values of one home in the order in which they lie there; none where no such entries are all of it."""
    shard, part, array = handle.shard, part_of_rank(handle), handle.shard.arrays[name]
    if array.flat is None or not array.flat.is_cpu:
        return []
    (low, high), first = shard.own_part(name, handle.index), shard.part(name, handle.index)[0]
    begin, end = low - first, high - first
    at = low - shard.own(name)[0]
    memory = array.flat[at : at + end - begin]
    if saved.is_coded(name, handle.name):
        found = [(saved.entry_of_codes(name, handle.name, part, begin, end), memory)]
    elif part.order == tuple(range(len(part.order))):
        boxes = boxes_of_run(part.box.shape, part.order, begin, end)
        found = [
            (saved.entry_of(name, handle.name, box.moved(part.box.offset)), memory[at - begin : at - begin + box.numel])
            for box, at in boxes
        ]
    else:
        return []
    wanted = [_Wanted(*entry, (handle, name), here.view(torch.uint8)) for entry, here in found if entry is not None]
    return wanted if len(wanted) == len(found) else []


def _whole_file(path: Path, entry: dict[str, Any], wanted: list[_Wanted]) -> WholeFile | None:
    """The file, where all of its values are wanted."""
    nbytes, checksum = entry["nbytes"], entry["crc32c"]
    if type(nbytes) is not int or type(checksum) is not int or nbytes <= 0:
        return None
    stored = {key: tensor for key, tensor in tensors_of(path).items() if tensor.begin < tensor.end}
    memory = {each.key: each.memory for each in wanted if each.memory.numel()}
    if {key: tensor.end - tensor.begin for key, tensor in stored.items()} != {key: here.numel() for key, here in memory.items()}:
        return None
    destinations = sorted((Destination(tensor.begin, memory[key]) for key, tensor in stored.items()), key=lambda each: each.begin)
    return WholeFile(path, nbytes, checksum, destinations)


def is_zero(raw: torch.Tensor) -> bool:
    """Tells whether all bytes of flat ``raw`` are zeros, soon where one of the first is not."""
    words = raw[: raw.numel() // 8 * 8]
    return not raw[:4096].any() and not words.numpy().view(np.int64).any() and not raw[words.numel() :].any()


def _room(engine: Engine) -> int:
    """Bytes of memory that this rank may take for as long as a load takes."""
    left = for_the_engine(memory_left()) // engine.ranks.local_size
    room = engine.ledger.room(Tier.HOST)
    return left if room is None else min(left, room)
