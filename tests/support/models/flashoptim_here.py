"""flashoptim without a GPU: its kernels are Triton's, which is not installed for a processor. So
`make test` installs it without what it depends on."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

NAMES = ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice")


class Decorator:
    """Leaves a function as it is, and has every attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Decorator()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Decorator()


class Stub(ModuleType):
    """A module of Triton, while flashoptim is imported."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Decorator()


def imported() -> Any:
    """Imports flashoptim, with stubs of Triton where that is not installed."""
    if importlib.util.find_spec("flashoptim") is None:
        pytest.skip("flashoptim is not installed")
    if "flashoptim" not in sys.modules and importlib.util.find_spec("triton") is None:
        importlib.import_module("torch._inductor.utils")  # looks for Triton, too
        importlib.import_module("torch._dynamo")
        sys.modules |= {name: Stub(name) for name in NAMES}
        try:
            importlib.import_module("flashoptim")
        finally:
            for name in NAMES:
                del sys.modules[name]
    return importlib.import_module("flashoptim")
