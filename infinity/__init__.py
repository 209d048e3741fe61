"""Infinity: trains PyTorch models that do not fit, with the same bits.

    model, optimizer = infinity.wrap_model(model, optimizer, {"params": "nvme", "optimizer": "nvme", ...})

and the training loop stays as it is. See :class:`Config` for everything that can be chosen.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .errors import CapacityError, ConfigError, CorruptionError, InfinityError, StorageError, UsageError

if TYPE_CHECKING:
    from .checkpoint import load_checkpoint, save_checkpoint
    from .config import Config
    from .measure import Stats, stats
    from .pretrained import save_pretrained
    from .wrap import full_params, unwrap_model, wrap_model

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "Config",
    "ConfigError",
    "CorruptionError",
    "InfinityError",
    "Stats",
    "StorageError",
    "UsageError",
    "full_params",
    "load_checkpoint",
    "save_checkpoint",
    "save_pretrained",
    "stats",
    "unwrap_model",
    "wrap_model",
]

# Imported when first asked for, so that `infinity --help` does not wait for torch.
_HOMES = {
    "Config": "config",
    "Stats": "measure",
    "full_params": "wrap",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "save_pretrained": "pretrained",
    "stats": "measure",
    "unwrap_model": "wrap",
    "wrap_model": "wrap",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
