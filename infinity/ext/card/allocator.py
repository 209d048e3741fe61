"""AllocatorSettings: holds a plan under settings of torch's CUDA allocator, or tells before the
first step that it may not hold.

setting   of PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, as forums pass them on
window    of gathered weights: a block that the allocator keeps, from which units are cut
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from ...config import Config
from ...core.machine.accelerator import Accelerator
from ...core.machine.card_memory import CardMemory
from ...core.machine.sizes import format_nbytes
from ...core.seams import Events, Extension

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts
CUTS, COLLECTS, ASYNC = "max_split_size_mb", "garbage_collection_threshold", "cudaMallocAsync"

logger = logging.getLogger(__name__)


def settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the allocator's settings, by name, as the environment has them."""
    text = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    pairs = (part.partition(":") for part in text.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs if value}


def hold(
    memory: CardMemory, window_nbytes: int, settings: Mapping[str, str], *, is_async: bool
) -> str:
    """Changes what ``memory`` keeps, so that a plan with a window of ``window_nbytes`` holds under
    ``settings``. Returns what is to be told; "" if nothing."""
    if is_async:
        return (
            f"backend:{ASYNC} gives memory that one stream has freed to another one, and keeps"
            " other counts than torch's own: no plan has been run with it. Leave it out if memory"
            " runs out."
        )
    size, share = settings.get(CUTS), settings.get(COLLECTS)
    cannot_cut = size is not None and window_nbytes > int(size) << 20
    if not window_nbytes or not (cannot_cut or share is not None):
        return ""
    memory.note_cached(0)  # else it would be on the card twice, or come and go in each step
    reason = (
        f"{CUTS}:{size} cuts nothing from a larger block"
        if cannot_cut
        else f"{COLLECTS}:{share} may free what no unit uses for a while"
    )
    return (
        f"{reason}, so the window of {format_nbytes(window_nbytes)} for weights is taken unit by"
        " unit: the same bytes and bits, but the driver may be asked for memory in later steps, too"
    )


class AllocatorSettings(Extension):
    """Those of the process, for one job on a GPU."""

    may_stand_aside = True

    def __init__(self, device: Accelerator):
        self._device = device

    @classmethod
    def begin(cls, config: Config, device: Any, collectives: Any, events: Events) -> Any:
        """Begins on CUDA, whose allocator has such settings."""
        return cls(device) if device.where.type == "cuda" and not device.is_host else None

    def install(self, job: Any, model: Any) -> None:
        """Holds the plan, and logs a warning of what it cannot."""
        if model is None:
            return
        refusal = hold(
            self._device.memory,
            job.planned.plan.device_window_nbytes,
            settings_of(os.environ),
            is_async=torch.cuda.get_allocator_backend() == ASYNC,
        )
        if refusal:
            torch.cuda.empty_cache()  # with the window's block
            logger.warning("%s: %s", self._device.where, refusal)
