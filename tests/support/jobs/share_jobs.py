"""Jobs of ranks that divide a batch by infinity.Shares (see `ranks`).

**pace**: see `infinity.ext.shares.paces`; jobs make up each rank's, in place of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import models
import parallel_jobs
import torch
import torch.distributed as dist
from decoder import decoder
from inside import parts_of
from rank_jobs import build, cloned, mesh_of
from ranks import told
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import infinity
from infinity.ext.shares.pace import Pace

HOST = {"params": "host", "optimizer": "host"}
BATCH, UNEVEN = 12, {2: [9, 3], 4: [6, 3, 2, 1]}  # shares by the number of data ranks


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch_of(step: int, count: int = BATCH) -> torch.Tensor:
    """The whole batch of a step, equal on all ranks."""
    return models.tokens(7000 + step, count)


def made(config: dict, mesh: Any = None) -> tuple[nn.Module, Any]:
    model = build()
    return infinity.wrap_model(model, sgd(model), config, mesh=mesh)


def step(
    model: nn.Module, optimizer: Any, x: torch.Tensor, *, clip: float | None = None, micro: int = 1
) -> torch.Tensor:
    """One step of this rank's part ``x``, in so many parts of one mean. Returns the mean."""
    total = torch.zeros(())
    for part in x.chunk(micro):
        loss = models.loss_of(model, part) * (len(part) / len(x))
        loss.backward()
        total += loss.detach()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


def of_all(loss: torch.Tensor, count: int) -> float:
    """The mean over the batch, of each rank's over its ``count`` samples."""
    total = loss * (count / BATCH)
    dist.all_reduce(total)
    return total.item()


@contextmanager
def at_pace(pace: Callable[[], float]) -> Iterator[None]:
    """Lets steps take as long as ``pace`` says."""
    with mock.patch.object(Pace, "take", lambda self: pace()):
        yield


# --- jobs ---


def uneven(
    config: dict,
    clip: float | None = None,
    micro: int = 1,
    block: bool = False,
    shares: bool = True,
    shape: Any = None,
    names: Any = None,
) -> dict[str, Any]:
    """Three steps with uneven shares, or with even ones. ``block``: micro-batches in accumulate.
    ``shares``: False leaves the weights out."""
    mesh = mesh_of(shape, names)
    model, optimizer = made(config, mesh)
    made_shares = infinity.Shares(batch=BATCH)
    data_ranks = parts_of(model).ranks.data_size
    made_shares.load_state_dict({"shares": UNEVEN[data_ranks]})
    if not shares:
        parts_of(model).collectives.weigh_by(None)
    losses, part = [], made_shares.slice
    for number in range(3):
        x = batch_of(number)[part]
        if block:
            with infinity.accumulate(model):
                for each in x.chunk(micro):
                    (models.loss_of(model, each) * (len(each) / len(x))).backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        losses.append(of_all(step(model, optimizer, x, clip=clip, micro=micro), len(x)))
    return {"losses": losses, "slice": part, "weights": cloned(model.state_dict())}


def followed(config: dict) -> dict[str, Any]:
    """Rank 1 takes twice as long, then rank 0 does, from step 25 on. Each step's loss and
    shares."""
    model, optimizer = made(config)
    shares, rank = infinity.Shares(batch=BATCH), dist.get_rank()
    losses, counts = [], []
    for number in range(42):
        slow = 1 if number < 25 else 0
        x = batch_of(number)[shares.slice]
        losses.append(of_all(step(model, optimizer, x), len(x)))
        counts.append(len(x))
        with at_pace(lambda: len(x) * (2.0 if rank == slow else 1.0)):
            changed = shares.after_step()
        assert changed == (len(batch_of(number)[shares.slice]) != counts[-1])
    return {"losses": losses, "counts": counts, "weights": cloned(model.state_dict())}


def slow() -> dict[str, Any]:
    """Rank 1 takes ten times as long. Shares are chosen every second step."""
    model, optimizer = made(HOST)
    shares, counts, losses = infinity.Shares(batch=BATCH), [], []
    pace = 10.0 if dist.get_rank() == 1 else 1.0
    for number in range(4):
        x = batch_of(number)[shares.slice]
        losses.append(of_all(step(model, optimizer, x), len(x)))
        counts.append(len(x))
        with (
            at_pace(lambda: len(x) * pace),
            mock.patch("infinity.ext.shares.paces.EVERY_STEPS", 2),
        ):
            shares.after_step()
    return {"counts": counts, "losses": losses, "weights": cloned(model.state_dict())}


def of_tokens() -> dict[str, Any]:
    """Three steps of a row of 100 tokens, each of which has its own loss; without weights; and by
    one process."""

    def net() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Embedding(50, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 50))

    def train(model: nn.Module, optimizer: Any, part: slice) -> dict[str, torch.Tensor]:
        for number in range(3):
            row = torch.randint(0, 50, (101,), generator=torch.Generator().manual_seed(number))
            logits = model(row[None, :-1][:, part])
            nn.functional.cross_entropy(logits[0], row[1:][part]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return cloned(model.state_dict())

    plain, found = net(), {}
    found["one process"] = train(plain, sgd(plain), slice(None))
    for name in ("weights", "unweighed"):
        model = net()
        model, optimizer = infinity.wrap_model(model, sgd(model), HOST)
        shares = infinity.Shares(tokens=100)
        shares.load_state_dict({"shares": [75, 25]})
        found["slice"] = part = shares.slice
        if name == "unweighed":
            del shares
        found[name] = train(model, optimizer, part)
        infinity.unwrap_model(model, optimizer)
    return found


def measured() -> dict[str, Any]:
    """Rank 1's blocks sleep for each of their samples: shares by the clock, after 20 steps."""
    model, optimizer = made(HOST)
    shares = infinity.Shares(batch=BATCH)

    def sleep(module: nn.Module, args: tuple) -> None:
        time.sleep(4e-3 * len(args[0]) * dist.get_rank())

    for block in model.blocks:
        block.feed.register_forward_pre_hook(sleep)
    for number in range(20):
        step(model, optimizer, batch_of(number)[shares.slice])
        shares.after_step()
    return {"shares": shares.state_dict()["shares"], "slice": shares.slice}


def of_order() -> dict[str, Any]:
    """The samples that each rank has of an Order's batches, which it takes whole."""
    model, _ = made(HOST)
    shares = infinity.Shares(batch=BATCH)
    shares.load_state_dict({"shares": UNEVEN[2]})
    order = infinity.data.Order(48, batch_size=BATCH, seed=3, rank=0, ranks=1)
    batches = [order.batch(number) for number in range(6)]
    return {"batches": [list(each) for each in batches], "own": [b[shares.slice] for b in batches]}


def resumed(path: str, config: dict) -> dict[str, Any]:
    """Saved by Checkpoints with shares of 8 and 4, and resumed by another model."""
    folder, found = Path(path), {}
    model, optimizer = made(config)
    shares = infinity.Shares(batch=BATCH)
    saver = infinity.Checkpoints(folder, model, optimizer, extra=shares.state_dict)
    assert saver.resume().extra is None
    shares.load_state_dict({"shares": [8, 4]})
    step(model, optimizer, batch_of(0)[shares.slice])
    shares.after_step()
    saver.after_step()
    saver.close()
    found["before"] = shares.slice
    del shares
    infinity.unwrap_model(model, optimizer)
    model, optimizer = made(config)
    shares = infinity.Shares(batch=2 * BATCH)
    saver = infinity.Checkpoints(folder, model, optimizer, extra=shares.state_dict)
    found["new"] = shares.slice
    shares.load_state_dict(saver.resume().extra)
    found["twice"] = shares.slice  # of twice the batch
    shares = infinity.Shares(batch=BATCH)
    shares.load_state_dict(infinity.load_checkpoint(folder, model, optimizer)["extra"])
    found["after"] = shares.slice
    saver.close()
    return found


def refused() -> dict[str, str]:
    """What is said to batches that these ranks cannot share, and to ranks that are given others."""
    model, _ = made(HOST)
    rank, said = dist.get_rank(), {}
    said["few"] = told(lambda: infinity.Shares(batch=1))
    said["others"] = told(lambda: infinity.Shares(batch=BATCH + rank))
    said["mixed"] = told(lambda: infinity.Shares(**{"batch" if rank else "tokens": BATCH}))
    shares = infinity.Shares(batch=BATCH)
    given = {"shares": [8 - rank, 4 + rank]}
    said["states"] = told(lambda: shares.load_state_dict(given))
    said["even"] = str(shares.slice)
    return said


def refused_axis(axis: str) -> str:
    model, _ = made(HOST, mesh_of((1, 2), ("dp", axis)))
    return told(lambda: infinity.Shares(batch=BATCH))


def on_other_shares() -> dict[str, Any]:
    """Rank 0 has taken other shares than rank 1, as if rank 1 had been interrupted before that."""
    model, optimizer = made(HOST)
    before, shares = cloned(model.state_dict()), infinity.Shares(batch=BATCH)
    if dist.get_rank() == 0:
        shares._split.take([1.0, 2.0])

    def forward() -> None:
        step(model, optimizer, batch_of(0)[shares.slice])

    said = told(forward)
    shares = infinity.Shares(batch=BATCH)
    again = told(forward)
    return {
        "said": said,
        "again": again,
        "changed": bool(models.differing(before, cloned(model.state_dict()))),
        "weights": cloned(model.state_dict()),
    }


def over_tensors() -> dict[str, Any]:
    """Two data ranks of two tensor-parallel ranks each, one of which is slow: the last. Shares are
    chosen every second step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel_jobs.parallel(decoder(), mesh["tp"], "columns and rows")
    model, optimizer = infinity.wrap_model(model, sgd(model), HOST, mesh=mesh)
    shares, counts = infinity.Shares(batch=BATCH), []
    for number in range(4):
        x = batch_of(number)[shares.slice]
        parallel_jobs.loss_of(model, x, "columns and rows").backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(x))
        pace = 2.0 if dist.get_rank() == 3 else 1.0
        with (
            at_pace(lambda: len(x) * pace),
            mock.patch("infinity.ext.shares.paces.EVERY_STEPS", 2),
        ):
            shares.after_step()
    return {"counts": counts, "weights": parallel_jobs.whole(model.state_dict())}
