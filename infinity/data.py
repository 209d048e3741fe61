"""Data: which samples a batch has, and text files as batches of token ids."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ext.data.never_evict import NeverEvict
    from .ext.data.order import Order
    from .ext.data.seeding import Seeded

__all__ = ["NeverEvict", "Order", "Seeded"]
_HOMES = {
    "NeverEvict": "ext.data.never_evict",
    "Order": "ext.data.order",
    "Seeded": "ext.data.seeding",
}


def __getattr__(name: str):  # torch is imported when it is asked for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __package__), name)
