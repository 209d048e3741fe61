"""No memory: adds to torch's OutOfMemoryError what takes the card's memory, and what needs less."""

from __future__ import annotations

import torch

from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import Tier
from ...core.run.job import Job

LESS = (
    "What is missing is memory of activations, not of state. They take less with"
    " Config(recompute=True) (`infinity train --gradient-checkpointing`), with fewer samples at"
    " once (`Config(micro_batch=1)` or `--micro-batch 1`) and with shorter sequences. A lower"
    " device_memory (`--device-memory`) moves state off the card."
)


def note_memory(job: Job, error: Exception) -> None:
    """Adds a note to an error of torch's, if the device has no memory left, and none was added."""
    if not isinstance(error, torch.OutOfMemoryError) or LESS in str(
        getattr(error, "__notes__", ())
    ):
        return
    where, memory = job.device.where, job.device.memory
    held = [f"{format_nbytes(job.planned.plan.planned_nbytes(Tier.DEVICE))} planned for state"]
    if where.type == "cuda":
        held.append(f"{format_nbytes(torch.cuda.memory_allocated(where))} in all tensors")
    if memory is not None and (free := memory.free_nbytes()) is not None:
        held.append(f"{format_nbytes(free)} free")
    error.add_note(f"Infinity: {where} has {', '.join(held)}. {LESS}")
