"""Around: a forward around a module's own, of which torch.compile sees only that."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ...core.run.replaced_forward import living
from ...torch_private import compiler, set_compiler


def around_own(
    module: nn.Module, run: Callable[[Callable, tuple, dict], Any]
) -> Callable[..., Any]:
    """Makes a forward for ``module`` that calls ``run(own, args, kwargs)``, where ``own`` is the
    module's own forward.

    torch.compile sees only ``own``, wherever ``run`` calls it, also in a later backward: what is
    around it decides at each call, which cannot be compiled.
    """
    own_forward, reference = module.__dict__.get("forward"), weakref.ref(module)
    run = torch.compiler.disable(run)

    def forward(*args: Any, **kwargs: Any) -> Any:
        there = compiler()

        def own(*args: Any, **kwargs: Any) -> Any:
            # Bound here: compiled, a reference would be one more graph for each block
            forward = own_forward or MethodType(type(module := living(reference)).forward, module)
            before = set_compiler(there)
            try:
                return forward(*args, **kwargs)
            finally:
                set_compiler(before)

        return run(own, args, kwargs)

    return torch.compiler.disable(forward, recursive=False)
