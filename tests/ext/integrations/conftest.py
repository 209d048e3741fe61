"""Has each test begin without what accelerate keeps for a whole process: its precision, above
all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # before any library reads it: nothing here is looked up elsewhere


@pytest.fixture(autouse=True)
def fresh_accelerator_state() -> Iterator[None]:
    yield
    with contextlib.suppress(ImportError):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
