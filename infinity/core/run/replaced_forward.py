"""ReplacedForward: replaces a module's forward without a reference cycle. When the last reference
to a model is dropped, the model and the engine's memory are freed at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ...errors import UsageError


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the current forward of ``module`` as a function. If it is the class's, the function
    refers to the module weakly, and raises UsageError once the module is gone."""
    if "forward" in module.__dict__:
        return module.__dict__["forward"]
    forward, reference = type(module).forward, weakref.ref(module)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(living(reference), *args, **kwargs)

    return call


def living(reference: weakref.ref[nn.Module]) -> nn.Module:
    if (module := reference()) is None:
        raise UsageError(
            "this backward runs a block's forward again, but the model is gone: keep the model"
            " until then"
        )
    return module


class ReplacedForward:
    """Replaces the forward of ``module`` by ``forward`` until :meth:`remove`. ``name``: the
    attribute; what is not a module may keep the forward of one under another name."""

    def __init__(self, module: Any, forward: Callable[..., Any], name: str = "forward"):
        self._module, self._name = weakref.ref(module), name
        self._replaced, self._is_removed = module.__dict__.get(name), False
        setattr(module, name, forward)

    def remove(self) -> None:
        """Restores the forward as it was. Idempotent."""
        module = self._module()
        if module is not None and not self._is_removed:
            if self._replaced is not None:
                setattr(module, self._name, self._replaced)
            else:
                module.__dict__.pop(self._name, None)
        self._is_removed = True
