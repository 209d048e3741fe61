"""Integrations: train wrapped models with other libraries' training loops, one file per library.

``import infinity`` imports nothing from here. A library is imported when its class is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ext.integrations.accelerate import InfinityAccelerator
    from .ext.integrations.lightning import InfinityStrategy
    from .ext.integrations.peft import merge_adapters, save_merged, unmerge_adapters
    from .ext.integrations.trainer import InfinityMixin, InfinityTrainer
    from .ext.integrations.trl import InfinityDPOTrainer, InfinityGRPOTrainer, InfinitySFTTrainer

__all__ = [
    "InfinityAccelerator",
    "InfinityDPOTrainer",
    "InfinityGRPOTrainer",
    "InfinityMixin",
    "InfinitySFTTrainer",
    "InfinityStrategy",
    "InfinityTrainer",
    "merge_adapters",
    "save_merged",
    "unmerge_adapters",
]

_HOMES = {
    "InfinityAccelerator": "ext.integrations.accelerate",
    "InfinityDPOTrainer": "ext.integrations.trl",
    "InfinityGRPOTrainer": "ext.integrations.trl",
    "InfinityMixin": "ext.integrations.trainer",
    "InfinitySFTTrainer": "ext.integrations.trl",
    "InfinityStrategy": "ext.integrations.lightning",
    "InfinityTrainer": "ext.integrations.trainer",
    "merge_adapters": "ext.integrations.peft",
    "save_merged": "ext.integrations.peft",
    "unmerge_adapters": "ext.integrations.peft",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __package__), name)
