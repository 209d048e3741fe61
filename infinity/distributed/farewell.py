"""Farewell: what a rank that cannot go on leaves behind, so that the others can name it and its reason.

A transport only says that a connection was closed. So every rank of a job writes into the job's store who it is when it joins and,
if an exception ends its process, why. Who loses a peer looks there. A process that was killed says nothing; where it ran on
this machine, that it is gone can be seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

LOST = re.compile(r"gloo|nccl|connection|process group|peer", re.IGNORECASE)  # in what a transport says
LONGEST = 400  # characters of a reason
PATIENCE_SECONDS = 2.0  # until a process that has closed its connections has ended, or said why

_joined: _Farewell | None = None


class _Farewell:
    def __init__(self, store: Any, rank: int, size: int):
        from torch.distributed import PrefixStore

        self._store, self._rank, self._size, self._pid = PrefixStore("infinity", store), rank, size, os.getpid()
        self._store.set(f"who/{rank}", json.dumps([socket.gethostname(), _boot(), os.getpid()]))

    def leave(self, error: BaseException) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the rank itself lives
        text = _describe(error)
        root = error
        while root.__cause__ is not None:  # a pipeline's runtime says where, and what it was raised from says why
            root = root.__cause__
        if root is not error:
            text = f"{text[: LONGEST // 2]}, because of {_describe(root)}"
        with contextlib.suppress(Exception):  # the store may have gone first
            self._store.set(f"why/{self._rank}", text[:LONGEST])

    def reasons(self) -> list[str]:
        """Makes a sentence for every other rank that has ended; a moment is given to one that is about to."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while not (found := self._look()) and time.monotonic() < ends:
            time.sleep(0.05)
        return found

    def _look(self) -> list[str]:
        found = []
        for rank in range(self._size):
            if rank == self._rank:
                continue
            with contextlib.suppress(Exception):  # of a store that is gone nothing is known: the transport's error is told
                if self._store.check([f"why/{rank}"]):
                    found.append(f"rank {rank} failed: {self._store.get(f'why/{rank}').decode(errors='replace')}")
                elif self._store.check([f"who/{rank}"]):
                    host, boot, pid = json.loads(self._store.get(f"who/{rank}"))
                    if (host, boot) == (socket.gethostname(), _boot()) and not _runs(pid):
                        found.append(
                            f"rank {rank} (process {pid}) has ended without a word: it left, or was killed, perhaps for want of memory"
                        )
        return found


def join(store: Any, rank: int, size: int) -> None:
    """Makes this process rank ``rank`` of ``size`` of the job that has ``store``. An uncaught exception is told from here on."""
    global _joined
    first = _joined is None
    _joined = _Farewell(store, rank, size)
    if first:
        before = sys.excepthook

        def tell_too(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
            before(kind, error, traceback)
            # A collective of torch's own, inside the model, says only that a connection was closed.
            if isinstance(error, RuntimeError) and LOST.search(str(error)) and (known := reasons()):
                print(f"rank {rank} of {size} ends here because of another: {known}", file=sys.stderr, flush=True)
            leave(error)

        sys.excepthook = tell_too


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def leave(error: BaseException) -> None:
    """Tells the other ranks that this one ends with ``error``. Alone it does nothing."""
    if _joined is not None:
        _joined.leave(error)


def reasons() -> str:
    """Says what is known of ranks that have ended, in a few sentences; empty for nothing."""
    return ". ".join(_joined.reasons()) if _joined is not None else ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
