"""Processes that come at once: forks of one that has imported torch and the engine and has done
nothing else.

Words used here:

**prepared**: that process. It starts when a test first asks for it, and ends with the process of
the tests; workers of one run share one. **child**: a fork of it. It runs a command of Python's (a
script, ``-c`` and code, or ``-m`` and a module) as the main module, and ends as any interpreter
does. It is for what needs a process, not an interpreter of its own: all children have one hash
seed, and what is read when a process starts (``LD_PRELOAD``, ``MALLOC_*``) is read no more.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
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
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[3]  # of the checkout, which has the benchmarks
SUPPORT = [str(folder) for folder in Path(__file__).resolve().parents[1].glob("*/")]
SIZE = struct.Struct("!I")  # of a message, which follows
WHERE = "INFINITY_PREPARED"  # the variable that says where the prepared process listens
OF_CHECKOUT = f"-{zlib.crc32(f'{ROOT} {sys.executable}'.encode()):08x}"  # the end of its name
DIES_WITH_PARENT, NEW_NETWORK = 1, 0x40000000  # PR_SET_PDEATHSIG, CLONE_NEWNET
LANGUAGE_MODELS = (
    "transformers",
    "rich.progress",
    "infinity.tools.train.train",
    "infinity.tools.plan.plan",
)  # what the command line imports for them
OF_RANKS = ("transformers.modeling_utils", "peft")  # what some of their jobs import

# The C library then gives back at once what torch frees; else it would keep up to 32 MiB at a time,
# and of each thread's arena.
GIVES_BACK = """
import ctypes
assert all(ctypes.CDLL(None).mallopt(option, value) for option, value in ((-3, 65536), (-8, 1)))  # M_MMAP_THRESHOLD, M_ARENA_MAX
"""  # noqa: E501


class Child:
    """A command that runs in a fork of the prepared process, at the head of a session of its
    own."""

    def __init__(
        self, pid: int, command: list[str], end: socket.socket, out: IO[bytes], err: IO[bytes]
    ):
        self.pid, self.command, self._end, self._out, self._err = pid, command, end, out, err
        self.returncode: int | None = None  # as subprocess has it: minus the signal that killed it

    @property
    def stdout(self) -> str:
        return _read(self._out)

    @property
    def stderr(self) -> str:
        return _read(self._err)

    def is_running(self) -> bool:
        return self.returncode is None and not select.select([self._end], [], [], 0.0)[0]

    def wait(self, seconds: float) -> None:
        """Waits for the end. Raises TimeoutError."""
        if self.returncode is None:
            if not select.select([self._end], [], [], max(0.0, seconds))[0]:
                raise TimeoutError(
                    f"no end within {seconds} s:\n{self.stdout[-2000:]}\n{self.stderr[-2000:]}"
                )
            self.returncode = _receive(self._end)

    def kill(self) -> None:
        """Ends the child and what it started, and waits for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(60)


def run(*command: object, seconds: float = 280, **options: Any) -> subprocess.CompletedProcess:
    """Runs ``command`` to its end, as :func:`start` does. No process is left behind."""
    child = start(*command, **options)
    try:
        child.wait(seconds)
    finally:
        child.kill()
    return subprocess.CompletedProcess(child.command, child.returncode, child.stdout, child.stderr)


def wait_for_all(children: list[Child], seconds: float) -> int:
    """Waits for the end of ``children``, or for the first one that fails. Returns its status, or 0.
    Raises TimeoutError."""
    end = time.monotonic() + seconds
    running = {child._end: child for child in children}
    while running:
        ready, _, _ = select.select([*running], [], [], max(0.0, end - time.monotonic()))
        child = running.pop(ready[0]) if ready else next(iter(running.values()))
        child.wait(0.0)
        if child.returncode:
            return child.returncode
    return 0


def start(
    *command: object,
    variables: dict[str, str] | None = None,
    folder: Path | None = None,
    stdin: str = "",
    network: Path | None = None,
    imports: tuple[str, ...] = (),
) -> Child:
    """Runs ``command`` in a child that has this process's environment and ``variables``, in
    ``folder`` or this process's own; in a ``network`` namespace where one is named. ``imports``:
    what all later children have too, where it is installed."""
    words = [str(word) for word in command]
    given = tempfile.TemporaryFile()
    given.write(stdin.encode())
    given.seek(0)
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    ours, theirs = socket.socketpair()
    with theirs, given:
        prepared = _prepared(os.getpid())
        environment = dict(os.environ) | (variables or {})
        _send(
            prepared,
            (words, environment, str(folder or os.getcwd()), network and str(network), imports),
        )
        socket.send_fds(
            prepared, [b"f"], [given.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
        )
    return Child(_receive(ours), words, ours, out, err)


@functools.cache
def _prepared(pid: int) -> socket.socket:
    """The connection of the process ``pid``, this one, to the prepared process."""
    if not os.environ.get(WHERE, "").endswith(OF_CHECKOUT):  # of none, or of another Python
        share()
    ours = socket.socket(socket.AF_UNIX)
    ours.connect("\0" + os.environ[WHERE])
    return ours


def share() -> None:
    """Starts the prepared process, which ends with this one, for it and those that it starts. It
    imports nothing before it is asked for a child."""
    pid = os.getpid()
    listening, (ours, theirs) = socket.socket(socket.AF_UNIX), socket.socketpair()
    with listening, theirs:
        os.environ[WHERE] = f"infinity-{pid}-{time.monotonic_ns()}{OF_CHECKOUT}"
        listening.bind("\0" + os.environ[WHERE])
        listening.listen(64)
        variables = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        ends = listening.fileno(), theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, __file__, *map(str, ends)],
            env=variables,
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close() -> None:
        if os.getpid() == pid:
            ours.close()
            process.wait(60)

    atexit.register(close)


def _read(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _receive(connection: socket.socket) -> Any:
    """The next message. Raises EOFError where the other end is closed."""
    (nbytes,) = SIZE.unpack(_exactly(connection, SIZE.size))
    return pickle.loads(_exactly(connection, nbytes))


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        if not (part := connection.recv(nbytes - len(found))):
            raise EOFError("the other end has gone")
        found += part
    return found


def _send(connection: socket.socket, message: Any) -> None:
    raw = pickle.dumps(message)
    connection.sendall(SIZE.pack(len(raw)) + raw)


# --- the prepared process ---


def _import() -> None:
    """Imports what the children use."""
    gc.disable()  # collections that find nothing take a quarter of the time
    import torch

    torch.set_num_threads(1)
    torch.optim.AdamW(
        [torch.zeros(1, requires_grad=True)]
    )  # with the first optimizer torch imports half of itself
    import doubles
    import models  # noqa: F401
    import rank_jobs  # noqa: F401

    import infinity

    for name in infinity.__all__:
        getattr(infinity, name)
    doubles.install()
    gc.enable()


def _serve(listening: socket.socket, owner: socket.socket) -> list[str]:
    """Forks children until the owner is gone, and ends them with itself; those of a process that
    asked for them end with that one. Returns, in a child alone, the command that it shall run."""
    running: dict[
        int, tuple[int, socket.socket, socket.socket]
    ] = {}  # a descriptor that tells the end -> the process, who is told, who asked
    asking: list[socket.socket] = []
    while True:
        for ready in select.select([listening, owner, *asking, *running], [], [])[0]:
            if ready is listening:
                if "torch" not in sys.modules:
                    _import()
                asking.append(listening.accept()[0])
                continue
            if ready is owner:
                _kill(pid for pid, *_ in running.values())
                os._exit(0)
            if ready in running:
                pid, told, _ = running.pop(ready)
                os.close(ready)
                with told, contextlib.suppress(OSError):  # who asked does not care any more
                    _send(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            try:
                command, *settings, imports = _receive(ready)
                _, descriptors, _, _ = socket.recv_fds(ready, 1, 4)
            except (EOFError, OSError):
                _kill(pid for pid, _, asked in running.values() if asked is ready)
                asking.remove(ready)
                ready.close()
                continue
            for name in imports:
                if importlib.util.find_spec(name.partition(".")[0]):
                    importlib.import_module(name)
            gc.collect()
            gc.freeze()  # else each child's collections go through all that is imported
            parent = os.getpid()
            if (pid := os.fork()) == 0:
                told = [each for _, each, _ in running.values()]
                for connection in (listening, owner, *asking, *told):
                    connection.close()
                for other in (*running, descriptors[3]):
                    os.close(other)
                _become(parent, descriptors[:3], *settings)
                return command
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            told = socket.socket(fileno=descriptors[3])
            running[os.pidfd_open(pid)] = pid, told, ready
            with contextlib.suppress(OSError):
                _send(told, pid)


def _kill(heads: Iterable[int]) -> None:
    """Ends the sessions of ``heads``."""
    for pid in heads:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _become(
    parent: int, standard: list[int], environment: dict[str, str], folder: str, network: str | None
) -> None:
    """Gives a child what it was asked to have."""
    os.setsid()
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if network is not None:
        with open(network) as namespace:
            if library.setns(namespace.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), network)


if __name__ == "__main__":
    sys.path[1:1] = [*SUPPORT, str(ROOT)]  # the first is each child's own
    sys.argv = _serve(*(socket.socket(fileno=int(each)) for each in sys.argv[1:]))
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        sys.path[0] = ""
        code = compile(sys.argv.pop(1), "<string>", "exec")
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
