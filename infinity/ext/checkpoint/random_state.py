"""Random state: saves and restores the generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def read_random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def random_state_tensors() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def check_random_state(state: dict[str, Any], tensors: dict[str, torch.Tensor], rank: int) -> tuple:
    """Returns the states in the generators' own form, after a trial on separate generators."""
    version, internal, gauss = state["python"]
    kind, keys, position, has_gauss, cached = state["numpy"]
    for_python = (version, tuple(internal), gauss)
    for_numpy = (kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached)
    random.Random().setstate(for_python)
    np.random.RandomState().set_state(for_numpy)
    torch.Generator().set_state(tensors[f"random/{rank}/cpu"])
    return for_python, for_numpy


def restore_random_state(states: tuple, tensors: dict[str, torch.Tensor], rank: int) -> None:
    for_python, for_numpy = states
    random.setstate(for_python)
    np.random.set_state(for_numpy)
    torch.set_rng_state(tensors[f"random/{rank}/cpu"])
    for i in range(torch.cuda.device_count()):
        if f"random/{rank}/cuda:{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random/{rank}/cuda:{i}"], i)


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restores the generators after the block."""
    state, tensors = (
        read_random_state(),
        {f"random/0/{name}": value for name, value in random_state_tensors().items()},
    )
    try:
        yield
    finally:
        restore_random_state(check_random_state(state, tensors, 0), tensors, 0)
