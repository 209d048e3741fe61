"""Comparing: compares values over ranks at a sync point, and names those that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Comparison(Protocol):
    """Values that must be equal on ranks with other local parts of the tensors."""

    def values(self) -> list[int]:
        """Makes the numbers to compare."""

    def agrees(self, spans: list[tuple[int, int]]) -> bool:
        """Returns whether the spans of all ranks' numbers show that they are equal."""

    def check(self, spans: list[tuple[int, int]]) -> None:
        """Raises UsageError if the spans show that they differ."""


def compare(
    meet: Callable, what: str, comparison: Comparison, then: Callable[[], None] = lambda: None
) -> None:
    """Makes ``comparison`` over ranks by the sync point ``meet``. Raises UsageError, and does not
    call ``then``, if the values differ."""

    def go_on(spans: list[tuple[int, int]]) -> None:
        if comparison.agrees(spans):
            then()

    comparison.check(meet(what, comparison.values(), then=go_on))
