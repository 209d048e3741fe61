"""Experts: finds modules of whose weights a forward reads some rows only, and marks those with
divided experts, whose tokens travel to the data rank that has their expert."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from .dtensors import is_distributed

MARK = "_infinity_divided"
LEAST_NBYTES = 64 * 1024  # of an expert: smaller ones are read faster together
INDICES = ("top_k_index", "router_indices")  # the argument that has the router's choice
LEAST_TABLE_NBYTES = 1024 * 1024  # of an embedding
KNOWN = ("torch.", "transformers.")  # whose modules read no parameters of others
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
    """Tells whether the forward of the class of ``module`` calls no code of users, who could read
    its parameters meanwhile."""
    children = [child for child in module.modules() if child is not module]
    every_module = torch.nn.modules.module
    return (
        not any(getattr(child, name) for child in children for name in HOOKS)
        and not any("forward" in child.__dict__ for child in children)
        and all(type(child).__module__.startswith(KNOWN) for child in children)
        and not (children and any(getattr(every_module, name) for name in HOOKS_OF_ALL))
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
    )


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
