"""SavedWeight: stands in autograd's graph for a weight, so that the graph holds no bytes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..forwards.lazy_logits import Logits
from ..state.unit import ParamUnit


@dataclass(eq=False)
class SavedWeight:
    """A saved tensor that lies in a unit's device buffer: where, instead of the bytes."""

    unit: ParamUnit
    version: int  # of the unit's values, when it was saved
    flat: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool


def is_checkpoint(hooks: tuple | None) -> bool:
    """Whether a pair of saved-tensor hooks is a non-reentrant checkpoint's."""
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


OPAQUE: set[type] = {Logits}
try:
    from torch._subclasses.fake_tensor import FakeTensor

    OPAQUE.add(FakeTensor)
except ImportError:  # pragma: no cover
    pass
