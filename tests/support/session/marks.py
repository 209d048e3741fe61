"""Which cases run in `make test`, and which in `make test-all` only."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

NO_CASE = SimpleNamespace(params={})


def refuse_kept_errors(items: Iterable[pytest.Item]) -> None:
    """Raises pytest.UsageError for an exception among a test's parameters: once raised it keeps all that its frames had, engines with
    their rings too, until the session ends."""
    for item in items:
        if any(isinstance(value, BaseException) for value in getattr(item, "callspec", NO_CASE).params.values()):
            raise pytest.UsageError(f"{item.nodeid}: give the class of an exception, and what it says, not the exception")


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
