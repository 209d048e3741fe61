"""Several ranks under torchrun, arranged for tests.

Words used here:

**job**: a function of `rank_jobs`, or of another script here, that every rank runs; what it returns on each rank is what the test looks at.
**launch**: one torchrun with some ranks, which run jobs one after the other over gloo on this machine.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 600  # a launch that takes longer hangs; on a machine in a slow phase, beside others, the longest takes five minutes


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
    """Runs ``jobs`` (name, or name:variant -> arguments) on ``world`` ranks. What each returned, by job and rank (a rank
    that did not get so far has None), and torchrun's end. No process is left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    done = run_torchrun(world, [*options, str(HERE / script), str(folder)], seconds=seconds, environment=environment)
    results: dict[str, list[Any]] = {name: [None] * world for name in jobs}
    for rank in range(world):
        for name in jobs:
            path = folder / f"{name.replace(':', '-')}.{rank}"
            if path.exists():
                results[name][rank] = pickle.loads(path.read_bytes())
    return results, done


def run_all(folder: Path, world: int, jobs: dict[str, dict[str, Any]], **options: Any) -> dict[str, list[Any]]:
    """Runs ``jobs`` as :func:`launch` does, none of which may fail."""
    found, done = launch(folder, world, jobs, **options)
    failed = [f"{name}: {rank!r}"[-3000:] for name, ranks in found.items() for rank in ranks if isinstance(rank, Failed)]
    assert done.returncode == 0, failed or done.stderr[-4000:]
    return found


def near(found: list[float], expected: list[float], distance: float = 1e-6) -> bool:
    return len(found) == len(expected) > 0 and all(abs(a - b) <= distance * max(1.0, abs(b)) for a, b in zip(found, expected))


def told(run: Callable[[], Any]) -> str:
    """What a typed error that ``run`` raises says, after its kind; "was taken" for none."""
    from infinity import InfinityError

    try:
        run()
    except InfinityError as error:
        return f"{type(error).__name__}: {error}"
    return "was taken"


def run_torchrun(
    world: int, command: list[str], *, seconds: float = SECONDS, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """torchrun on this machine. No process is left behind, whatever happens."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *command]
    # torch 2.13 keeps one store over restarts: a restarted rank would find the address of the one that died.
    variables = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables | (environment or {}),
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"no end within {seconds} s:\n{out}\n{err}") from None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def fall(at: Path, how: str, *, script: Path, seconds: float = 240, **arguments: Any) -> str:
    """Runs the job ``falls``, in which rank 1 of two does, without a launcher that would end the other one first. What rank 0 said; both
    have failed, but for a rank 1 that ``hangs``."""
    (at / "jobs").write_bytes(pickle.dumps({"falls": {"how": how, **arguments}}))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "RANK_TIMEOUT": "15",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(at)], env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        _, said = ranks[0].communicate(timeout=seconds)
        if how != "hangs":
            ranks[1].communicate(timeout=seconds)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode > 0 and ranks[1].returncode != 0
    return said


class Plainly(pickle.Pickler):
    """Pickles plain tensors as their bytes: torch would write an archive for each."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
            return NotImplemented
        flat = value.detach().cpu().contiguous().view(-1)
        return _tensor_of, (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", value.dtype, value.shape)


def _tensor_of(raw: bytes, dtype: Any, shape: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)


def serve(functions: dict[str, Any]) -> None:
    """What a script of jobs does on every rank: runs the jobs of its launch, whose names are among ``functions``."""
    import torch
    import torch.distributed as dist

    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    seconds = float(os.environ.get("RANK_TIMEOUT", "60"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    rank = dist.get_rank()
    for name, arguments in pickle.loads((folder / "jobs").read_bytes()).items():
        failed = False
        try:
            result = functions[name.partition(":")[0]](**arguments)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script that does not catch it
            result, failed = Failed(type(error).__name__, str(error), traceback.format_exc()), True
        with open(folder / f"{name.replace(':', '-')}.{rank}", "wb") as file:
            Plainly(file).dump(result)
        if failed:
            os._exit(1)
    dist.destroy_process_group()
