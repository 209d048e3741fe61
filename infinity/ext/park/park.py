"""park and resume: free the memory of a wrapped model for a while."""

from __future__ import annotations

import gc
import os

import torch
from torch import nn

from ...core.machine import scratch
from ...core.machine.tiers import Tier
from ...core.run.engine import Engine
from ...core.run.job import Job
from ...core.run.operations import IDLE, Call, OperationKind, Right
from ...core.run.recovery import is_interrupted
from ...core.run.registry import engine_of
from ...core.run.tasks import drop_failed
from ...errors import ConfigError, UsageError
from ...files.outputs import folder_of
from ..checkpoint.save import would_be_lost
from .parking import Parking, arrays_in_memory, give_back_heap

PARTS = {"all": {}, "weights": {"optimizer": False}, "optimizer": {"weights": False}}


class ParkOperation(OperationKind):
    """The call that parks."""

    PARK = Call("park", IDLE - {Right.OWN_WEIGHTS})


@torch.no_grad()
def park(
    model: nn.Module,
    folder: str | os.PathLike | None = None,
    *,
    to: str = "nvme",
    what: str = "all",
) -> int:
    """Moves state of a wrapped ``model`` and its optimizer out of memory, and frees that memory:
    for a rollout between two updates, for example. Staging buffers, the optimizer's slots and the
    model's buffers stay. Blocks until the state has arrived.

    folder
        Folder of the swap file; None: the first of ``nvme_paths``, or without any a scratch folder
        on a disk, as ``nvme_paths="auto"`` finds it.
    to
        "nvme": all that is on the device and in host memory goes to a disk. "host": what is on the
        device goes to registered host memory, at the rate of the link. It counts in
        ``host_memory``, and a second call can send it on to a disk.
    what
        "all", "weights", or "optimizer": master weights, moments and gradients. Weights that a view
        or an array outside of the engine holds cannot be parked.

    The next use of the model or its optimizer brings all state back, or :func:`resume` does: what
    does not fit then stays parked, and CapacityError is raised. No bit changes. Returns the number
    of bytes that are parked. Each rank parks its own state.

    Raises UsageError between a backward and its step, and for ``to="host"`` if the device's memory
    is the host's; ConfigError for unknown words and without a folder, CapacityError if the disk or
    the host has no room, StorageError if no file can be made there. The model stays usable after
    each of them.
    """
    engine = engine_of(model)
    where, job = _checked(engine.job, folder, to, what), engine.job

    def stays() -> bool:  # a use would bring it back
        parking = job.find(Parking)
        is_parked = parking is not None and parking.nbytes > 0
        return is_parked and not is_interrupted(job) and not job.uses.is_halted

    if not stays():
        job.uses.check(ParkOperation.PARK)
    with job.uses.begin(unless=stays):
        return _park(engine, job, where, what)


def _park(engine: Engine, job: Job, folder: str | None, what: str) -> int:
    """Parks on the host, or in ``folder``, and returns the bytes that are parked."""
    parking = job.find(Parking) or job.add(Parking(job.store))
    if not parking.nbytes:
        job.uses.check(ParkOperation.PARK)  # another thread may have used it meanwhile
        _settle(engine, job)
    if what != "optimizer":
        _refuse_held(job)
    arrays, blank = arrays_in_memory(job.units, **PARTS[what])
    # Not guarded: a folder that refuses a swap file has lost no data. Its writes are guarded.
    if folder is None:
        parking.park_on_host(arrays)
        blank = [array for array in blank if array.tier is Tier.DEVICE]
    else:
        parking.park(arrays, folder)
    parking.park_blank(blank)
    give_back_heap()
    return parking.nbytes


def _checked(job: Job, folder: str | os.PathLike | None, to: str, what: str) -> str | None:
    """Returns the folder to park in; None for host memory."""
    if to not in ("nvme", "host") or not isinstance(what, str) or what not in PARTS:
        raise ConfigError(
            f"park(to={to!r}, what={what!r}): to is 'nvme' or 'host', and what is one of"
            f" {', '.join(map(repr, PARTS))}"
        )
    if to == "host":
        if folder is not None:
            raise ConfigError("park(to='host') needs no folder: leave it out, or use to='nvme'")
        memory = job.device.memory
        if job.device.is_host or (memory is not None and memory.is_unified):
            raise UsageError(
                f"park(to='host') would free nothing: the memory of the device {job.device.where}"
                " is the host's. Park to a disk: infinity.park(model, '/path/on/the/disk')"
            )
        return None
    if folder is not None:
        return os.path.abspath(folder_of(folder, "park's folder"))
    return job.config.nvme_paths[0] if job.config.nvme_paths else _scratch_folder(job)


def _scratch_folder(job: Job) -> str:
    """Returns a folder on a disk of this machine. Raises ConfigError if none can be used."""
    disks = scratch.candidates()
    plan = job.planned.plan
    chosen = scratch.choose(disks, sum(map(plan.planned_nbytes, (Tier.DEVICE, Tier.HOST))))
    if chosen is None:
        raise ConfigError(
            f"park needs a folder on a disk, and none of {', '.join(map(str, disks))} can be used."
            " Name one: infinity.park(model, '/path/on/the/disk') or Config(nvme_paths=[...])"
        )
    return chosen.folder


def _settle(engine: Engine, job: Job) -> None:
    """Ends all that is under way. Raises UsageError if gradients need the memory."""
    job.gradients.assigned.settle_all()
    if landed := [handle.name for handle in job.trained if would_be_lost(handle)]:
        raise UsageError(
            f"park between backward and step: {len(landed)} gradients ({landed[0]}, ...) wait"
            " for it. Park after step()"
        )
    engine.finish_background()
    with job.store.guard:
        engine.wait_idle()
        job.prefetcher.release_all([unit for unit in job.units if not unit.computes_at_home])
        for unit in job.units:
            for flat_param in unit.flat_params:
                flat_param.homes.wait_idle()


def _refuse_held(job: Job) -> None:
    """Raises UsageError if an object outside the engine refers to weights at home on the device: it
    would read other bytes."""

    def held() -> list[str]:
        return [
            unit.name
            for unit in job.units
            if unit.computes_at_home and any(buffer.finds_holder() for buffer in unit.buffers.all)
        ]

    if held():
        drop_failed()  # of a backward that failed before the engine knew of it
        gc.collect()
    if names := held():
        raise UsageError(
            f"park: something outside of the engine holds the memory of {len(names)} units"
            f" ({names[0]}, ...): an array of NumPy, an export by DLPack, a view of a weight that"
            " was made in a forward, or the graph of a loss that is kept, also by an exception."
            " Drop it, or keep a copy: weight.detach().clone(), loss.detach()."
        )


def resume(model: nn.Module) -> None:
    """Reads back the state that :func:`park` wrote. Optional: the next use of the model does the
    same. No-op if the model is not parked."""
    with engine_of(model).uses.begin():
        pass
