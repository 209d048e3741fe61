"""Jobs of ranks that read each other's weights where they lie (see `ranks`)."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import rank_jobs
import torch
import torch.distributed as dist
from inside import parts_of
from opened import left_open, opened
from passed import passed

import infinity
from infinity import native
from infinity.ext.shared_homes import shared_homes
from infinity.ext.versions_2bw import versions
from infinity.ranks import kinds
from infinity.ranks.channel import SyncPoint


def _wrap(
    config: dict, shape: tuple[int, ...] | None = None, names: tuple[str, ...] | None = None
) -> tuple[Any, Any]:
    model = rank_jobs.build()
    mesh = rank_jobs.mesh_of(shape, names)
    return infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "host", "optimizer": "host"} | config, mesh=mesh
    )


def trains(
    config: dict, clip: float | None = None, parks: str | None = None, **mesh: Any
) -> dict[str, Any]:
    """Trains. Tells the weights, how many gathers took which way, and the bytes that came from
    other ranks."""
    sent, read = mock.Mock(wraps=kinds.all_gather), mock.Mock(wraps=shared_homes.SharedHomes.read)
    model, optimizer = _wrap(config, **mesh)
    with (
        mock.patch.object(kinds, "all_gather", sent),
        mock.patch.object(
            shared_homes.SharedHomes, "read", lambda homes, *given: read(homes, *given)
        ),
    ):
        rank_jobs.train(model, optimizer, steps=2, clip=clip)
        if parks is not None:
            infinity.park(model, parks)
            infinity.resume(model)
        rank_jobs.train(model, optimizer, steps=2, first=2, clip=clip)
    found = {
        "weights": rank_jobs.cloned(model.state_dict()),
        "ways": (sent.call_count, read.call_count),
        "nbytes": passed(infinity.stats(model).collectives)["all-gather"],
    }
    infinity.unwrap_model(model, optimizer)
    return found


def refused(how: str, asked: bool) -> dict[str, Any]:
    """One of two ranks cannot read the other's memory, or has other weights in it."""
    patches = {
        "connect": mock.patch.object(
            native.SharedRow, "connect", side_effect=infinity.StorageError(13, "no entry", "/proc")
        ),
        "kernel": mock.patch.object(shared_homes, "running_kernel", return_value="another one"),
        "weights": mock.patch.object(native.SharedRow, "owns", return_value=False),
        "file": mock.patch.object(
            native, "SharedRow", side_effect=infinity.StorageError(24, "too many files", "")
        ),
        "room": mock.patch.object(
            native.SharedRow, "allocate", side_effect=infinity.StorageError(12, "no room", "")
        ),
    }
    with patches[how] if dist.get_rank() == 1 else mock.MagicMock():
        try:
            model, optimizer = _wrap({"share_homes": True if asked else None})
        except infinity.ConfigError as error:
            return {"said": str(error)}
    engine = parts_of(model).engine
    rank_jobs.train(model, optimizer, steps=2)
    weights = rank_jobs.cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    return {
        "shares": parts_of(engine).ranks.shard_group.peer_memory is not None,
        "weights": weights,
    }


def partly() -> dict[str, Any]:
    """One of two ranks has its first weights elsewhere; the second ones are kept beside older ones
    for a while."""
    regions: list[native.Region] = []
    owns = native.SharedRow.owns

    def only_later(row: native.SharedRow, region: native.Region) -> bool:
        regions.append(region)
        return region is not regions[0] and owns(row, region)

    with (
        mock.patch.object(native.SharedRow, "owns", only_later)
        if dist.get_rank() == 1
        else mock.MagicMock()
    ):
        model, optimizer = _wrap({})
    engine = parts_of(model).engine
    flat_params = [flat for unit in parts_of(engine).units for flat in unit.flat_params]

    def read() -> list[bool]:
        return [
            parts_of(engine).ranks.shard_group.peer_memory.have(flat.homes.weight_regions)
            for flat in flat_params
        ]

    shared = [read()]
    versions.add_slot(flat_params[1].homes, parts_of(engine).store, 0, "a unit")
    shared.append(read())
    versions.drop_slot(flat_params[1].homes, parts_of(engine).store, 0)
    shared.append(read())
    rank_jobs.train(model, optimizer, steps=2)
    weights = rank_jobs.cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    return {"shared": shared, "weights": weights}


def left() -> dict[str, Any]:
    """Wraps, trains and unwraps without the garbage collector: what is open, and mapped, of the
    memory that ranks share."""

    def found() -> tuple[int, int]:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum("infinity-weights" in link for link in links), Path(
            "/proc/self/maps"
        ).read_text().count("infinity-weights")

    gc.collect()
    gc.disable()
    before = opened()
    try:
        model, optimizer = _wrap({})
        rank_jobs.train(model, optimizer, steps=2)
        wrapped_now = found()
        plain, _ = infinity.unwrap_model(model, optimizer)
        after, more = found(), left_open(before)
    finally:
        gc.enable()
    dist.barrier()
    works = torch.isfinite(next(plain.parameters())).all().item()
    return {
        "wrapped": wrapped_now,
        "after": after,
        "works": works,
        "more": list(more),
    }


def dropped(*, fault: bool = False) -> int:
    """Counts the mappings of shared weights that are left of models which were trained and dropped
    without an unwrap, after a step, a state dict and an error. ``fault``: sync points keep what
    they were to do."""

    def mappings() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("infinity-weights")

    def raises(*_: Any) -> None:
        raise ValueError("the user's own")

    def end(point: SyncPoint, message: torch.Tensor) -> None:
        point._result = message
        kept.append(weakref.ref(point))

    def use(after: str) -> None:
        model, optimizer = _wrap({})
        rank_jobs.train(model, optimizer, steps=1)
        if after == "a state dict":
            model.state_dict()
        if after == "an error":
            handle = optimizer.register_step_pre_hook(raises)
            with contextlib.suppress(ValueError):
                rank_jobs.train(model, optimizer, steps=1)
            handle.remove()

    kept: list[weakref.ref[SyncPoint]] = []
    before = mappings()
    with mock.patch.object(SyncPoint, "_end", end) if fault else contextlib.nullcontext():
        for after in ("a step", "a state dict", "an error"):
            use(after)
    left = mappings() - before
    for point in filter(None, (ref() for ref in kept)):
        point._then = None  # the next job has this process, too
    return left


def struck() -> dict[str, Any]:
    """Ctrl-C strikes the first rank as a reading has begun that the other comes to late: who drops
    the unit waits for it."""
    model, optimizer = _wrap({})
    engine, store = parts_of(model).engine, dist.distributed_c10d._get_default_store()
    unit, homes, read = (
        parts_of(engine).units[0],
        parts_of(engine).ranks.shard_group.peer_memory,
        shared_homes.SharedHomes.read,
    )
    seen: list[int] = []

    def strike(*given: Any) -> None:
        read(*given)
        seen.append(len(homes.under_way()))
        store.set("struck", "")
        raise KeyboardInterrupt

    dist.barrier()
    with mock.patch.object(
        type(parts_of(engine).ranks.dp_group),
        "start_sync",
        lambda *_, **__: mock.Mock(wait=lambda: torch.zeros(64, dtype=torch.uint8)),
    ):
        if dist.get_rank() == 0:
            with (
                mock.patch.object(shared_homes.SharedHomes, "read", strike),
                contextlib.suppress(KeyboardInterrupt),
            ):
                unit.start_gather(parts_of(engine).store, parts_of(engine).ledger)
            seen.append(len(homes.under_way()))
        else:
            store.wait(["struck"])
            time.sleep(0.3)
            unit.start_gather(parts_of(engine).store, parts_of(engine).ledger)
            unit.finish_gather(parts_of(engine).store)
            unit.release()
    dist.barrier()
    engine.shut_down()
    return {"seen": seen}


def held_back(share: bool) -> dict[str, Any]:
    """The first rank gathers a unit, of which the second has not read its part yet. Tells whether
    that part may change, then and at the end."""
    model, optimizer = _wrap({"share_homes": share})
    engine, store, key = (
        parts_of(model).engine,
        dist.distributed_c10d._get_default_store(),
        f"held back {share}",
    )
    unit = parts_of(engine).units[0]
    flat_param = unit.flat_params[0]
    free: list[bool] = []
    dist.barrier()
    if dist.get_rank() == 1:
        store.wait([key])
    # They meet before a gather that is not agreed on: here neither waits for that.
    with mock.patch.object(
        type(parts_of(engine).ranks.dp_group),
        "start_sync",
        lambda *_, **__: mock.Mock(wait=lambda: torch.zeros(64, dtype=torch.uint8)),
    ):
        unit.start_gather(parts_of(engine).store, parts_of(engine).ledger)
    if dist.get_rank() == 0:
        time.sleep(0.2)
        # What an update would come behind
        ticket = engine.device.ticket(flat_param.homes.draft().events)
        free.append(ticket is None)
        store.set(key, "")
        if ticket is not None:
            ticket.wait()
            free.append(engine.device.ticket(flat_param.homes.draft().events) is None)
    unit.finish_gather(parts_of(engine).store)
    unit.release()
    dist.barrier()
    infinity.unwrap_model(model, optimizer)
    return {"free": free}
