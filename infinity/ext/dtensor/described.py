"""Descriptions of a forward's inputs and mode, as strings that compare equal across ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ... import native
from ...core.machine.device import Device
from ...core.units.forms import division_of

CACHES = ("past", "cache")  # in names of caches, which hold other heads on every rank


def mode_of(root: torch.nn.Module, device: Device) -> str:
    """Describes how a forward of ``root`` computes on ``device``."""
    kind, where = "training" if root.training else "evaluation", device.where.type
    cast = (
        f", in autocast to {torch.get_autocast_dtype(where)}"
        if torch.is_autocast_enabled(where)
        else ""
    )
    return f"{kind}, with{'' if torch.is_grad_enabled() else 'out'} gradients{cast}"


def shape_of(tensor: torch.Tensor) -> str:
    """Describes the dtype, the shape and the placements of a tensor."""
    return (
        f"{str(tensor.dtype).removeprefix('torch.')} of"
        f" {tuple(tensor.shape)}{division_of(tensor).told}"
    )


def tensors_in(items: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for ``items``, pairs of a key and a value, and for mappings and
    sequences in them."""
    for key, value in items:
        name = f"{prefix}{f'argument {key}' if isinstance(key, int) and not prefix else key}"
        if isinstance(value, torch.Tensor):
            yield name, value
        elif any(word in name for word in CACHES):
            continue
        elif isinstance(value, Mapping):
            yield from tensors_in(value.items(), f"{name}.")
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(enumerate(value), f"{name}.")


def number_of(value: Any) -> int:
    """Returns a checksum of ``value``'s repr; 0 for an empty value."""
    raw = repr(value).encode()
    return native.crc32c(torch.frombuffer(bytearray(raw), dtype=torch.uint8)) if value else 0
