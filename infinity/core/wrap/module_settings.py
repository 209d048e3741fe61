"""Module settings: describes what ranks that train one model must have built alike.

order      of a parameter: the dims by which its elements follow each other in memory. Flat arrays
           have it, so the arrays of two ranks can be exchanged only if they have the same one
settings   of a module: its plain attributes (numbers, strings, functions and classes, and tuples
           of these)
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..units.flat_layout import is_dense
from ..units.forms import local_of

# Of attributes that tell where a module is, or what it tells, and may differ between ranks
OWN = re.compile(
    r"rank|device|seed|path|verbose|debug|(^|_)(dir|folder|file|host|hostname|main|master|leader"
    r"|chief|gpu|worker|world|pid|uuid|run_id|run_name)(_|$)|time$",
    re.IGNORECASE,
)
SCALARS = (bool, int, float, complex, str)
DEEPEST = 8  # tuples in tuples; one that has itself inside has no end
LONGEST = 1000  # characters of a module's settings; longer ones become a digest


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


def describe_modules(
    modules: Mapping[nn.Module, str], *, unlike: Iterable[nn.Module] = ()
) -> dict[str, str]:
    """Describes the class and the settings of each module. Left out are ``unlike``, private
    attributes, ``training``, and names of what ranks have of their own (``OWN``)."""
    descriptions, left_out = {}, set(unlike)
    for module, name in modules.items():
        if module in left_out:
            continue
        settings = (
            (key, _told(value))
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key != "training" and not OWN.search(key)
        )
        text = ", ".join(f"{key}={value}" for key, value in settings if value is not None)
        if len(text) > LONGEST:
            digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
            text = f"{text[:LONGEST]}... with digest {digest}"
        kind = type(module)
        descriptions[f"module {name}" if name else "the outermost module"] = (
            f"{kind.__module__}.{kind.__qualname__}({text})"
        )
    return descriptions


def _told(value: Any, depth: int = DEEPEST) -> str | None:
    """Describes ``value`` by text that is equal on ranks with an equal one; None if it is not
    plain. Calls no code of a class of the user's, whose text may have an address in it."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if value is None or isinstance(value, torch.dtype):
        return repr(value)
    if (scalar := next((each for each in SCALARS if isinstance(value, each)), None)) is not None:
        return scalar.__repr__(value)
    if isinstance(value, (tuple, list)):  # torch.Size, too
        each = [_told(item, depth - 1) for item in value] if depth else [None]
        return None if None in each else f"({', '.join(map(str, each))})"
    if isinstance(value, functools.partial):
        return _told((value.func, value.args, tuple(sorted(value.keywords.items()))), depth)
    if not isinstance(value, type) and not inspect.isroutine(value):
        return None
    # What is written in C may have no module
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"
