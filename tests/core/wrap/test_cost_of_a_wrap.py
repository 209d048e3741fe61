"""What a wrap costs: its calls grow with the model's blocks, and no faster.

Words used here:

**calls**: of Python's and C's functions, which no other process of the machine changes.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable

import torch
from torch import nn

import infinity


def calls_of(run: Callable[[], object]) -> int:
    """The calls of one run."""
    profile = cProfile.Profile()
    profile.runcall(run)
    return pstats.Stats(profile).total_calls


def wrap_of(blocks: int) -> Callable[[], object]:
    """A wrap of so many layers and their optimizer."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(blocks)))
    optimizer = torch.optim.AdamW(model.parameters())
    return lambda: infinity.wrap_model(
        model, optimizer, infinity.Config(params="host", optimizer="host")
    )


def test_the_calls_of_a_wrap_grow_with_the_blocks_alone():
    """Counts the calls of wraps of 60 and 240 blocks. Twin: a loop over all pairs of blocks makes
    16 times the calls."""

    def pairs(blocks: int) -> Callable[[], object]:
        return lambda: [abs(a - b) for a in range(blocks) for b in range(blocks)]

    def growth(make: Callable[[int], Callable[[], object]]) -> float:
        return calls_of(make(240)) / calls_of(make(60))

    wrap_of(2)()  # imports
    assert growth(pairs) > 12
    assert growth(wrap_of) < 4.4
