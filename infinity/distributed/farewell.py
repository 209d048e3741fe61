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

from ..machine.kernel import running_kernel

LOST = re.compile(r"gloo|nccl|connection|process group|peer", re.IGNORECASE)  # in what a transport says
BROKEN = re.compile(r"gloo|nccl|pair closure|closed by peer", re.IGNORECASE)  # the same, where others' errors come by
LONGEST = 400  # characters of a reason
PATIENCE_SECONDS = 2.0  # until a process that has closed its connections has ended, or said why

_joined: _Farewell | None = None


class _Farewell:
    def __init__(self, store: Any, rank: int, size: int):
        from torch.distributed import PrefixStore

        self._store, self._rank, self._size, self._pid = PrefixStore("infinity", store), rank, size, os.getpid()
        self._store.set(f"who/{rank}", json.dumps([socket.gethostname(), running_kernel(), os.getpid()]))

    def leave(self, error: BaseException) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the rank itself lives
        text = describe_chain(error)
        with contextlib.suppress(Exception):  # the store may have gone first
            self._store.set(f"why/{self._rank}", text[:LONGEST])

    def silent(self) -> str:
        """Names the ranks of which nothing is known, and says that this one waits no longer: who hangs says nothing."""
        with contextlib.suppress(Exception):
            self._store.set(f"waits/{self._rank}", "")
            time.sleep(PATIENCE_SECONDS)
            others = [rank for rank in range(self._size) if rank != self._rank]
            found = [rank for rank in others if not self._store.check([f"waits/{rank}"]) and not self._store.check([f"why/{rank}"])]
            return ", ".join(f"rank {rank}{self._state_of(rank)}" for rank in found)
        return ""

    def _state_of(self, rank: int) -> str:
        host, kernel, pid = json.loads(self._store.get(f"who/{rank}"))
        if not kernel or kernel != running_kernel():
            return f" (process {pid} on {host})"
        return f" (process {pid}, {'stopped' if _state(pid) == 'T' else 'running'})"

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
                    _, kernel, pid = json.loads(self._store.get(f"who/{rank}"))
                    if kernel and kernel == running_kernel() and not _runs(pid):
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


def describe_chain(error: BaseException) -> str:
    """Says why an error came about, then where: the bottom of what it was raised from, every note on the way, the error itself.

    A pipeline's runtime says at length where, so that what is behind it comes first.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    notes = [note for each in reversed(chain) for note in getattr(each, "__notes__", ())]
    where = "".join(f" ({note})" for note in notes)
    above = f", in {_describe(error)}" if len(chain) > 1 else ""
    return f"{_describe(chain[-1])}{where}"[: LONGEST // 2 if above else LONGEST] + above


def leave(error: BaseException) -> None:
    """Tells the other ranks that this one ends with ``error``. Alone it does nothing."""
    if _joined is not None:
        _joined.leave(error)


def reasons() -> str:
    """Says what is known of ranks that have ended, in a few sentences; empty for nothing."""
    return ". ".join(_joined.reasons()) if _joined is not None else ""


def silent() -> str:
    """Names ranks from which nothing was heard, once this one has waited in vain; empty for none."""
    return _joined.silent() if _joined is not None else ""


def _runs(pid: int) -> bool:
    return _state(pid) not in "ZX"


def _state(pid: int) -> str:
    """The kernel's letter for a process's state; X for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
