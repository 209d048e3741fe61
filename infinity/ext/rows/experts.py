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

from ...core.params import transforms
from ...core.units.forms import form_of, is_plain, local_of
from ...torch_private import count_dispatch_modes, count_function_modes
from ..packed.packed import moved_tensors

MARK = "_infinity_divided"
LEAST_NBYTES = 64 * 1024  # of an expert: smaller ones are read faster together
OWN_FORWARD = "experts_forward"  # of what brings tokens to experts: the forward of their class
CLAMPS = "batched_mm"  # computes other ranks' tokens, too, by the last expert, times zero
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
    return [param for param in own if not is_plain(param)]


def divides_experts(model: Any) -> bool:
    """Tells whether any module of ``model`` has divided experts."""
    return isinstance(model, nn.Module) and any(map(divided_parameters, model.modules()))


def exchanges_of(module: nn.Module) -> list[Any]:
    """Lists the objects that exchange tokens for ``module``, if this rank has a part of its experts
    (transformers' EPImplementation). Each calls the forward of the module's class."""
    if "forward" not in module.__dict__:
        return []
    forward = inspect.unwrap(module.__dict__["forward"])
    cells = getattr(forward, "__closure__", None) if _is_known(forward) else None
    exchanges = [cell.cell_contents for cell in cells or () if _is_exchange(cell.cell_contents)]
    # One may choose between others.
    return [
        *exchanges,
        *(each for one in exchanges for each in vars(one).values() if _is_exchange(each)),
    ]


def _is_exchange(value: Any) -> bool:
    return OWN_FORWARD in getattr(value, "__dict__", ())


def has_experts(module: nn.Module) -> bool:
    """Tells whether ``module`` has fused experts, of which a forward reads the chosen: all, or this
    rank's."""
    kind, count = type(module), getattr(module, "num_experts", None)
    own, exchanges = moved_tensors(module), exchanges_of(module)
    return (
        isinstance(count, int)
        and _has_known_forward(module, exchanges)
        and kind.__module__.startswith("transformers.")
        and any(name in inspect.signature(kind.forward).parameters for name in INDICES)
        and bool(own)
        and all(
            form_of(param).moves(param)
            and is_plain(param) is not bool(exchanges)
            and param.dim() > 1
            and len(local_of(param)) == count
            and local_of(param).is_contiguous()
            for param in own
        )
        and sum(local_of(param).nbytes for param in own) >= count * LEAST_NBYTES
    )


def _has_known_forward(module: nn.Module, exchanges: list[Any]) -> bool:
    """Tells whether the forward of ``module`` is its class's, or one of transformers' around it."""
    if not exchanges:
        return "forward" not in module.__dict__
    own = type(module).forward
    return _is_known(module.__dict__["forward"]) and all(
        getattr(getattr(each, OWN_FORWARD), "__func__", None) is own for each in exchanges
    )


def clamps_choice(module: nn.Module) -> bool:
    """Tells whether ``module`` computes the tokens of other ranks' experts by its own last one."""
    return bool(exchanges_of(module)) and _implementation(module) == CLAMPS


def runs_known_code(module: nn.Module) -> bool:
    """Tells whether the forward of the class of ``module`` is torch's or transformers' own, and
    calls no code of users, who could read its parameters meanwhile."""
    children = [child for child in module.modules() if child is not module]
    every_module = torch.nn.modules.module
    return (
        all(_has_own_code(each) for each in (module, *children, *exchanges_of(module)))
        and _has_known_implementation(module)
        and not any(getattr(child, name) for child in children for name in HOOKS)
        and not any("forward" in child.__dict__ for child in children)
        and not (children and any(getattr(every_module, name) for name in HOOKS_OF_ALL))
        and not count_function_modes()
        and not count_dispatch_modes()
        and not transforms.are_running()
    )


def _has_own_code(module: Any) -> bool:
    """Tells whether all methods of ``module`` are as its library wrote them. Its forward may be
    replaced on the object: who replaced it calls the class's."""
    for base in type(module).__mro__:
        if base in (nn.Module, object):
            return True
        methods = {n: each for n, each in vars(base).items() if isinstance(each, FunctionType)}
        if (methods.keys() - {"forward"}) & module.__dict__.keys():
            return False
        if not all(map(_is_known, methods.values())):
            return False
    return False


def _is_known(function: Any) -> bool:
    """Tells whether the code of ``function``, and of what it wraps, is torch's or transformers', or
    of our own exchange."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_folders()):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _folders() -> tuple[str, ...]:
    names = ("torch", "transformers", "infinity.ext.experts_parallel")
    modules = (sys.modules.get(name) for name in names)
    return tuple(
        f"{os.path.dirname(each.__file__)}{os.sep}" for each in modules if each is not None
    )


def _has_known_implementation(module: nn.Module) -> bool:
    """Tells whether what transformers computes experts with reads none without tokens."""
    name = _implementation(module)
    if name in ("eager", None):
        return True
    library = sys.modules.get("transformers.integrations.moe")
    chosen = getattr(library, "ALL_EXPERTS_FUNCTIONS", {})
    return name in IMPLEMENTATIONS and name in chosen and _is_known(chosen[name])


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


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
