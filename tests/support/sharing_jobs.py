"""Jobs of ranks that read each other's weights where they lie (see `ranks`)."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import rank_jobs
import torch
import torch.distributed as dist

import infinity
from infinity import native
from infinity.distributed import collectives, shared_homes
from infinity.runtime.registry import wrapped


def _wrap(config: dict, shape: tuple[int, ...] | None = None, names: tuple[str, ...] | None = None) -> tuple[Any, Any]:
    model = rank_jobs.build()
    mesh = rank_jobs.mesh_of(shape, names)
    return infinity.wrap_model(model, rank_jobs.adamw(model), {"params": "host", "optimizer": "host"} | config, mesh=mesh)


def trains(config: dict, clip: float | None = None, parks: str | None = None, **mesh: Any) -> dict[str, Any]:
    """Trains. Tells the weights, how many gathers took which way, and the bytes that came from other ranks."""
    sent, read = mock.Mock(wraps=collectives.all_gather), mock.Mock(wraps=shared_homes.SharedHomes.gather)
    model, optimizer = _wrap(config, **mesh)
    with (
        mock.patch.object(collectives, "all_gather", sent),
        mock.patch.object(shared_homes.SharedHomes, "gather", lambda homes, *given: read(homes, *given)),
    ):
        rank_jobs.train(model, optimizer, steps=2, clip=clip)
        if parks is not None:
            infinity.park(model, parks)
            infinity.resume(model)
        rank_jobs.train(model, optimizer, steps=2, first=2, clip=clip)
    found = {
        "weights": rank_jobs.cloned(model.state_dict()),
        "ways": (sent.call_count, read.call_count),
        "nbytes": infinity.stats(model).as_dict()["collectives"]["all-gather"]["nbytes"],
    }
    infinity.unwrap_model(model, optimizer)
    return found


def refused(how: str, asked: bool) -> dict[str, Any]:
    """One of two ranks cannot read the other's memory, or has other weights in it."""
    patches = {
        "connect": mock.patch.object(native.SharedRow, "connect", side_effect=infinity.StorageError(13, "no entry", "/proc")),
        "kernel": mock.patch.object(shared_homes, "running_kernel", return_value="another one"),
        "weights": mock.patch.object(native.SharedRow, "owns", return_value=False),
    }
    with patches[how] if dist.get_rank() == 1 else mock.MagicMock():
        try:
            model, optimizer = _wrap({"share_homes": True if asked else None})
        except infinity.ConfigError as error:
            return {"said": str(error)}
    engine = wrapped(model).engine
    shares = [engine.collectives.shared_row.shares(shard.weight.region) for unit in engine.units for shard in unit.shards]
    rank_jobs.train(model, optimizer, steps=2)
    weights = rank_jobs.cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    return {"shares": shares, "weights": weights}


def held_back(share: bool) -> dict[str, Any]:
    """The first rank gathers a unit, of which the second has not read its part yet. Tells whether that part may change, then and at the end."""
    model, optimizer = _wrap({"share_homes": share})
    engine, store, key = wrapped(model).engine, dist.distributed_c10d._get_default_store(), f"held back {share}"
    unit = engine.units[0]
    shard = unit.shards[0]
    free: list[bool] = []
    dist.barrier()
    if dist.get_rank() == 1:
        store.wait([key])
    # They meet before a gather that is not agreed on: here neither waits for that.
    with mock.patch.object(type(engine.ranks.data), "rendezvous", lambda *_, **__: torch.zeros(64, dtype=torch.uint8)):
        unit.start_gather(engine.store, engine.ledger)
    if dist.get_rank() == 0:
        time.sleep(0.2)
        ticket = engine.device.ticket([shard.last_read])  # what an update would come behind
        free.append(ticket is None)
        store.set(key, "")
        if ticket is not None:
            ticket.wait()
            free.append(engine.device.ticket([shard.last_read]) is None)
    unit.finish_gather(engine.store)
    unit.release()
    dist.barrier()
    infinity.unwrap_model(model, optimizer)
    return {"free": free}
