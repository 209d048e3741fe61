"""Shared: marks parameters of which another stage of a pipeline has a copy that makes the same steps, for as long as they are wrapped."""

from __future__ import annotations

import torch

MARK = "_infinity_shared"


def mark_shared(param: torch.Tensor, *, counts: bool) -> None:
    """Marks ``param`` as one of two copies. ``counts``: it is the one that norms and checkpoints have."""
    setattr(param, MARK, counts)


def unmark(param: torch.Tensor) -> None:
    """Takes the mark back."""
    if is_shared(param):
        delattr(param, MARK)


def is_shared(param: torch.Tensor) -> bool:
    """Tells whether another stage has a copy of ``param``."""
    return getattr(param, MARK, None) is not None


def is_counted(param: torch.Tensor) -> bool:
    """Tells whether this stage's copy is the one that counts."""
    return getattr(param, MARK, True)
