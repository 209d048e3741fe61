"""Processes that come at once: forks of one that has imported torch and the engine and has done nothing else.

Words used here:

**prepared**: that process. It starts when a test first asks for it, and ends with the process of the tests.
**child**: a fork of it. It runs a script as the main module and ends as any interpreter does. Unlike an interpreter of its own it has the
hash seed of the others, and no libraries put before its own (``LD_PRELOAD``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZE = struct.Struct("!I")  # of a message, which follows
DIES_WITH_PARENT, NEW_NETWORK = 1, 0x40000000  # PR_SET_PDEATHSIG, CLONE_NEWNET


class Child:
    """A script that runs in a fork of the prepared process, at the head of a session of its own."""

    def __init__(self, pid: int, end: socket.socket, said: Any):
        self.pid, self._end, self._said = pid, end, said
        self.returncode: int | None = None  # as subprocess has it: minus the signal that killed it

    def wait(self, seconds: float) -> str:
        """Waits for the end. What the child wrote on stdout and stderr. Raises TimeoutError."""
        if self.returncode is None:
            if not select.select([self._end], [], [], seconds)[0]:
                raise TimeoutError(f"no end within {seconds} s: {self._text()[-4000:]}")
            self.returncode = _receive(self._end)
        return self._text()

    def kill(self) -> None:
        """Ends the child and what it started, and waits for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(60)

    def _text(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")


def start(script: Path, *arguments: object, variables: dict[str, str] | None = None, network: Path | None = None) -> Child:
    """Runs ``script`` with ``arguments`` in a child that has this process's environment and ``variables``; in a ``network`` namespace of its
    own where one is named."""
    command = [str(script), *map(str, arguments)]
    environment = dict(os.environ) | (variables or {})
    said = tempfile.TemporaryFile()
    ours, theirs = socket.socketpair()
    with theirs:
        raw = pickle.dumps((command, environment, os.getcwd(), network and str(network)))
        prepared = _prepared(os.getpid())
        prepared.sendall(SIZE.pack(len(raw)) + raw)
        socket.send_fds(prepared, [b"f"], [said.fileno(), theirs.fileno()])
    return Child(_receive(ours), ours, said)


@functools.cache
def _prepared(pid: int) -> socket.socket:
    """The prepared process of this one, which starts it: a fork of this one would need its own."""
    ours, theirs = socket.socketpair()
    with theirs:
        variables = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(
            command, env=variables, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def close() -> None:
        if os.getpid() == pid:
            ours.close()
            process.wait(60)

    atexit.register(close)
    return ours


def _receive(connection: socket.socket) -> Any:
    """The next message. Raises EOFError where the other end is closed."""
    (nbytes,) = SIZE.unpack(_exactly(connection, SIZE.size))
    return pickle.loads(_exactly(connection, nbytes))


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        if not (part := connection.recv(nbytes - len(found))):
            raise EOFError("the prepared process has ended")
        found += part
    return found


def _send(connection: socket.socket, message: Any) -> None:
    raw = pickle.dumps(message)
    with contextlib.suppress(OSError):  # who asked is gone
        connection.sendall(SIZE.pack(len(raw)) + raw)


# --- the prepared process ---


def _import() -> None:
    """Imports what scripts use; torch imports half of itself when the first optimizer is made."""
    import gc

    import torch

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    import models  # noqa: F401
    import rank_jobs  # noqa: F401

    import infinity

    for name in infinity.__all__:
        getattr(infinity, name)
    gc.collect()
    gc.freeze()


def _serve(asked: socket.socket) -> list[str]:
    """Forks children until who asks is gone, and ends them with itself. Returns, in a child alone, what it shall run."""
    running: dict[int, tuple[int, socket.socket]] = {}  # a descriptor that tells the end -> the process, and who is told
    while True:
        for ready in select.select([asked, *running], [], [])[0]:
            if ready is not asked:
                pid, told = running.pop(ready)
                os.close(ready)
                _send(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                told.close()
                continue
            try:
                command, environment, folder, network = _receive(asked)
                _, (said, end), _, _ = socket.recv_fds(asked, 1, 2)
            except (EOFError, OSError):
                for pid, _ in running.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            told = socket.socket(fileno=end)
            parent = os.getpid()
            if (pid := os.fork()) == 0:
                os.setsid()
                _become(parent, said, environment, folder, network)
                for other, connection in running.items():
                    os.close(other)
                    connection[1].close()
                told.close()
                asked.close()
                return command
            os.close(said)
            running[os.pidfd_open(pid)] = pid, told
            _send(told, pid)


def _become(parent: int, said: int, environment: dict[str, str], folder: str, network: str | None) -> None:
    """Gives a child what it was asked to have."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (1, 2):
        os.dup2(said, number)
    os.close(said)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if network is not None:
        with open(network) as namespace:
            if library.setns(namespace.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), network)


if __name__ == "__main__":
    _import()
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
