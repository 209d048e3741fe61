"""Frame: holds what one running forward has taken."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from ..state.unit import ParamUnit


@dataclass(eq=False)
class Frame:
    """One running forward of an owner, or of the root."""

    module: torch.nn.Module
    units: list[ParamUnit]  # held until it ends
    looked_at: list[ParamUnit] = field(default_factory=list)  # held until their own module's forward ends
    is_recomputed: bool = False  # inside a checkpoint
    hooks: int = 0  # pairs of our saved-tensor hooks that this thread had before
    start: float = field(default_factory=time.perf_counter)
