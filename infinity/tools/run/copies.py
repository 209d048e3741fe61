"""Copies: what pickle, `torch.save(model)` and `copy.deepcopy(model)` make of a wrapped model: a
plain one, in memory, as scripts expect it.

trace  what the wrap has put into a module's ``__dict__``, and into its dicts of hooks
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ...core.run.registry import is_wrapped

REDUCE = "__reduce_ex__"  # looked up on the module itself by pickle and copy
FORM = ("_parameters", "_modules")  # which the engine keeps in dicts of its own
MISSING = object()
Traces = dict[nn.Module, "Trace"]


class Trace:
    """What a module had before the wrap; from :meth:`end` on, what the wrap has changed of it."""

    def __init__(self, module: nn.Module):
        self._values = dict(vars(module))
        self._hooks = {name: set(each) for name, each in vars(module).items() if _is_hooks(each)}

    def end(self, module: nn.Module) -> None:
        """Finds what has changed since."""
        now = vars(module)
        self._values = {
            name: self._values.get(name, MISSING)
            for name in now
            if now[name] is not self._values.get(name, MISSING) and name not in FORM
        }
        self._hooks = {
            name: ours
            for name, each in now.items()
            if _is_hooks(each) and (ours := set(each) - self._hooks.get(name, set()))
        }

    def without(self, module: nn.Module) -> nn.Module:
        """Returns a module of the same class with the same members, but for the engine's."""
        shadow = type(module).__new__(type(module))
        state = vars(shadow)
        state.update(vars(module))
        state.pop(REDUCE, None)
        for name, value in self._values.items():
            if value is MISSING:
                state.pop(name, None)
            else:
                state[name] = value
        for name, ours in self._hooks.items():
            kept = state[name]
            state[name] = type(kept)((key, kept[key]) for key in kept if key not in ours)
        state.update({name: dict(state[name]) for name in FORM})
        return shadow


def _is_hooks(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, int) for key in value)


@contextlib.contextmanager
def plain_copies(root: nn.Module) -> Iterator[None]:
    """Lets the modules of ``root``, which the block wraps, be pickled and copied as plain ones.
    Values come from home when they are. A file names no class of the engine."""
    traces = {module: Trace(module) for module in root.modules()}
    yield
    copying: list[nn.Module] = []  # what a copy is made of now
    for module, trace in traces.items():
        trace.end(module)
    for module in traces:
        vars(module)[REDUCE] = _reducer(root, module, traces, copying)


def _reducer(
    root: nn.Module, module: nn.Module, traces: Traces, copying: list[nn.Module]
) -> Callable[[int], Any]:
    def reduce(protocol: int) -> Any:
        if not is_wrapped(root):
            for each in traces:
                vars(each).pop(REDUCE, None)
            return module.__reduce_ex__(protocol)
        parts = traces[module].without(module).__reduce_ex__(protocol)
        if copying:
            return parts
        copying.append(module)
        try:  # all at once, so that tied weights stay tied; what refers to the module still does
            return copy.deepcopy(parts, {id(module): module})
        finally:
            copying.clear()

    return reduce
