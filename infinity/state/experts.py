"""Experts: finds modules of whose weights a forward reads some rows only, and marks those with
divided experts, whose tokens travel to the data rank that has their expert."""

from __future__ import annotations

import inspect
import os
import sys
from types import FunctionType
from typing import Any

import torch
from torch import nn

from . import transforms
from .dtensors import is_distributed

MARK = "_infinity_divided"
LEAST_NBYTES = 64 * 1024  # of an expert: smaller ones are read faster together
INDICES = ("top_k_index", "router_indices")  # the argument that has the router's choice
LEAST_TABLE_NBYTES = 1024 * 1024  # of an embedding
# What transformers may compute experts with: its kernels read no expert without tokens.
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKS_OF_ALL = ("_global_forward_pre_hooks", "_global_forward_hooks")
SCALED = "ScaledWordEmbedding"  # embeddings of transformers that multiply what they look up


def mark_divided(module: nn.Module) -> None:
    """Marks ``module``, whose own parameters are this rank's part of the experts."""
    module.__dict__[MARK] = True


def divided_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters of ``module`` itself that are parts of divided experts."""
    own = module.parameters(recurse=False) if MARK in module.__dict__ else ()
    return [param for param in own if is_distributed(param)]


def divides_experts(model: Any) -> bool:
    """Tells whether any module of ``model`` has divided experts."""
    return isinstance(model, nn.Module) and any(map(divided_parameters, model.modules()))


def has_experts(module: nn.Module) -> bool:
    """Tells whether ``module`` has fused experts, of which a forward reads the chosen."""
    kind, count = type(module), getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    return (
        isinstance(count, int)
        and MARK not in module.__dict__
        and "forward" not in module.__dict__
        and kind.__module__.startswith("transformers.")
        and any(name in inspect.signature(kind.forward).parameters for name in INDICES)
        and bool(own)
        and all(
            type(param) is nn.Parameter
            and param.dim() > 1
            and len(param) == count
            and param.is_contiguous()
            for param in own
        )
        and sum(param.nbytes for param in own) >= count * LEAST_NBYTES
    )


def runs_known_code(module: nn.Module) -> bool:
    """Tells whether the forward of the class of ``module`` is torch's or transformers' own, and
    calls no code of users, who could read its parameters meanwhile."""
    children = [child for child in module.modules() if child is not module]
    every_module = torch.nn.modules.module
    return (
        all(_has_own_code(each) for each in (module, *children))
        and _has_known_implementation(module)
        and not any(getattr(child, name) for child in children for name in HOOKS)
        and not any("forward" in child.__dict__ for child in children)
        and not (children and any(getattr(every_module, name) for name in HOOKS_OF_ALL))
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
        and not transforms.are_running()
    )


def _has_own_code(module: nn.Module) -> bool:
    """Tells whether all methods of ``module`` are as its library wrote them. Its forward may be
    replaced on the object: who replaced it calls the class's."""
    for base in type(module).__mro__:
        if base is nn.Module:
            return True
        methods = {n: each for n, each in vars(base).items() if isinstance(each, FunctionType)}
        if (methods.keys() - {"forward"}) & module.__dict__.keys():
            return False
        if not all(map(_is_known, methods.values())):
            return False
    return False


def _is_known(function: Any) -> bool:
    """Tells whether the code of ``function``, and of what it wraps, is torch's or transformers'."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_folders()):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _folders() -> tuple[str, ...]:
    found = (sys.modules.get(name) for name in ("torch", "transformers"))
    return tuple(f"{os.path.dirname(each.__file__)}{os.sep}" for each in found if each is not None)


def _has_known_implementation(module: nn.Module) -> bool:
    """Tells whether what transformers computes experts with reads none without tokens."""
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if name in ("eager", None):
        return True
    library = sys.modules.get("transformers.integrations.moe")
    chosen = getattr(library, "ALL_EXPERTS_FUNCTIONS", {})
    return name in IMPLEMENTATIONS and name in chosen and _is_known(chosen[name])


def is_frozen_table(module: nn.Module) -> bool:
    """Tells whether ``module`` is a large frozen embedding, of which a forward reads the rows of
    its tokens."""
    kind = type(module)
    return (
        isinstance(module, nn.Embedding)
        and (kind is nn.Embedding or _is_scaled(kind))
        and "forward" not in module.__dict__
        and module.max_norm is None
        and type(module.weight) is nn.Parameter
        and not module.weight.requires_grad
        and module.weight.is_contiguous()
        and module.weight.nbytes >= LEAST_TABLE_NBYTES
    )


def _is_scaled(kind: type) -> bool:
    return kind.__name__.endswith(SCALED) and kind.__module__.startswith("transformers.")
