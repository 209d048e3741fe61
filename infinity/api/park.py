"""park and resume: give the memory of a wrapped model to something else for a while."""

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
    """Sends everything that a wrapped ``model`` and its optimizer have on the device and in host memory to a disk, and gives the memory
    back to the system: for a rollout between two updates, say. Staging buffers stay.

    folder
        Where the swap file is made; None: the first of ``nvme_paths``.

    The next use of the model or its optimizer reads everything back, or :func:`resume` does. No bit changes. Returns the bytes that were
    given back. Each rank parks its own. Raises UsageError between a backward and its step, ConfigError without a folder, CapacityError
    where the disk has no room, StorageError where no file can be made there; the model goes on after each of them.
    """
    engine = engine_of(model)
    engine.uses.check(Operation.PARK)
    if folder is None and not engine.config.nvme_paths:
        raise ConfigError("park needs a folder on a disk: infinity.park(model, '/path/on/the/disk'), or Config(nvme_paths=[...])")
    with engine.uses.begin():
        if landed := [handle.name for handle in engine.trained if would_be_lost(handle)]:
            raise UsageError(
                f"park between backward and step: {len(landed)} gradients ({landed[0]}, ...) wait for it. Park after step()"
            )
        with engine.store.guarding():
            _refuse_held(engine.job)
            engine.wait_idle()
            engine.prefetcher.release_all([unit for unit in engine.units if not unit.stays])
            for unit in engine.units:
                for shard in unit.shards:
                    shard.wait_idle()
        averages = engine.average.arrays_in_memory if engine.average is not None else []
        where = os.path.abspath(folder) if folder is not None else engine.config.nvme_paths[0]
        # Not guarded: a folder that takes no swap file is no disk that lost anything. Its writes guard themselves.
        engine.parking.park([*arrays_in_memory(engine.units), *averages], where)
        give_back_heap()
        return engine.parking.nbytes


def _refuse_held(job: Job) -> None:
    """Raises UsageError where something beside the engine refers to weights at home on the device: it would read what is no weight."""

    def held() -> list[str]:
        return [unit.name for unit in job.units if unit.stays and unit.is_held]

    if held():
        gc.collect()
    if names := held():
        raise UsageError(
            f"park: something outside of the engine holds the memory of {len(names)} units ({names[0]}, ...): an array of NumPy, an export by "
            "DLPack or a view of a weight, made in a forward. Drop it, or keep a copy instead: weight.detach().clone()."
        )


def resume(model: nn.Module) -> None:
    """Reads back what :func:`park` sent away. Without it the next use of the model does. Nothing is done where nothing is parked."""
    with engine_of(model).uses.begin():
        pass
