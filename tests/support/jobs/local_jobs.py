"""What each rank does in groups that train apart over a slow axis (see `ranks`)."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

from inside import parts_of

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))
import models
import torch
import torch.distributed as dist
from rank_jobs import batch, build, cloned
from ranks import serve, told
from torch import nn

import infinity
from infinity.core.units.kept import KeptArrays
from infinity.ext.local_steps.outer_step import OuterStep

HOST = {"params": "host", "optimizer": "host"}


def mesh_of(shape: tuple[int, int]):
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("slow", "dp"))


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)


def make(
    shape: tuple[int, int],
    config: dict[str, Any] | None = None,
    kind: str = "sgd",
    dtype: torch.dtype = torch.float32,
    **local: Any,
):
    """A wrapped model in groups of ``shape``, its optimizer and LocalSteps. Groups begin with
    other weights, which must not matter."""
    model = build(3 if dist.get_rank() == 0 else 4, dtype)
    mesh = mesh_of(shape)
    model, optimizer = infinity.wrap_model(
        model, optimizer_of(kind, model), config or HOST, mesh=mesh["dp"]
    )
    return model, optimizer, infinity.LocalSteps(model, mesh["slow"], **local)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    number: int,
    *,
    micro: int = 1,
    together: bool = False,
) -> float:
    """A step of ``micro`` micro-batches. ``together``: their gradients are reduced once."""
    with infinity.accumulate(model) if together else contextlib.nullcontext():
        for turn in range(micro):
            loss = models.loss_of(model, batch(number, turn, dist.get_rank())) / micro
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def outer_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's anchors and momenta."""
    outer = parts_of(model).find(OuterStep)
    return {
        f"{kind}.{number}": outer._store.read(array, 0, array.numel)
        for kind, kept in outer.kept.items()
        for number, array in enumerate(map(kept.array_of, kept.flat_params))
    }


def trains(
    steps: int, shape=(2, 1), *, micro: int = 1, together: bool = False, **made: Any
) -> dict[str, Any]:
    """Trains ``steps``, with an average when it is due."""
    model, optimizer, local = make(shape, **made)
    losses, ended = [], []
    for number in range(steps):
        losses.append(step(model, optimizer, number, micro=micro, together=together))
        ended.append(local.after_step())
    stats = infinity.stats(model).as_dict()
    return {
        "losses": losses,
        "ended": ended,
        "group": local.group,
        "period": local.period,
        "weights": cloned(model.state_dict()),
        "outer": outer_values(model),
        "received": stats["collectives"]["slow axis"]["nbytes"],
        "shards": [
            sum(flat.layout.shard_numel for flat in unit.flat_params)
            for unit in parts_of(model).units
        ],
        "swap": models.leftovers(Path(made["config"]["nvme_paths"][0]))
        if (made.get("config") or {}).get("nvme_paths")
        else [],
    }


def data_parallel(
    steps: int,
    shape=(2, 1),
    names=("dp_replicate", "dp_shard"),
    kind: str = "sgd",
    **micro_batches: Any,
) -> dict[str, torch.Tensor]:
    """The weights of one job of all ranks."""
    model = build(3)
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, optimizer = infinity.wrap_model(model, optimizer_of(kind, model), HOST, mesh=mesh)
    for number in range(steps):
        step(model, optimizer, number, **micro_batches)
    return cloned(model.state_dict())


def resumes(
    folder: str,
    steps: int,
    saved_at: int,
    shape=(2, 1),
    wait: bool = True,
    forgets: bool = False,
    **made: Any,
) -> dict[str, Any]:
    """The weights of a run that saves in the middle, and of another one that goes on from there,
    or ``forgets`` its anchors and momentum."""
    ends, path = [], Path(folder)
    for run in ("saves", "loads"):
        model, optimizer, local = make(shape, **made)
        if run == "loads":  # not from where it was made
            step(model, optimizer, 100)
            local.after_step()
            infinity.load_checkpoint(path / str(local.group), model, optimizer)
            if forgets:
                outer = parts_of(model).find(OuterStep)
                outer.restart(outer.position)
        counted = local.steps
        for number in range(counted, steps):
            if run == "saves" and number == saved_at:
                infinity.save_checkpoint(path / str(local.group), model, optimizer, wait=wait)
            step(model, optimizer, number)
            local.after_step()
        ends.append((counted, cloned(model.state_dict()), outer_values(model)))
    return {"counted": [end[0] for end in ends], "ends": ends}


def is_struck(steps: int, at: int, shape=(2, 1), **made: Any) -> dict[str, Any]:
    """One rank is interrupted at the write of a piece of an average, and goes on."""
    write, calls = KeptArrays.write, []

    def struck(self: KeptArrays, piece: Any, parts: Any) -> None:
        calls.append(piece)
        if len(calls) == at:
            raise KeyboardInterrupt
        write(self, piece, parts)

    model, optimizer, local = make(shape, **made)
    if dist.get_rank() == 1:
        KeptArrays.write = struck
    strikes = 0
    try:
        for number in range(steps):
            step(model, optimizer, number)
            try:
                local.after_step()
            except KeyboardInterrupt:
                strikes += 1
    finally:
        KeptArrays.write = write
    return {"weights": cloned(model.state_dict()), "strikes": strikes, "steps": local.steps}


def skewed(steps: int, skewed_from: int, skewed_to: int) -> dict[str, Any]:
    """Periods, one for each step, of groups whose data differ in some of the steps."""
    now = [0]

    def probe(group: int) -> float:
        is_skewed = skewed_from <= now[0] < skewed_to
        return 0.8 if group == local.group or not is_skewed else 0.5

    model, optimizer, local = make((2, 1), every="skew", probe=probe, probe_every=2, kind="sgd")
    periods = []
    for now[0] in range(steps):
        step(model, optimizer, now[0])
        local.after_step()
        periods.append(local.period)
    return {"periods": periods}


def fails(what: str, folder: str = "") -> dict[str, Any]:
    """What is said if one group does something else, and the periods after it."""
    rank = dist.get_rank()
    scores = iter([0.9, None, 0.9, 0.9] if rank == 0 else [0.9, 0.9, math.nan, 0.9])

    def probe(group: int) -> float:
        if (score := next(scores)) is None:
            raise ValueError("no data here")
        return score

    made: dict[str, Any] = {"every": 2, "stream": False}
    if what == "settings":
        return {"said": [told(lambda: make((2, 1), every=2 + rank))]}
    if what == "probe":
        made = {"every": "skew", "probe": probe, "probe_every": 1}
    model, optimizer, local = make((2, 1), **made)
    said, periods = [], []
    for number in range(4 if what == "load" else 2):
        step(model, optimizer, number)
        try:
            local.after_step()
        except (infinity.InfinityError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        periods.append(local.period)
        if what == "load" and number == 0:
            infinity.save_checkpoint(Path(folder) / str(rank), model, optimizer)
        if what == "load" and number == 1 and rank == 1:
            infinity.load_checkpoint(Path(folder) / str(rank), model, optimizer)
        if said and what == "load":
            break
    return {"said": said, "periods": periods, "steps": local.steps}


def goes(made: int) -> list[int]:
    """How many process groups there are after models were dropped with exchanges on their way."""
    counts = []
    for _ in range(made):
        model, optimizer, local = make((2, 1), every=2, delay=1)
        for number in range(2):
            step(model, optimizer, number)
            local.after_step()
        del model, optimizer, local
        gc.collect()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def is_killed(folder: str, steps: int, saved_at: int, **made: Any) -> dict[str, Any]:
    """Goes on from the checkpoint, if there is one. Without, every process is killed after it was
    saved."""
    model, optimizer, local = make((2, 1), **made)
    path = Path(folder) / str(local.group)
    is_second = path.exists()
    if is_second:
        infinity.load_checkpoint(path, model, optimizer)
    for number in range(local.steps, steps):
        if not is_second and number == saved_at:
            infinity.save_checkpoint(path, model, optimizer)
        if not is_second and number == saved_at + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, number)
        local.after_step()
    return {"weights": cloned(model.state_dict())}


def falls(how: str) -> None:
    """One group fails in the middle of a period."""
    model, optimizer, local = make((2, 1), every=3, delay=1)
    for number in range(20):
        if dist.get_rank() == 1 and number == 4:
            raise RuntimeError(how)
        step(model, optimizer, number)
        local.after_step()


if __name__ == "__main__":
    serve(globals())
