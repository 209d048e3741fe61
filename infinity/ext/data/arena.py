"""Arena: memory of fixed size that the processes of a machine share, for items that stay.

It has no name in the file system: the memory is gone with the last process that has it, however
that ends. Items are appended under a lock that the system takes back from a process that ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ...core.machine.ledger import ledgers
from ...core.machine.tiers import Tier
from ...errors import StorageError

HEADER = 4  # words: bytes in use, items kept, items that were read and not kept, unused
KEPT_DATA = "data kept in memory"  # the name of its bytes in plans


class Arena:
    """``count`` items in ``nbytes`` of memory. Item ``i`` is kept if it fits when it comes first,
    and is never moved or replaced. May be used by several processes at once: it is inherited by
    forked children, and sent to others by pickling while the first process lives.

    ``sharers``: processes that each charge a part of the bytes to their host memory.

    Raises StorageError if the system has no such memory, CapacityError if a wrapped model's
    ``host_memory`` has no room for it.
    """

    def __init__(self, count: int, nbytes: int, sharers: int = 1):
        self.nbytes, self._count = nbytes, count
        self.charged_nbytes = nbytes // sharers
        self._charges = [
            ledger.admit(Tier.HOST, self.charged_nbytes, KEPT_DATA) for ledger in ledgers()
        ]
        try:
            self._file = os.memfd_create("infinity-data", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, self._table_nbytes + nbytes)
        except OSError as error:
            raise StorageError(
                error.errno, f"no {nbytes} bytes of shared memory: {os.strerror(error.errno)}", ""
            ) from error
        self._owner = os.getpid()
        self._map()
        _live.add(self)

    def _map(self) -> None:
        self._lock, self._lock_of = threading.Lock(), os.getpid()
        self._seen = np.zeros(self._count, bool)  # kept, and wholly visible here
        self._memory = mmap.mmap(self._file, self._table_nbytes + self.nbytes)
        words = np.frombuffer(self._memory, np.int64, HEADER + 2 * self._count)
        self._header, self._entries = words[:HEADER], words[HEADER:].reshape(-1, 2)

    @property
    def _table_nbytes(self) -> int:
        """Bytes before the items: the header, and each item's place and length."""
        return 8 * (HEADER + 2 * self._count)

    def __getstate__(self) -> dict:
        return {
            "path": f"/proc/{self._owner}/fd/{self._file}",
            "count": self._count,
            "nbytes": self.nbytes,
            "charged_nbytes": self.charged_nbytes,
        }

    @classmethod
    def opened(cls, state: dict) -> Arena:
        """Opens the arena of another process of this machine, and charges a part of it, too.
        Raises OSError if that process is gone or not this user's."""
        made = cls.__new__(cls)
        made.__setstate__(state)
        made._charges = [
            ledger.admit(Tier.HOST, made.charged_nbytes, KEPT_DATA) for ledger in ledgers()
        ]
        _live.add(made)
        return made

    def __setstate__(self, state: dict) -> None:
        self.nbytes, self._count = state["nbytes"], state["count"]
        self.charged_nbytes, self._charges = state["charged_nbytes"], []
        self._file = os.open(state["path"], os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._owner = os.getpid()
        self._map()

    def get(self, item: int) -> memoryview | None:
        """Returns the bytes of an item that is kept; None for any other."""
        if not self._entries[item, 0]:
            return None
        if not self._seen[item]:
            with self._locked():  # another process may have written it just now
                self._seen[item] = True
        place, length = self._entries[item].tolist()
        begin = self._table_nbytes + place - 1
        return memoryview(self._memory)[begin : begin + length].toreadonly()

    def offer(self, item: int, data: bytes | memoryview) -> bool:
        """Keeps ``data`` if it fits and ``item`` is not kept yet. Returns whether it is kept."""
        length = memoryview(data).nbytes
        with self._locked():
            if self._entries[item, 0]:
                return True
            used = int(self._header[0])
            if used + length > self.nbytes:
                self._header[2] += 1
                return False
            begin = self._table_nbytes + used
            self._memory[begin : begin + length] = bytes(data)
            self._entries[item, 1] = length
            self._entries[item, 0] = used + 1  # last: readers take no lock
            self._header[0], self._header[1] = used + length, self._header[1] + 1
            return True

    @property
    def used_nbytes(self) -> int:
        return int(self._header[0])

    @property
    def kept(self) -> int:
        """The number of items that are kept."""
        return int(self._header[1])

    @property
    def refused(self) -> int:
        """How often an item did not fit."""
        return int(self._header[2])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes the other threads, and the other processes."""
        if self._lock_of != os.getpid():  # forked, maybe while a thread held it
            self._lock, self._lock_of = threading.Lock(), os.getpid()
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


_live: weakref.WeakSet[Arena] = weakref.WeakSet()


def kept_data_nbytes() -> int:
    """Counts the bytes of this process's arenas, as they are charged to host memory."""
    return sum(arena.charged_nbytes for arena in _live)
