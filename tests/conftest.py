"""What every test module uses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Takes what is imported by now out of the garbage collector's sight: these tests collect often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of a few thousand elements go faster on one thread, and a child needs no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def said_seed(request) -> None:
    """A test that fails shows what it drew from."""
    if (seed := getattr(request.module, "SEED", None)) is not None:
        print(f"seed {seed}")


@pytest.fixture
def swap(tmp_path) -> Path:
    """A folder for swap files."""
    (tmp_path / "swap").mkdir()
    return tmp_path / "swap"
