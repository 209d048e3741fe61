"""Libraries that are imported when a test first uses them: every worker collects all tests, and
only one runs those of a library."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from typing import Any

import pytest


def need(*names: str) -> None:
    """Skips the module of tests that calls it if one of the modules ``names`` is not installed.
    They are not imported, as pytest's `importorskip` would, nor are the packages they are in."""
    for each in names:
        package, *parts = each.split(".")
        found = importlib.util.find_spec(package)
        for part in parts:
            package = f"{package}.{part}"
            places = found and found.submodule_search_locations
            found = PathFinder.find_spec(package, places) if places else None
        if found is None:
            pytest.skip(f"could not import {each!r}", allow_module_level=True)


class Lazily:
    """The module ``name``. Skips the module of tests that makes it if that one, or what it
    ``needs``, is not installed."""

    def __init__(self, name: str, *needs: str) -> None:
        need(name, *needs)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_") and self._name not in sys.modules:
            raise AttributeError(attribute)  # pytest asks each object of a module what it wraps
        return getattr(importlib.import_module(self._name), attribute)
