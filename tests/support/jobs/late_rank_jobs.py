"""Jobs of ranks on the late device (see `ranks`, `late_jobs`). Their collectives are jobs of
streams, as those of NCCL are."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

sys.path += [str(folder) for folder in Path(__file__).resolve().parents[1].glob("*/")]

import late_device
import late_jobs
import torch
import torch.distributed as dist
from ranks import serve
from torch import nn

import infinity
from infinity.ranks.bulk import Bulk
from infinity.ranks.channel import Channel


def batch_of_rank(count: int):
    """Batches of this rank's own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        yield torch.randint(0, late_jobs.VOCABULARY, (4, 32), generator=generator)


late_jobs.batches = batch_of_rank


def shared(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Three samples of each batch of four on the first rank. The device has timed the forwards."""
    shares, told = infinity.Shares(batch=4, model=model), []
    shares.load_state_dict({"shares": [3, 1]})
    for ids in batch_of_rank(late_jobs.STEPS):
        loss = late_jobs.loss_of(model, ids[shares.slice])
        loss.backward()
        late_jobs.step(optimizer)
        told.append(loss.detach())
    assert shares._pace.take() > 0
    shares.after_step()
    return told


late_jobs.WAYS["shared"] = shared


def late_runs(way: str, config: dict[str, Any]) -> list[bool]:
    """Tells which late runs have the bits of the punctual one."""
    return late_jobs.compared(late_jobs.WAYS[way], config)


def host_is_ahead(config: dict[str, Any]) -> list[bool]:
    """Tells whether the host went on while a gather ran, and whether all were over where passes
    ended."""
    running, left, note, wait = [], [], Bulk._note_ordered, Bulk.wait_for_ordered

    def noted(bulk: Bulk, pending: Any) -> None:
        running.append(not pending.is_over)
        note(bulk, pending)

    def waited(bulk: Bulk) -> None:
        wait(bulk)
        left.append(len(bulk._ordered))

    Bulk._note_ordered, Bulk.wait_for_ordered = noted, waited
    try:
        with late_device.delayed(late_jobs.LATE):
            late_jobs.trained(late_jobs.WAYS["plain"], config)
    finally:
        Bulk._note_ordered, Bulk.wait_for_ordered = note, wait
    return [any(running), bool(left) and not any(left)]


READS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x[0, 0].tolist(),
    "nonzero": lambda x: (x > 1).nonzero(),
    "copy": lambda x: x.cpu(),
    "nothing": lambda x: None,
}


def one_raises(reads: str, *, in_backward: bool = False, fault: bool = False) -> dict[str, Any]:
    """Rank 1 raises in a block while the others read a value in each block, and goes on. What both
    raised until all trained again, whether their weights are equal, and how many collectives were
    aborted. ``fault``: nobody listens."""
    rank, said, before = dist.get_rank(), [], late_jobs.LATE.counts()["aborts"]
    with tempfile.TemporaryDirectory() as folder, late_device.delayed(late_jobs.LATE):
        with mock.patch.object(late_jobs, "BLOCKS", 8):  # more than are gathered ahead
            model, optimizer = late_jobs.made()

        def read(_: Any, __: Any, out: torch.Tensor) -> None:
            READS[reads](out)

        for block in model.blocks:
            block.register_forward_hook(read)
        if fault:
            Channel.listen = lambda *_: None
        config = {**late_jobs.NVME, "device": late_jobs.WHERE, "nvme_paths": [folder]}
        model, optimizer = infinity.wrap_model(model, optimizer, config)

        def one_step(ids: torch.Tensor) -> None:
            loss = late_jobs.loss_of(model, ids)
            loss.backward()
            late_jobs.step(optimizer)

        def raises(*_: Any) -> None:
            raise ValueError("the user's own")

        steps, given, failing = 0, list(batch_of_rank(5)), rank == 1
        while steps < len(given) and len(said) < 8:
            block, handle = model.blocks[-2 if in_backward else 1], None
            if steps == 2 and failing:
                handle = (
                    block.register_full_backward_hook(raises)
                    if in_backward
                    else block.register_forward_pre_hook(raises)
                )
                failing = False
            try:
                one_step(given[steps])
                steps += 1
            except (infinity.InfinityError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
                optimizer.zero_grad()
            if handle is not None:
                handle.remove()
        weights = torch.cat([value.float().flatten() for value in model.state_dict().values()])
        infinity.unwrap_model(model, optimizer)
    listening = [each.name for each in threading.enumerate() if "listener" in each.name]
    return {
        "said": said,
        "steps": steps,
        "weights": weights.cpu(),
        "aborts": late_jobs.LATE.counts()["aborts"] - before,
        "listening": listening,
    }


def chosen_alone(rooms: list[float], micro: int = 1) -> dict[str, Any]:
    """Tells whether two late ranks that may recompute have the losses of those inside torch's
    checkpoint, whether no more was taken than there is, and what was done with the blocks.
    ``rooms``: of each rank's card, in what torch's checkpoint takes."""
    how, whole = {"micro": micro}, late_jobs.TIGHT | {"device_memory": "4MiB"}  # no tiles
    with mock.patch("infinity.core.machine.card_memory.NCCL_NBYTES", 0):
        right, taken, _ = late_jobs.in_tight_room("wide", whole, 0, checkpoints=True, **how)
        config = {**whole, "activations": "auto", "recompute": True}
        room = int(rooms[dist.get_rank()] * taken)
        with late_device.delayed(late_jobs.LATE):
            found, peak, blocks = late_jobs.in_tight_room("wide", config, room, **how)
    return {"same": found == right, "fits": peak <= room, "blocks": blocks}


def aborted_by_a_limit() -> list[str]:
    """A wait with a limit, behind a rank that comes late: the twin of polls."""
    group = dist.new_group([0, 1], backend="late", timeout=timedelta(seconds=30))
    limit = group._get_backend(torch.device(late_jobs.WHERE)).options._timeout
    whole, mine = torch.zeros(2, device=late_jobs.WHERE), torch.ones(1, device=late_jobs.WHERE)
    if dist.get_rank():
        time.sleep(1.5)
    work = dist.all_gather_into_tensor(whole, mine, group=group, async_op=True)
    said = [str(limit)]
    for _ in range(2):
        try:
            work.wait(timedelta(milliseconds=100 if dist.get_rank() == 0 else 30000))
            said.append("over")
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    return said


def without_order() -> list[bool]:
    """The same, if gradients are sent before they are computed."""
    return late_jobs.JOBS["fault:gradients are sent before they are computed"]()


if __name__ == "__main__":
    serve(globals())
