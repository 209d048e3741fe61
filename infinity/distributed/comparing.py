"""Comparing: what ranks say at a meeting so that those which differ are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class InCommon(Protocol):
    """What ranks with other parts of the tensors must have in common."""

    def values(self) -> list[int]:
        """Makes what is said of it."""

    def agrees(self, spans: list[tuple[int, int]]) -> bool:
        """Tells whether the spans of everyone's values show that it is the same."""

    def check(self, spans: list[tuple[int, int]]) -> None:
        """Raises UsageError where they show that it differs."""


class Inputs(InCommon, Protocol):
    """What a step goes by, and what stages have in common of it."""

    @property
    def common(self) -> str:
        """What ranks with the same units say, and those with other parts of the tensors."""

    @property
    def own(self) -> str:
        """What ranks with the same units say beside it."""

    @property
    def of_stages(self) -> str:
        """What stages say."""


def compare(meet: Callable, what: str, in_common: InCommon, then: Callable[[], None] = lambda: None) -> None:
    """Compares, at ``meet``, the values of ``in_common``. Raises UsageError, and does not call ``then``, where ranks do not have the same."""

    def go_on(spans: list[tuple[int, int]]) -> None:
        if in_common.agrees(spans):
            then()

    in_common.check(meet(what, in_common.values(), then=go_on))
