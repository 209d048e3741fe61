"""Has other libraries' training loops train models at home: one small file for each library.

Nothing here is imported by ``import infinity``, and no library is asked for before its class is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .accelerate import InfinityAccelerator
    from .trainer import InfinityMixin, InfinityTrainer

__all__ = ["InfinityAccelerator", "InfinityMixin", "InfinityTrainer"]

_HOMES = {"InfinityAccelerator": "accelerate", "InfinityMixin": "trainer", "InfinityTrainer": "trainer"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
