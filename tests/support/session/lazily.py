"""Libraries that are imported when a test first uses them: every worker collects all tests, and
only one runs those of a library."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Lazily:
    """The module ``name``. Skips the module of tests that makes it where that one, or what it
    ``needs``, is not installed."""

    def __init__(self, name: str, *needs: str) -> None:
        for each in (name, *needs):
            if importlib.util.find_spec(each) is None:
                pytest.skip(f"could not import {each!r}", allow_module_level=True)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
