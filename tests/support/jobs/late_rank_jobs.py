"""Jobs of ranks on the late device (see `ranks`, `late_jobs`). Their collectives are jobs of
streams, as those of NCCL are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path += [str(folder) for folder in Path(__file__).resolve().parents[1].glob("*/")]

import late_device
import late_jobs
import torch
import torch.distributed as dist
from ranks import serve
from torch import nn

import infinity
from infinity.distributed.bulk import Bulk


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


def without_order() -> list[bool]:
    """The same, if gradients are sent before they are computed."""
    return late_jobs.JOBS["fault:gradients are sent before they are computed"]()


if __name__ == "__main__":
    serve(globals())
