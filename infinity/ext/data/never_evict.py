"""NeverEvict: a dataset that keeps what it has read, up to a limit, and never replaces it.

If every epoch reads all items once in another order, a cache that replaces items keeps few of those
that come next. One that keeps the first ones misses exactly the others: the least that is possible
(Mohan et al. 2021, CoorDL).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from ...amounts import parse_nbytes
from ...core.machine.sizes import format_nbytes
from ...errors import CapacityError, ConfigError, InfinityError
from .arena import Arena

logger = logging.getLogger(__name__)


def _whole_file(path: Any) -> bytes:
    return Path(path).read_bytes()


class NeverEvict(Dataset):
    """A dataset of ``files``, each of which is read once and kept in ``memory``, as long as there
    is room.

        dataset = infinity.data.NeverEvict(files, prepare=decode, memory="8GiB")
        loader = DataLoader(dataset, batch_sampler=order, num_workers=4)

    read
        Returns the bytes of one of ``files``, which need not be paths. Default: the whole file.
    prepare
        Makes a sample of the bytes (a ``memoryview``, which is read-only). Default: ``bytes``.
    memory
        Bytes, or text as "8GiB", of this machine: its workers and its ranks share them. They are
        charged to ``host_memory``.

    Every rank makes one, with the same files. Items are kept if they fit when they come first, so
    each later epoch reads exactly the others. After a restart the first epoch reads all.

    Raises ConfigError for no files, or a size that is none; CapacityError if ``host_memory`` has no
    room; what ``read`` raises, each time: an item that cannot be read is not kept.
    """

    def __init__(
        self,
        files: Sequence[Any],
        *,
        read: Callable[[Any], bytes] = _whole_file,
        prepare: Callable[[memoryview], Any] = bytes,
        memory: int | str,
    ):
        if isinstance(files, (str, bytes)) or not len(files):
            raise ConfigError("NeverEvict: files must be a sequence of at least one")
        nbytes = parse_nbytes(memory, "memory")
        if nbytes is None or nbytes < 1:
            raise ConfigError(f"NeverEvict: memory={memory!r} must be bytes, or text as '8GiB'")
        for name, function in (("read", read), ("prepare", prepare)):
            if not callable(function):
                raise ConfigError(f"NeverEvict: {name}={function!r} must be a function")
        self._files, self._read, self._prepare = files, read, prepare
        self._arena = _shared(len(files), nbytes)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        index = range(len(self._files))[index]
        if (kept := self._arena.get(index)) is not None:
            return self._prepare(kept)
        data = self._read(self._files[index])
        self._arena.offer(index, data)
        return self._prepare(memoryview(data).toreadonly())

    @property
    def kept(self) -> int:
        """The number of items that are kept."""
        return self._arena.kept

    @property
    def misses(self) -> int:
        """How many reads there were, of all workers and ranks of this machine."""
        return self._arena.kept + self._arena.refused

    @property
    def used_nbytes(self) -> int:
        """Bytes of the items that are kept."""
        return self._arena.used_nbytes


def _shared(count: int, nbytes: int) -> Arena:
    """Makes the memory of this machine's ranks: the first of them does, the others open it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Arena(count, nbytes)
    me, machines = _machine(), [None] * dist.get_world_size()
    dist.all_gather_object(machines, me)
    here = [rank for rank, machine in enumerate(machines) if machine == me]
    is_first = dist.get_rank() == here[0]
    made, failed = None, None
    if is_first:
        try:
            made = Arena(count, nbytes, sharers=len(here))
        except InfinityError as error:  # raised below: the other ranks wait for this one
            failed = error
    sent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sent, None if made is None else made.__getstate__())
    if failed is not None:
        raise failed
    if lacking := [
        rank
        for rank in range(len(sent))
        if machines.index(machines[rank]) == rank and sent[rank] is None
    ]:
        raise CapacityError(
            f"NeverEvict: rank {lacking[0]} could not make its machine's {format_nbytes(nbytes)}:"
            " its own error says why"
        )
    if made is None:
        try:
            made = Arena.opened(sent[here[0]])
        except OSError as error:
            part = nbytes // len(here)
            logger.warning(
                "the ranks of this machine cannot share memory (%s): this one keeps items in %s of"
                " its own",
                error.strerror,
                format_nbytes(part),
            )
            made = Arena(count, part)
    dist.barrier()  # the first rank's file descriptor is open until all have theirs
    return made


def _machine() -> tuple[str, str]:
    """Names the machine and container of this process."""
    return socket.gethostname(), os.readlink("/proc/self/ns/pid")
