"""headline: the loops whose speed a change of the core must keep, each in a process of its own.

The process prepares its job and prints "ready". For each line on standard input it takes a turn and
prints its seconds and processor seconds as JSON; it ends with its input. `bench.against` runs it by
its path with the package of any commit: it uses what `import infinity` has, and of the inside only
what it says below.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Turn = Callable[[], tuple[float, float]]  # wall and processor seconds
Job = Callable[[str, float], contextlib.AbstractContextManager[Turn]]
MIB = 1024 * 1024
STEPS = 2  # of a turn


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the wall and processor seconds of ``work``."""
    cpu, start = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


def make(blocks: int, width: int) -> Any:
    """Makes a chain of residual blocks, each of them a unit."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.a(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    return Net()


def wrapped(model: Any, home: str, folder: str) -> tuple[Any, Any]:
    """Wraps a model with AdamW and all state at one home."""
    import torch

    import infinity

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = infinity.Config(params=home, optimizer=home, nvme_paths=[folder])
    return infinity.wrap_model(model, optimizer, config)


def settle(model: Any) -> None:
    """Waits for the updates that the last step has left for later: they are its own time. The
    engine is looked for in the model's record, whatever its name is."""
    for record in list(vars(model).values()):
        if (engine := getattr(record, "engine", None)) is not None:
            engine.wait_idle()


def step(blocks: int, width: int, home: str) -> Job:
    """Makes the job of training steps; a turn ends when all updates are at home."""

    @contextlib.contextmanager
    def job(folder: str, scale: float) -> Iterator[Turn]:
        import torch

        import infinity

        few = max(2, round(blocks * scale))
        model, optimizer = wrapped(make(few, width), home, folder)
        x = torch.randn(4, width)

        def steps() -> None:
            for _ in range(STEPS):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            settle(model)

        yield lambda: timed(steps)
        infinity.unwrap_model(model, optimizer)

    return job


@contextlib.contextmanager
def zero3(folder: str, scale: float) -> Iterator[Turn]:
    """Makes steps of two ranks over gloo. The first starts the second and tells it of each turn."""
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    other = None
    if rank == 0:
        command = [sys.executable, "-P", __file__, "zero3", folder, str(scale)]
        other = subprocess.Popen(
            command, env=os.environ | {"RANK": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    with step(12, 512, "host")(folder, scale) as turn:

        def both() -> tuple[float, float]:
            if other is not None and other.stdin is not None:
                other.stdin.write(b"\n")
                other.stdin.flush()
            dist.barrier()
            return turn()

        yield both
        if other is not None and other.stdin is not None:
            other.stdin.close()
    dist.destroy_process_group()
    if other is not None:
        other.wait(timeout=60)


@contextlib.contextmanager
def disk(folder: str, scale: float) -> Iterator[Turn]:
    """Makes transfers of the native engine: a file is written, then read."""
    from infinity import native

    nbytes, piece = max(1, round(64 * scale)) * 4 * MIB, 4 * MIB
    engine = native.make_io_engine()
    extent = native.Extent.in_file(engine.create_file(f"{folder}/disk", nbytes), 0, nbytes)
    memory = native.Region(8 * piece, True, 1)
    engine.register([memory])

    def move(way: Callable[..., Any]) -> None:
        pending: list[Any] = []
        for turn, offset in enumerate(range(0, nbytes, piece)):
            if len(pending) == 8:
                pending.pop(0).wait()
            pending.append(way(extent, offset, memory.address + turn % 8 * piece, piece))
        for ticket in pending:
            ticket.wait()

    def both() -> None:
        move(engine.write)
        move(engine.read)

    yield lambda: timed(both)


@contextlib.contextmanager
def update(folder: str, scale: float) -> Iterator[Turn]:
    """Makes optimizer steps over NVMe, by the benchmark `update` of the tree that is measured."""
    from bench.update import Step
    from infinity import native

    count = max(1, round(8 * MIB * scale / native.CHECKSUM_NBYTES)) * native.CHECKSUM_NBYTES
    one = Step(folder, count, 1, in_memory=False)
    yield lambda: timed(lambda: one.step(one.disk))


def checkpoint(way: str) -> Job:
    """Makes the job of saves or loads of state that is at home on the host."""

    @contextlib.contextmanager
    def job(folder: str, scale: float) -> Iterator[Turn]:
        import torch

        import infinity

        model, optimizer = wrapped(make(max(2, round(8 * scale)), 1024), "host", folder)
        model(torch.randn(4, 1024)).square().mean().backward()
        optimizer.step()
        saved = f"{folder}/checkpoint"
        infinity.save_checkpoint(saved, model, optimizer)
        work = {"save": infinity.save_checkpoint, "load": infinity.load_checkpoint}[way]
        yield lambda: timed(lambda: work(saved, model, optimizer))
        infinity.unwrap_model(model, optimizer)

    return job


@contextlib.contextmanager
def imported(folder: str, scale: float) -> Iterator[Turn]:
    """Imports the package; torch is there before. A process has one such turn."""
    import torch  # noqa: F401

    def work() -> None:
        import infinity

        _ = infinity.wrap_model, infinity.Config

    yield lambda: timed(work)


@contextlib.contextmanager
def wrap(folder: str, scale: float) -> Iterator[Turn]:
    """Makes wraps of a new model of many small blocks each."""
    import infinity

    blocks = max(2, round(400 * scale))

    def turn() -> tuple[float, float]:
        model = make(blocks, 16)
        found: list[Any] = []
        times = timed(lambda: found.extend(wrapped(model, "host", folder)))
        infinity.unwrap_model(*found)
        return times

    yield turn


JOBS: dict[str, Job] = {
    "import": imported,
    "wrap": wrap,
    "tiny400": step(400, 16, "host"),
    **{f"step50M.{home}": step(24, 1448, home) for home in ("device", "host", "nvme")},
    **{f"step134M.{home}": step(16, 2896, home) for home in ("device", "host", "nvme")},
    "zero3": zero3,
    "disk": disk,
    "update": update,
    "save": checkpoint("save"),
    "load": checkpoint("load"),
}
ONCE = ("import",)  # one turn of a process


def main(name: str, folder: str, scale: float, end: Callable[[], object] = lambda: None) -> None:
    """Runs turns of a job as they are asked for, then ``end``, before anything is taken down."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    Path(folder).mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(sys.stderr), JOBS[name](folder, scale) as turn:
        print("ready", file=answers, flush=True)
        for _ in sys.stdin:
            seconds, cpu = turn()
            print(json.dumps({"seconds": seconds, "cpu": cpu}), file=answers, flush=True)
        end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), end=lambda: os._exit(0))
