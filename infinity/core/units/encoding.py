"""Encodes parameter values as the arrays of a flat param: weights, and masters if there are any."""

from __future__ import annotations

import torch

from ... import native
from ..params.tensors import as_integers
from .flat_param_spec import FlatParamSpec


def encode(spec: FlatParamSpec, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encodes flat values of any float dtype as the arrays of weight and, if there is one,
    master."""
    dtype = spec.dtype
    if not spec.stepped or spec.master == native.Master.OWN:
        return {"weight": value.to(dtype)}
    if value.dtype == dtype == torch.bfloat16 and spec.master == native.Master.SPLIT:
        return {"weight": value, "master": torch.zeros_like(value, dtype=torch.int16)}
    master = value.to(torch.float32)
    if spec.master == native.Master.FLOAT32:
        return {"weight": master.to(dtype), "master": master}
    weight, low = (
        torch.empty_like(master, dtype=dtype),
        torch.empty_like(master, dtype=torch.int16),
    )
    native.split_master(master.contiguous(), weight, low)
    return {"weight": weight, "master": low}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compares the representation elementwise: NaN equals itself, and 0.0 differs from -0.0."""
    return as_integers(a) == as_integers(b)
