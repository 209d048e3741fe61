"""Token-wise: finds modules whose result for a token depends on the others that they are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

TOKENS = 1  # dim of the tokens in arguments and results
NEAR = 1e-3  # times the largest element: products of more rows are rounded otherwise
WITHIN = 8  # places of the last bit


def computes_positions(module: nn.Module) -> bool:
    """Tells whether ``module`` only turns positions into embeddings, without parameters."""
    takes = inspect.signature(module.forward).parameters
    return "position_ids" in takes and next(module.parameters(), None) is None


def is_like(value: Any, places: torch.Tensor) -> bool:
    """Tells whether ``value`` is a tensor whose rows are ``places``, of a part's tokens."""
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and value.shape[-1:] == places.shape
        and bool((value == places.to(value.device)).all())
    )


@torch.no_grad()
def depends_on_others(
    module: nn.Module,
    given: Any,
    places: torch.Tensor,
    others: torch.Tensor,
    seeing: Callable[[], AbstractContextManager[list[tuple]]],
) -> bool:
    """Tells whether ``module`` computes something else for the arguments ``given``, of the tokens
    at ``places``, when tokens at ``others`` precede them. ``seeing``: notes what it gives its
    attention."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        for each, _ in modes:
            each.training = False  # nothing is drawn
        tensors = []
        for args, kwargs in (given, _longer(given, places, others)):
            with seeing() as seen:
                output = type(module).forward(module, *args, **kwargs)
            tensors.append([*_tensors((output, seen))])
    except Exception:  # noqa: BLE001 - its arguments have another form: nothing is known
        return False
    finally:
        for each, was in modes:
            each.training = was
    sizes = places.numel(), places.numel() + others.numel()
    for part, longer in zip(*tensors):
        dims = (dim for dim in (TOKENS, TOKENS + 1) if _is_of(part, longer, dim, sizes))
        if (dim := next(dims, None)) is not None:
            longer = longer.narrow(dim, others.numel(), places.numel())
        if part.shape == longer.shape and not _is_near(part, longer):
            return True
    return False


def _is_of(part: torch.Tensor, longer: torch.Tensor, dim: int, sizes: tuple[int, int]) -> bool:
    """Tells whether ``dim`` is that of the tokens, of which there are ``sizes``."""
    return part.dim() == longer.dim() > dim and (part.shape[dim], longer.shape[dim]) == sizes


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return bool((one == other).all())
    near = max(NEAR, WITHIN * torch.finfo(one.dtype).eps)
    largest = one.abs().amax() if one.numel() else 0.0
    return bool(((one - other).abs() <= near * largest).all() | one.isnan().any())


def _longer(value: Any, places: torch.Tensor, others: torch.Tensor) -> Any:
    """Returns ``value`` with other tokens before those that it has."""
    if isinstance(value, (tuple, list)):
        return type(value)(_longer(each, places, others) for each in value)
    if isinstance(value, dict):
        return {key: _longer(each, places, others) for key, each in value.items()}
    if is_like(value, places):
        rows = others.to(value).expand(*value.shape[:-1], -1)
        return torch.cat([rows, value], -1)
    count = places.numel()
    if isinstance(value, torch.Tensor) and value.dim() > TOKENS and value.shape[TOKENS] == count:
        more = value * 0.5 if value.is_floating_point() else value
        return torch.cat([*[more] * (others.numel() // count), value], TOKENS)
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (int, float)):
        yield torch.tensor(float(value), device="cpu")
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
