"""A module's forward replaced for a while, without a reference from the module to itself: when the last reference to a
model goes, it goes at once, and with it what the engine holds.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import UsageError


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward that ``module`` has now, as a function that does not keep the module."""
    if "forward" in module.__dict__:
        return module.__dict__["forward"]
    forward, reference = type(module).forward, weakref.ref(module)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (found := reference()) is None:
            raise UsageError("this backward runs a block's forward again, but the model is gone: keep the model until then")
        return forward(found, *args, **kwargs)

    return call


class ReplacedForward:
    """Has ``module`` run ``forward`` until :meth:`remove`."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self._module, self._own = weakref.ref(module), module.__dict__.get("forward")
        self._is_removed = False
        module.forward = forward

    def remove(self) -> None:
        """Restores the forward as it was. A second call does nothing."""
        module = self._module()
        if module is not None and not self._is_removed:
            if self._own is not None:
                module.forward = self._own
            else:
                module.__dict__.pop("forward", None)
        self._is_removed = True
