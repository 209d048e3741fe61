"""Which cases run in `make test`, and which in `make test-all` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], quick: int) -> list:
    """The first ``quick`` of ``values`` run always; the others, in which the code branches no other way, are slow."""
    return [value if i < quick else pytest.param(*as_arguments(value), marks=pytest.mark.slow) for i, value in enumerate(values)]


def every(values: Iterable[Any], step: int) -> list:
    """Of ``values`` every ``step``-th runs always; the others are slow."""
    return [
        value if i % step == 0 else pytest.param(*as_arguments(value), marks=pytest.mark.slow) for i, value in enumerate(values)
    ]


def as_arguments(value: Any) -> tuple:
    """``value`` as the arguments of one case."""
    return (value,)
