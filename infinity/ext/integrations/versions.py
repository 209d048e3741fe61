"""Versions: the versions of other libraries that the integrations are tested with."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from types import ModuleType

logger = logging.getLogger(__name__)

# Defined only here: tests run against these, and docs/integrations.md is compared with them.
TESTED = {
    "transformers": "5.24",
    "accelerate": "1.15",
    "peft": "0.21",
    "trl": "1.16",
    "lightning": "2.6",
    "datasets": "5.2",
}

# The least that works, where pyproject.toml asks for more than the first version of that number:
# TRL 1.0 takes a chat template without `{% generation %}` for one that marks answers.
LEAST = {"trl": "1.1"}

_told: set[str] = set()  # libraries whose version was warned about in this process


def require(name: str) -> ModuleType:
    """Imports the library ``name``. Warns once if its version is not tested. Raises ImportError
    with the remedy if it is not installed."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"this integration needs {name}, which is not installed: pip install"
            f" '{name}>={TESTED[name]}'",
            name=name,
        ) from error
    found = importlib.metadata.version(name)
    if found.split(".")[:2] != TESTED[name].split(".") and name not in _told:
        _told.add(name)
        logger.warning("%s %s: the integration is tested with %s", name, found, TESTED[name])
    return module
