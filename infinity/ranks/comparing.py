"""Comparing: compares values over ranks, and names those that differ."""

from __future__ import annotations

from typing import Protocol


class Comparison(Protocol):
    """Values that must be equal on ranks with other local parts of the tensors."""

    def values(self) -> list[int]:
        """Makes the numbers to compare."""

    def agrees(self, spans: list[tuple[int, int]]) -> bool:
        """Returns whether the spans of all ranks' numbers show that they are equal."""

    def check(self, spans: list[tuple[int, int]]) -> None:
        """Raises UsageError if the spans show that they differ."""
