"""Shared: parameters with a copy on another pipeline stage that makes the same steps.

They have :data:`~infinity.core.units.handle.COUNTS` while they are wrapped.
"""

from __future__ import annotations

from typing import Any

from ...core.seams import Extension
from ...core.units.handle import COUNTS


class Shared(Extension):
    """Makes each shared parameter a unit of its own, so that both of its stages have the same
    layout."""

    @classmethod
    def describe_model(cls, model: Any) -> None:
        model.alone.update(param for param in model.names if hasattr(param, COUNTS))
