"""Graph nodes: count what refers to a node of autograd's graph.

[Note: why a count in the C++ object] A parameter's ``AccumulateGrad`` node does not tell which
nodes lead to it. Each holds one reference to it, and so does each saved parameter. Torch gives that
count to no Python, so its place is read from the size of the Python object: an intrusive pointer,
or a shared one in torches before. A trial with a graph of our own shows whether that is right.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_HEAD = object.__basicsize__
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_INTRUSIVE, _SHARED = _HEAD + _POINTER, _HEAD + 2 * _POINTER  # sizes of the Python object


def references(node: Any) -> int | None:
    """Counts what refers to ``node``, its Python object aside; None if this torch differs."""
    return _count(node) if _works() else None


def _count(node: Any) -> int:
    size = type(node).__basicsize__
    at = id(node) + _HEAD + (_POINTER if size == _SHARED else 0)
    counter = ctypes.c_uint64.from_address(at).value + _POINTER
    return ctypes.c_uint32.from_address(counter).value - 1


@cache
def _works() -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        if type(node).__basicsize__ not in (_INTRUSIVE, _SHARED):
            return False
        uses, counts = [], [_count(node)]
        for _ in range(2):
            uses.append(leaf.neg())
            counts.append(_count(node))
        uses.clear()
        return [*counts, _count(node)] == [0, 1, 2, 0]
