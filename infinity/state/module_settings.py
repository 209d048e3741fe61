"""Module settings: describes what ranks that train one model must have built alike.

order      of a parameter: the dims by which its elements follow each other in memory. Flat arrays
           have it, so the arrays of two ranks can be exchanged only if they have the same one
settings   of a module: its plain attributes (numbers, strings, functions and classes, and tuples
           of these)
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .dtensors import local_of
from .flat_layout import is_dense

# Of attributes that tell where a module is, and may differ between ranks
OWN = re.compile(r"rank|device|seed|path", re.IGNORECASE)
PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.Size, enum.Enum)


def describe_order(shape: torch.Size, stride: tuple[int, ...]) -> str:
    """Describes the order of elements in a flat array; it is equal if they lie in the same
    places."""
    form = torch.empty_strided(shape, stride, device="meta")
    if form.is_contiguous() or not is_dense(shape, stride):  # flat arrays have no gaps
        return "row-major"
    dims = [dim for dim, extent in enumerate(shape) if extent != 1]
    return f"by dims {', '.join(map(str, sorted(dims, key=lambda dim: -stride[dim])))}"


def describe_orders(params: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Describes the order of this rank's part of each of the named ``params``."""
    return {
        f"the memory order of {name}": describe_order(local.shape, local.stride())
        for name, local in ((name, local_of(param)) for name, param in params)
    }


def describe_modules(model: nn.Module, *, unlike: Iterable[nn.Module] = ()) -> dict[str, str]:
    """Describes the class and the settings of each module. Left out are ``unlike``, private
    attributes, ``training``, and names with rank, device, seed or path in them."""
    found, left_out = {}, set(unlike)
    for name, module in model.named_modules():
        if module in left_out:
            continue
        settings = (
            (key, _told(value))
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key != "training" and not OWN.search(key)
        )
        told = ", ".join(f"{key}={value}" for key, value in settings if value is not None)
        kind = type(module)
        found[f"module {name}" if name else "the outermost module"] = (
            f"{kind.__module__}.{kind.__qualname__}({told})"
        )
    return found


def _told(value: Any) -> str | None:
    """Describes ``value`` by text that is equal on ranks with an equal one; None if it is not
    plain."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        each = [_told(item) for item in value]
        return None if None in each else f"({', '.join(map(str, each))})"
    if isinstance(value, functools.partial):
        return _told((value.func, value.args, tuple(sorted(value.keywords.items()))))
    if isinstance(value, nn.Module) or not hasattr(value, "__qualname__"):
        return None
    return f"{value.__module__}.{value.__qualname__}"
