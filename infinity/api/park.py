"""park and resume: free the memory of a wrapped model for a while."""

from __future__ import annotations

import gc
import os

import torch
from torch import nn

from ..errors import ConfigError, UsageError
from ..gradients.record import would_be_lost
from ..runtime.job import Job
from ..runtime.parking import arrays_in_memory, give_back_heap
from ..runtime.registry import engine_of
from ..state.operations import Operation


@torch.no_grad()
def park(model: nn.Module, folder: str | os.PathLike | None = None) -> int:
    """Writes all state of a wrapped ``model`` and its optimizer, on the device and in host memory,
    to a disk, and frees that memory: for a rollout between two updates, for example. Staging
    buffers stay. Blocks until the disk has the state.

    folder
        Folder of the swap file; None: the first of ``nvme_paths``.

    The next use of the model or its optimizer reads the state back, or :func:`resume` does. No bit
    changes. Returns the number of freed bytes. Each rank parks its own state. Raises UsageError
    between a backward and its step, ConfigError without a folder, CapacityError if the disk has no
    room, StorageError if no file can be made there; the model stays usable after each of them.
    """
    engine = engine_of(model)
    job = engine.job
    job.uses.check(Operation.PARK)
    if folder is None and not job.config.nvme_paths:
        raise ConfigError(
            "park needs a folder on a disk: infinity.park(model, '/path/on/the/disk'), or"
            " Config(nvme_paths=[...])"
        )
    with job.uses.begin():
        if landed := [handle.name for handle in job.trained if would_be_lost(handle)]:
            raise UsageError(
                f"park between backward and step: {len(landed)} gradients ({landed[0]}, ...) wait"
                " for it. Park after step()"
            )
        with job.store.guarding():
            _refuse_held(job)
            engine.wait_idle()
            job.prefetcher.release_all([unit for unit in job.units if not unit.stays])
            for unit in job.units:
                for flat_param in unit.flat_params:
                    flat_param.homes.wait_idle()
        averages = engine.average.arrays_in_memory if engine.average is not None else []
        where = os.path.abspath(folder) if folder is not None else job.config.nvme_paths[0]
        # Not guarded: a folder that refuses a swap file has lost no data. Its writes are guarded.
        engine.parking.park([*arrays_in_memory(job.units), *averages], where)
        give_back_heap()
        return engine.parking.nbytes


def _refuse_held(job: Job) -> None:
    """Raises UsageError if an object outside the engine refers to weights at home on the device: it
    would read other bytes."""

    def held() -> list[str]:
        return [unit.name for unit in job.units if unit.stays and unit.buffers.is_held]

    if held():
        gc.collect()
    if names := held():
        raise UsageError(
            f"park: something outside of the engine holds the memory of {len(names)} units"
            f" ({names[0]}, ...): an array of NumPy, an export by DLPack or a view of a weight,"
            " made in a forward. Drop it, or keep a copy instead: weight.detach().clone()."
        )


def resume(model: nn.Module) -> None:
    """Reads back the state that :func:`park` wrote. Optional: the next use of the model does the
    same. No-op if the model is not parked."""
    with engine_of(model).uses.begin():
        pass
