"""Dispatch keys: make torch's kernels ask the class of a tensor that was made without being asked.

[Note: why a key in the C++ object] Constructors (``torch.tensor(p)``, ``torch.Tensor(p)``, sparse
ones) and scripted functions ask no ``__torch_function__``. They end in operations, which torch
dispatches by the keys of a TensorImpl. With the key of Python it calls ``__torch_dispatch__`` of
the tensor's class. torch sets that key when it makes a tensor, and a parameter's class changes
later. So the place of the keys in the object is found first, in tensors of our own.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

_WORDS = 40  # prefix of a TensorImpl with the keys, in all supported torches


def set_python_key(tensor: torch.Tensor) -> None:
    """Has operations on ``tensor`` call ``__torch_dispatch__`` of its class, until
    :func:`clear_python_key`."""
    if (place := _place()) is not None:
        _keys(tensor, place).value |= _python()


def clear_python_key(tensor: torch.Tensor) -> None:
    """Has operations on ``tensor`` run as on a plain one. A wrapper (a DTensor) has the key of its
    own, and keeps it: without it torch would read memory that a wrapper does not have."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        return
    if (place := _place()) is not None:
        _keys(tensor, place).value &= ~_python()


def has_python_key(tensor: torch.Tensor) -> bool:
    """Returns whether operations on ``tensor`` call its class."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


@cache
def _python() -> int:
    keys = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot
    first, second = (torch._C.DispatchKeySet(key).raw_repr() for key in keys)
    return first | second


def _keys(tensor: torch.Tensor, place: int) -> ctypes.c_uint64:
    with torch._C.DisableTorchFunctionSubclass():
        return ctypes.c_uint64.from_address(tensor._cdata + place)


class _Asked(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


@cache
def _place() -> int | None:
    """Returns the offset of the keys in a TensorImpl; None if this torch differs."""
    made = torch.Tensor._make_wrapper_subclass(_Asked, (1,), device="cpu")
    plain = torch.empty(1, device="cpu")
    places = {
        8 * word
        for word in range(_WORDS)
        if all(
            _keys(tensor, 8 * word).value == torch._C._dispatch_keys(tensor).raw_repr()
            for tensor in (made, plain)
        )
    }
    if len(places) != 1:
        return None
    (place,) = places
    before = _keys(plain, place).value
    _keys(plain, place).value |= _python()
    works = has_python_key(plain)
    _keys(plain, place).value = before
    return place if works and not has_python_key(plain) else None
