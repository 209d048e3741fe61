"""Snapshot: records values that a forward could change, to compare them afterwards."""

from __future__ import annotations

import types
from enum import Enum
from typing import Any

import torch
from torch import nn

SCALARS = (bool, int, float, str, torch.dtype, torch.device)

MODULE_OWN = {
    "_parameters",
    "_modules",
    *(name for name in vars(nn.Module()) if "hooks" in name),
    "forward",
    "dynamo_ctx",  # the compiler's, of a module inside torch.compile
}
# Elements of a tensor whose bytes are compared. Of larger ones only torch's version counter is.
LARGEST_COMPARED = 64 * 1024
DEEPEST_COMPARED = 6
IMMUTABLE = (
    type(None),
    *SCALARS,
    bytes,
    complex,
    range,
    torch.Size,
    torch.layout,
    Enum,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
)


class NoSnapshot(Exception):
    """A value whose changes cannot be detected."""


class Snapshot:
    """A value's content at one time. Holds the object, so that no other gets its identity."""

    def __init__(self, value: Any, content: Any):
        self._value, self._content = value, content

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Snapshot)
            and self._value is other._value
            and self._content == other._content
        )

    @classmethod
    def of(cls, value: Any, depth: int = 0) -> Snapshot:
        """Takes a snapshot of ``value``. Raises NoSnapshot if its changes cannot be detected."""
        if depth > DEEPEST_COMPARED:
            raise NoSnapshot
        if isinstance(value, torch.Tensor):
            small = (
                value.numel() <= LARGEST_COMPARED
                and value.layout is torch.strided
                and handle_free(value)
            )
            data = value.detach().resolve_conj().resolve_neg().cpu().contiguous() if small else None
            return cls(
                value,
                (
                    value._version,
                    None if data is None else data.reshape(-1).view(torch.uint8).numpy().tobytes(),
                ),
            )
        if isinstance(value, torch.Generator):
            return cls(value, value.get_state().numpy().tobytes())
        if isinstance(value, (bool, int, float, str)):
            return cls(None, value)
        if isinstance(value, IMMUTABLE):
            return cls(value, None)
        if isinstance(value, nn.Module):  # the attributes of modules inside the block are compared
            return cls(value, None)
        if isinstance(value, dict):
            return cls(value, [(key, cls.of(each, depth + 1)) for key, each in value.items()])
        if isinstance(value, (list, tuple, set, frozenset)):
            # Of immutable containers only the content counts, not the identity.
            which = None if isinstance(value, (tuple, frozenset)) else value
            return cls(which, [cls.of(each, depth + 1) for each in value])
        if isinstance(value, types.MethodType):
            return cls(value.__func__, cls.of(value.__self__, depth + 1))
        if hasattr(value, "__dict__"):
            return cls(value, [(key, cls.of(each, depth + 1)) for key, each in vars(value).items()])
        try:  # an iterator's position is in its reduced form
            return cls(value, [cls.of(each, depth + 1) for each in value.__reduce_ex__(2)])
        except TypeError:
            raise NoSnapshot from None


def handle_free(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is a plain tensor, whose bytes are not at home elsewhere."""
    return not isinstance(tensor, nn.Parameter) and type(tensor) is torch.Tensor


def has_containers(args: tuple, kwargs: dict) -> bool:
    """Returns whether the arguments have a list, dict or set, which the block may change."""
    pending = [*args, *kwargs.values()]
    while pending:
        value = pending.pop()
        if isinstance(value, tuple):
            pending += value
        elif isinstance(value, (list, dict, set)):
            return True
    return False
