"""Experts: marks modules with divided experts. Tokens travel to the data rank that has their
expert."""

from __future__ import annotations

from typing import Any

from torch import nn

from .dtensors import is_distributed

MARK = "_infinity_divided"


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
