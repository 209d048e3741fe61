"""Shared: marks parameters with a copy on another pipeline stage that makes the same steps, while
they are wrapped."""

from __future__ import annotations

from typing import Any

import torch

from ...core.seams import Extension

MARK = "_infinity_shared"


def mark_shared(param: torch.Tensor, *, counts: bool) -> None:
    """Marks ``param`` as one of two copies. ``counts``: norms and checkpoints include this one."""
    setattr(param, MARK, counts)


def unmark(param: torch.Tensor) -> None:
    """Removes the mark. Idempotent."""
    if is_shared(param):
        delattr(param, MARK)


def is_shared(param: torch.Tensor) -> bool:
    """Tells whether another stage has a copy of ``param``."""
    return getattr(param, MARK, None) is not None


def is_counted(param: torch.Tensor) -> bool:
    """Tells whether norms and checkpoints include this stage's copy."""
    return getattr(param, MARK, True)


class Shared(Extension):
    """Makes each shared parameter a unit of its own, so that both of its stages have the same
    layout."""

    @classmethod
    def describe_model(cls, model: Any) -> None:
        model.alone.update(filter(is_shared, model.names))
