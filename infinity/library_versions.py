"""Versions: those of other libraries that the engine works with, and those that it is tested
with."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
from types import ModuleType

from .errors import ConfigError

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

# The oldest that is supported; an older one is refused. pyproject.toml and the pages are compared
# with these. TRL 1.0 takes a chat template without `{% generation %}` for one that marks answers.
LEAST = {
    "torch": "2.10",
    "transformers": "4.57",
    "accelerate": "1.4",
    "peft": "0.15",
    "trl": "1.1",
    "lightning": "2.5",
    "datasets": "4",
    "bitsandbytes": "0.49",
    "torchao": "0.17",
    "gguf": "0.17",
    "diffusers": "0.35",
    "lm-eval": "0.4.12",
    "ray": "2.44",
}

_told: set[str] = set()  # libraries whose version was warned about in this process


@functools.cache
def refuse_older(name: str) -> None:
    """Raises ConfigError if the library ``name`` is installed in a version that is older than the
    oldest that is supported. Does not import it."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return
    least = LEAST.get(name, "0")
    # A pre-release counts as its release: containers have torch 2.10.0a0
    if _numbers(found) < _numbers(least):
        raise ConfigError(
            f"{name} {found} is installed, older than {least}, the oldest supported version:"
            f" python -m pip install '{name}>={least}'"
        )


def is_at_least(name: str, least: str) -> bool:
    """Returns whether the library ``name`` is installed in version ``least`` or a later one."""
    try:
        return _numbers(importlib.metadata.version(name)) >= _numbers(least)
    except importlib.metadata.PackageNotFoundError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[\d.]*", version.removeprefix("v"))
    return tuple(int(part) for part in release[0].split(".") if part) if release else ()


def require(name: str) -> ModuleType:
    """Imports the library ``name``. Warns once if its version is not tested. Raises ImportError
    with the remedy if it is not installed, and ConfigError if it is too old."""
    refuse_older(name)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"this integration needs {name}, which is not installed: pip install"
            f" '{name}>={LEAST[name]}'",
            name=name,
        ) from error
    found = importlib.metadata.version(name)
    if found.split(".")[:2] != TESTED[name].split(".") and name not in _told:
        _told.add(name)
        logger.warning("%s %s: the integration is tested with %s", name, found, TESTED[name])
    return module
