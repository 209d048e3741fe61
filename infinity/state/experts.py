"""Experts: finds modules of whose weights a forward reads some rows only, and marks those with
divided experts, whose tokens travel to the data rank that has their expert."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .dtensors import is_distributed

MARK = "_infinity_divided"
LEAST_NBYTES = 64 * 1024  # of an expert: smaller ones are read faster together
INDEX = "top_k_index"  # the argument that has the router's choice
LEAST_TABLE_NBYTES = 1024 * 1024  # of an embedding
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
        and kind.__module__.startswith("transformers.")
        and INDEX in inspect.signature(kind.forward).parameters
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
