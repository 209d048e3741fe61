"""Runs the engine's own work outside of users' modes and transforms, and refuses passes whose
tensors have no bytes.

mode        handles or observes a thread's operations in torch: counters, selective checkpoints,
            FakeTensorMode, tracers
transform   a level of torch.func

Under a mode, bytes from home would be the mode's result: nothing under FakeTensorMode, or a value
that it cached earlier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FunctionType
from typing import ParamSpec, TypeVar

import torch

from ...errors import UsageError
from ...torch_private import (
    FakeTensor,
    ModeKey,
    TransformType,
    UnsupportedFakeTensor,
    count_dispatch_modes,
    disable_modes,
    graph_in_making,
    innermost_transform,
    is_of_transform,
    mode_of,
    skip_code,
    tracing_state,
    transform_stack,
    without_transforms,
)
from ..units.forms import local_of
from . import mistakes

P = ParamSpec("P")
F = TypeVar("F", bound=FunctionType)
R = TypeVar("R")

WITHOUT_BYTES = {
    ModeKey.FAKE: "FakeTensorMode",
    ModeKey.PROXY: "a tracer (make_fx, export)",
    ModeKey.FUNCTIONAL: "functionalization",
}


def outside_modes(work: Callable[P, R]) -> Callable[P, R]:
    """Wraps ``work``, a function of the engine, to run outside of all modes and transforms."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not count_dispatch_modes() and innermost_transform() is None:
            return work(*args, **kwargs)
        with ExitStack() as suspended:
            if innermost_transform() is not None:
                suspended.enter_context(without_transforms())
            suspended.enter_context(disable_modes())
            return work(*args, **kwargs)

    return run


def makes_hooks(function: F) -> F:
    """Keeps torch.compile from tracing the functions that ``function`` defines, and all that they
    call: autograd calls them in the middle of compiled code."""
    for inner in function.__code__.co_consts:
        if isinstance(inner, CodeType) and skip_code is not None:
            skip_code(inner)
    return function


def is_compiling() -> bool:
    """Tells whether torch is compiling."""
    return graph_in_making() is not None


def leave_graph(name: str) -> None:
    """Leaves ``name`` out of a graph that torch.compile is making now: a tensor without bytes, of
    which torch asks a property."""
    if is_compiling():
        raise UnsupportedFakeTensor(f"{name} is at home")


def has_bytes(tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` has bytes of its own: not on meta, of FakeTensorMode, or of a
    transform."""
    local = tensor if type(tensor) is torch.Tensor else local_of(tensor)
    return not (local.is_meta or isinstance(local, FakeTensor) or is_of_transform(local))


def refuse_without_bytes(operation: str, *, transforms: bool = True) -> None:
    """Raises UsageError if ``operation`` would run on tensors without bytes, or be recorded to run
    without the engine. ``transforms``: also if a transform saves tensors for its backward."""
    if not count_dispatch_modes() and innermost_transform() is None and tracing_state() is None:
        return
    if (mode := _without_bytes(transforms)) is not None:
        instead = mistakes.advice() or (
            "Do it with the model before wrap_model, or with another one on torch.device('meta')"
            " that is not wrapped."
        )
        raise UsageError(
            f"{operation} of a wrapped model under {mode}: its weights come from home, which is not"
            f" done there. {instead}"
        )


def _without_bytes(transforms: bool) -> str | None:
    for key, name in WITHOUT_BYTES.items():
        if mode_of(key) is not None:
            return name
    if tracing_state() is not None:
        return "torch.jit.trace"
    levels = transform_stack() or [] if transforms and torch.is_grad_enabled() else []
    # The tensors that these save for a backward have no storage.
    return (
        "a transform of torch.func"
        if any(level.key() != TransformType.Functionalize for level in levels)
        else None
    )
