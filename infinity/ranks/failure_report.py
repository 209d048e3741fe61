"""FailureReport: reports why a rank ended, so that the others can name it and its reason.

A transport only reports that a connection was closed. So every rank writes its identity into the
job's store when it joins and, if an exception ends its process, the reason. A rank that loses a
peer reads them. A killed process leaves no reason; on the same machine its absence can be seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.machine.kernel import running_kernel

# In a transport's error
LOST = re.compile(r"gloo|nccl|connection|process group|peer", re.IGNORECASE)
# The same, where other libraries' errors may occur too
BROKEN = re.compile(r"gloo|nccl|pair closure|closed by peer", re.IGNORECASE)
LONGEST = 400  # characters of a reason
PATIENCE_SECONDS = 2.0  # for a process with closed connections to end, or to report why

_report: _FailureReport | None = None


class _FailureReport:
    def __init__(self, store: Any, rank: int, size: int):
        from torch.distributed import PrefixStore

        self._store, self._rank, self._pid = PrefixStore("infinity", store), rank, os.getpid()
        self._others = [other for other in range(size) if other != rank]
        self._processes: dict[int, int] = {}  # of the others, once they have joined
        self._store.set(
            f"who/{rank}", json.dumps([socket.gethostname(), running_kernel(), os.getpid()])
        )

    def _read(self, key: str) -> str:
        """Returns what a rank has written; "" if nothing, or if the store has gone first."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return self._store.get(key).decode(errors="replace")
        return ""

    def ended(self, ranks: Sequence[int]) -> bool:
        """Returns whether one of ``ranks`` is known to have ended. Does not block."""
        if not self._processes:
            self._processes = self.processes()
        if any(rank in ranks and not runs(pid) for rank, pid in self._processes.items()):
            return True
        with contextlib.suppress(RuntimeError):  # the store may have gone first
            return bool(self._store.add("left", 0)) and any(
                self._read(f"why/{rank}") for rank in ranks
            )
        return False

    def processes(self) -> dict[int, int]:
        """Returns the process ids of the other ranks that this process can see."""
        pids = {}
        for rank in self._others:
            if who := self._read(f"who/{rank}"):
                _, kernel, pid = json.loads(who)
                if kernel and kernel == running_kernel():
                    pids[rank] = pid
        return pids

    def leave(self, error: BaseException) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the rank itself lives
        text = describe_chain(error)
        with contextlib.suppress(RuntimeError):  # the store may have gone first
            self._store.set(f"why/{self._rank}", text[:LONGEST])
            self._store.add("left", 1)

    def silent(self) -> str:
        """Returns the ranks that have not reported (hung), and reports that this one gave up: a
        hung rank reports nothing."""
        with contextlib.suppress(RuntimeError):  # the store may have gone first
            self._store.set(f"waits/{self._rank}", "in vain")
            time.sleep(PATIENCE_SECONDS)
            said = []
            for rank in self._others:
                if self._store.check([f"waits/{rank}"]) or self._store.check([f"why/{rank}"]):
                    continue
                host, kernel, pid = json.loads(self._store.get(f"who/{rank}"))
                where = f"process {pid} on {host}"
                if kernel and kernel == running_kernel():
                    where = f"process {pid}, {'stopped' if _state(pid) == 'T' else 'running'}"
                said.append(f"rank {rank} ({where})")
            return ", ".join(said)
        return ""

    def reasons(self) -> list[str]:
        """Returns a sentence for every other rank that has ended. Waits up to ``PATIENCE_SECONDS``
        for one."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while not (reasons := self._look()) and time.monotonic() < ends:
            time.sleep(0.05)
        return reasons

    def _look(self) -> list[str]:
        reasons, processes = [], self.processes()
        for rank in self._others:
            if why := self._read(f"why/{rank}"):
                reasons.append(f"rank {rank} failed: {why}")
            elif (pid := processes.get(rank)) is not None and not runs(pid):
                reasons.append(
                    f"rank {rank} (process {pid}) has ended without a word: it left, or was"
                    " killed, perhaps for want of memory"
                )
        return reasons


def join(store: Any, rank: int, size: int) -> None:
    """Makes this process rank ``rank`` of ``size`` of the job with ``store``. From here on an
    uncaught exception is reported to the other ranks."""
    global _report
    first = _report is None
    _report = _FailureReport(store, rank, size)
    if first:
        before = sys.excepthook

        def tell_too(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
            before(kind, error, traceback)
            # A collective of torch's own, inside the model, reports only a closed connection.
            if isinstance(error, RuntimeError) and LOST.search(str(error)) and (why := reasons()):
                print(
                    f"rank {rank} of {size} ends here because of another: {why}",
                    file=sys.stderr,
                    flush=True,
                )
            leave(error)

        sys.excepthook = tell_too


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def describe_chain(error: BaseException) -> str:
    """Describes why an error was raised, then where: the root cause, all notes, the error itself.

    The cause comes first because a pipeline's runtime describes the place at length.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    notes = [note for link in reversed(chain) for note in getattr(link, "__notes__", ())]
    where = "".join(f" ({note})" for note in notes)
    above = f", in {_describe(error)}" if len(chain) > 1 else ""
    return f"{_describe(chain[-1])}{where}"[: LONGEST // 2 if above else LONGEST] + above


def leave(error: BaseException) -> None:
    """Reports to the other ranks that this one ends with ``error``. No-op without a job."""
    if _report is not None:
        _report.leave(error)


def reasons() -> str:
    """Returns what is known of ended ranks, in a few sentences, or ""."""
    return ". ".join(_report.reasons()) if _report is not None else ""


def silent() -> str:
    """Returns the ranks that have not reported, after this one has waited in vain, or ""."""
    return _report.silent() if _report is not None else ""


def ended(ranks: Sequence[int]) -> bool:
    """Returns whether one of ``ranks`` is known to have ended. Does not block."""
    return _report is not None and _report.ended(ranks)


def processes() -> dict[int, int]:
    """Returns the process ids of the other ranks that this process can see."""
    return _report.processes() if _report is not None else {}


def runs(pid: int) -> bool:
    """Returns whether there is a process ``pid`` that has not ended."""
    return _state(pid) not in "ZX"


def _state(pid: int) -> str:
    """Returns the kernel's letter for a process's state; X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
