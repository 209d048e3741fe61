"""FlatParamSpec: which arrays a flat param has, and their dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ... import native
from ..machine.tiers import Tier

MOMENTS = native.SCALED_MOMENTS  # that may be in 8 bits
EVERY_MOMENT = native.MOMENTS
SCALES = {name: name + "_scale" for name in MOMENTS}
ARRAYS = ("weight", "master", *EVERY_MOMENT, *SCALES.values(), "grad")

MASTER_DTYPES = {native.Master.SPLIT: torch.int16, native.Master.FLOAT32: torch.float32}


@dataclass(frozen=True)
class FlatParamSpec:
    """The common properties of one flat param's parameters, which decide its arrays."""

    wrapped_dtype: torch.dtype  # dtype at the wrap, and of state_dict
    dtype: torch.dtype  # compute dtype
    master: native.Master
    grad_dtype: torch.dtype
    moment_dtype: torch.dtype
    moments: tuple[str, ...]  # arrays, of EVERY_MOMENT
    stepped: bool
    optimizer: int = 0  # the place, among those of the job, of the one that steps them
    needs: Any = None  # beside the arrays, of a step by other code; None: a kernel steps
    exact: bool = False  # codes of packed weights: never rounded, whatever their dtype

    def trained(
        self,
        master: str,
        moments: Mapping[str, torch.dtype],
        optimizer: int = 0,
        *,
        needs: Any = None,
    ) -> FlatParamSpec:
        """Describes the same parameters when ``optimizer`` steps them. ``master``: the
        configuration's; ``moments``: the arrays of its rule, and their dtype."""
        kind = native.Master.OWN
        if self.dtype != torch.float32 and master != "none":
            split = master == "split" and self.dtype == torch.bfloat16
            kind = native.Master.SPLIT if split else native.Master.FLOAT32
        return replace(
            self,
            master=kind,
            moments=tuple(name for name in EVERY_MOMENT if name in moments),
            moment_dtype=next(iter(moments.values()), self.moment_dtype),
            stepped=True,
            optimizer=optimizer,
            needs=needs,
        )

    def array_dtypes(self) -> dict[str, torch.dtype]:
        """Maps the name of every array of such a flat param to its dtype."""
        dtypes = {"weight": self.dtype}
        if self.stepped:
            if self.master != native.Master.OWN:
                dtypes["master"] = MASTER_DTYPES[self.master]
            dtypes |= {name: self.moment_dtype for name in self.moments}
            if self.moment_dtype == torch.uint8:
                dtypes |= {SCALES[name]: torch.uint8 for name in self.moments}
            dtypes["grad"] = self.grad_dtype
        return dtypes

    @cached_property
    def nbytes_per_element(self) -> dict[str, float]:  # cached: a plan needs it millions of times
        """Maps the name of every array to its bytes per parameter element."""
        return {
            name: dtype.itemsize / block_numel(name) for name, dtype in self.array_dtypes().items()
        }


def block_numel(name: str) -> int:
    """Counts the parameter elements per element of array ``name``."""
    return native.MOMENT_BLOCK if name in SCALES.values() else 1


def home_of(name: str, weights: Tier, optimizer: Tier, grad: Tier) -> Tier:
    """Returns the tier of array ``name``. Scales of a state on disk stay on the host: they are too
    small for disk blocks."""
    if name in SCALES.values():
        return Tier.HOST if optimizer is Tier.NVME else optimizer
    return {"weight": weights, "grad": grad}.get(name, optimizer)
