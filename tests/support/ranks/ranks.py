"""Several ranks under torchrun, arranged for tests.

Words used here:

**job**: a function of `rank_jobs`, or of another script here, that every rank runs; what it returns
on each rank is what the test looks at. **launch**: one torchrun with some ranks, which run jobs one
after the other over gloo on this machine. **standing ranks**: a launch that stays for all tests of
a worker and runs each job when a test first asks for it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import prepared

HERE = Path(__file__).parent
JOBS = HERE.parent / "jobs"
# a launch that takes longer hangs; on a machine in a slow phase, beside others, the longest takes
# five minutes
SECONDS = 600


class Failed:
    """A job that raised on a rank."""

    def __init__(self, kind: str, text: str, trace: str):
        self.kind, self.text, self.trace = kind, text, trace

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}\n{self.trace}"


def launch(
    folder: Path,
    world: int,
    jobs: dict[str, dict[str, Any]],
    *,
    seconds: float = SECONDS,
    environment: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
    script: str = "rank_jobs.py",
) -> tuple[dict[str, list[Any]], subprocess.CompletedProcess]:
    """Runs ``jobs`` (name, or name:variant -> arguments) on ``world`` ranks. What each returned, by
    job and rank (a rank that did not get so far has None), and how the ranks ended. ``options`` of
    torchrun start them by it. No process is left behind."""
    _write_jobs(folder, jobs)
    run = run_torchrun if options else run_ranks
    done = run(
        world, [*options, str(JOBS / script), str(folder)], seconds=seconds, environment=environment
    )
    return _results(folder, world, jobs), done


def _write_jobs(folder: Path, jobs: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs").write_bytes(pickle.dumps(jobs))


def _results(folder: Path, world: int, jobs: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {name: [None] * world for name in jobs}
    for rank in range(world):
        for name in jobs:
            path = folder / f"{name.replace(':', '-')}.{rank}"
            if path.exists():
                results[name][rank] = pickle.loads(path.read_bytes())
    return results


def run_all(
    folder: Path, world: int, jobs: dict[str, dict[str, Any]], **options: Any
) -> dict[str, list[Any]]:
    """Runs ``jobs`` as :func:`launch` does, none of which may fail."""
    found, done = launch(folder, world, jobs, **options)
    failed = [
        f"{name}: {rank!r}"[-3000:]
        for name, ranks in found.items()
        for rank in ranks
        if isinstance(rank, Failed)
    ]
    assert done.returncode == 0, failed or done.stderr[-4000:]
    return found


def near(found: list[float], expected: list[float], distance: float = 1e-6) -> bool:
    return len(found) == len(expected) > 0 and all(
        abs(a - b) <= distance * max(1.0, abs(b)) for a, b in zip(found, expected)
    )


def told(run: Callable[[], Any]) -> str:
    """What a typed error that ``run`` raises says, after its kind; "was taken" for none."""
    from infinity import InfinityError

    try:
        run()
    except InfinityError as error:
        return f"{type(error).__name__}: {error}"
    return "was taken"


def torchrun(
    world: int, command: list[str], *, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen:
    """Starts torchrun on this machine, at the head of a session of its own."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        *command,
    ]
    # torch 2.13 keeps one store over restarts: a restarted rank would find the address of the one
    # that died.
    variables = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return subprocess.Popen(
        command, text=True, env=variables | (environment or {}), start_new_session=True, **options
    )


def end_session(process: subprocess.Popen) -> None:
    """Ends ``process`` and everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_torchrun(
    world: int,
    command: list[str],
    *,
    seconds: float = SECONDS,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """torchrun on this machine. No process is left behind, whatever happens."""
    process = torchrun(
        world, command, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end_session(process)
        out, err = process.communicate()
        raise AssertionError(f"no end within {seconds} s:\n{out}\n{err}") from None
    finally:
        end_session(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_ranks(
    world: int,
    command: list[str],
    *,
    seconds: float = SECONDS,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Runs ``command`` on ranks that come at once (see `prepared`). As torchrun does, it ends all
    with the first one that fails. No process is left behind."""
    ranks: list[prepared.Child] = []
    try:
        address = _free_address()
        for rank in range(world):
            variables = rank_variables(rank, world, address) | (environment or {})
            ranks.append(prepared.start(*command, variables=variables, imports=prepared.OF_RANKS))
        status = prepared.wait_for_all(ranks, seconds)
    finally:
        for rank in ranks:
            rank.kill()
    out, err = ("".join(texts) for texts in zip(*((rank.stdout, rank.stderr) for rank in ranks)))
    return subprocess.CompletedProcess(command, status, out, err)


def _free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


class StandingRanks:
    """Ranks that run one job after the other, as they are asked to. They start with the first job,
    and again after one that failed."""

    def __init__(self, world: int):
        self.world = world
        self._children: list[prepared.Child] = []
        self._ranks: list[Connection] = []

    def run(self, script: str, name: str, arguments: dict[str, Any]) -> list[Any]:
        """Runs the job ``name`` of ``script`` (a module of this folder). What each rank
        returned."""
        if not self._ranks:
            self._start()
        raw = pickle.dumps((script, name.partition(":")[0], arguments))
        found: dict[int, Any] = {}
        try:
            for rank in self._ranks:
                rank.send_bytes(raw)
            while len(found) < self.world:
                ready = wait(
                    [rank for at, rank in enumerate(self._ranks) if at not in found],
                    timeout=SECONDS,
                )
                assert ready, f"{name}: no end within {SECONDS} s"
                for rank in ready:
                    found[self._ranks.index(rank)] = pickle.loads(rank.recv_bytes())
        except (
            OSError,
            EOFError,
        ):  # a rank failed before, and the others have nobody to go on with
            pass
        except BaseException:
            self.close()
            raise
        failed = [
            f"rank {rank}: {result!r}"[-3000:]
            for rank, result in found.items()
            if isinstance(result, Failed)
        ]
        if failed or len(found) < self.world:
            said = self.close()
            raise AssertionError(f"{name}: {failed or 'a rank ended'}\n{said[-4000:]}")
        return [found[rank] for rank in range(self.world)]

    def _start(self) -> None:
        end = time.monotonic() + SECONDS
        ranks: dict[int, Connection] = {}
        try:
            with socket.create_server(("127.0.0.1", 0)) as server:
                server.settimeout(1)
                port, address = server.getsockname()[1], _free_address()
                for rank in range(self.world):
                    variables = rank_variables(rank, self.world, address)
                    command = HERE / "rank_server.py", port
                    self._children.append(
                        prepared.start(*command, variables=variables, imports=prepared.OF_RANKS)
                    )
                while len(ranks) < self.world:
                    assert time.monotonic() < end and all(
                        child.is_running() for child in self._children
                    ), "the ranks did not start: " + self.close()[-4000:]
                    try:
                        connection = Connection(server.accept()[0].detach())
                        ranks[connection.recv()] = connection
                    except TimeoutError:
                        continue
        except BaseException:
            self.close()
            raise
        self._ranks = [ranks[rank] for rank in range(self.world)]

    def close(self) -> str:
        """Ends the ranks. What they wrote to stderr."""
        for rank in self._ranks:
            rank.close()
        for child in self._children:
            child.kill()
        said = "".join(child.stderr for child in self._children)
        self._children, self._ranks = [], []
        return said


class Jobs(Mapping[str, list[Any]]):
    """What jobs returned, by name. Each is run on ``ranks`` when it is first looked at, after those
    that it ``needs``.

    ``jobs``: name, or name:variant -> arguments. ``results``: what is known without them.
    """

    def __init__(
        self,
        ranks: StandingRanks,
        script: str,
        jobs: dict[str, dict[str, Any]],
        *,
        needs: Callable[[str], list[str]] = lambda name: [],
        **results: Any,
    ):
        self._ranks, self._script, self._jobs, self._needs, self._results = (
            ranks,
            script,
            jobs,
            needs,
            results,
        )

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._results:
            arguments = self._jobs[name]
            for needed in self._needs(name):
                self[needed]
            self._results[name] = self._ranks.run(self._script, name, arguments)
        return self._results[name]

    def __iter__(self):
        return iter([*self._results, *self._jobs])

    def __len__(self) -> int:
        return len(list(iter(self)))


def what_was_saved(job: str) -> list[str]:
    """The job that writes what ``job`` loads, if it does."""
    name, loads, onto = job.removeprefix("loaded:").partition(" onto ")
    return [f"saved:{name}{'-int8' * onto.endswith('-int8')}"] if loads else []


def launch_without(
    folder: Path,
    world: int,
    jobs: dict[str, dict[str, Any]],
    *,
    seconds: float = SECONDS,
    environment: dict[str, str] | None = None,
    script: str = "rank_jobs.py",
    last: int | None = None,
) -> tuple[dict[str, list[Any]], list[tuple[int | None, str]]]:
    """Runs ``jobs`` as :func:`launch` does, but without torchrun, which would end all ranks with
    the first one that fails; the ranks come at once (see `prepared`). What each job returned, and
    how each rank ended and what is on its stderr. ``last``: the only rank that is waited for.
    """
    _write_jobs(folder, jobs)
    address = _free_address()
    ranks = []
    try:
        for rank in range(world):
            variables = rank_variables(rank, world, address) | (environment or {})
            ranks.append(
                prepared.start(
                    JOBS / script, folder, variables=variables, imports=prepared.OF_RANKS
                )
            )
        end = time.monotonic() + seconds
        for rank, child in enumerate(ranks):
            if last is None or rank == last:
                child.wait(end - time.monotonic())
    finally:
        for child in ranks:
            child.kill()
    return _results(folder, world, jobs), [(child.returncode, child.stderr) for child in ranks]


def rank_variables(
    rank: int, world: int, address: str, *, of_host: int | None = None
) -> dict[str, str]:
    """What torchrun tells a rank: one of ``world`` on this machine, or the only one of a host."""
    host, _, port = address.rpartition(":")
    local, here = (rank, world) if of_host is None else (0, 1)
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(of_host or 0),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def fall(at: Path, how: str, *, script: str, seconds: float = 240, **arguments: Any) -> str:
    """Runs the job ``falls``, in which rank 1 of two does, without a launcher that would end the
    other one first. What rank 0 said; both have failed, but for a rank 1 that ``hangs``."""
    hangs = 0 if how == "hangs" else None
    jobs = {"falls": {"how": how, **arguments}}
    _, ends = launch_without(
        at, 2, jobs, script=script, seconds=seconds, environment={"RANK_TIMEOUT": "15"}, last=hangs
    )
    (first, said), (second, _) = ends
    assert first is not None and first > 0 and second != 0, ends
    return said


class Plainly(pickle.Pickler):
    """Pickles plain tensors as their bytes: torch would write an archive for each."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
            return NotImplemented
        flat = value.detach().cpu().contiguous().view(-1)
        return _tensor_of, (
            flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"",
            value.dtype,
            value.shape,
        )


def _tensor_of(raw: bytes, dtype: Any, shape: Any) -> Any:
    import torch

    return (
        torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
        if raw
        else torch.empty(shape, dtype=dtype)
    )


def serve(functions: dict[str, Any]) -> None:
    """What a script of jobs does on every rank: runs the jobs of its launch, whose names are among
    ``functions``."""
    import torch.distributed as dist

    folder = Path(sys.argv[1])
    rank = join()
    for name, arguments in pickle.loads((folder / "jobs").read_bytes()).items():
        result = outcome_of(functions[name.partition(":")[0]], arguments)
        with open(folder / f"{name.replace(':', '-')}.{rank}", "wb") as file:
            Plainly(file).dump(result)
        if isinstance(result, Failed):
            os._exit(1)
    dist.destroy_process_group()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # to take every module apart would be a third of a second of a processor


def join() -> int:
    """Makes this process a rank of its launch. Returns which."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    seconds = float(os.environ.get("RANK_TIMEOUT", "60"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    return dist.get_rank()


def outcome_of(job: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Runs ``job``. What it returns, or Failed."""
    try:
        return job(**arguments)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        sys.excepthook(
            type(error), error, error.__traceback__
        )  # as at the end of a script that does not catch it
        return Failed(type(error).__name__, str(error), traceback.format_exc())
