"""Retie: ties parameters again that were tied before the model was sharded or copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.seams import Change
from ...core.units.forms import local_of
from ...core.units.handle import raw_grad
from ...errors import ConfigError


class Ties(Change):
    """Records the tied parameters, and how to untie them."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._groups: list[tuple[dict, list]] = []

    def tie(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        pairs: Sequence[tuple[str, str]],
    ) -> None:
        """Replaces the second parameter of each of ``pairs`` by the first, in the model and in the
        optimizers.

        Raises ConfigError for an unknown name, and for parameters with different placements or
        values.
        """
        for first, second in pairs:
            _tie(model, first, second, self._replaced)
        gone = {before for *_, before in self._replaced} - set(model.parameters())
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group in groups if gone else ():
            self._groups.append((group, group["params"]))
            group["params"] = [param for param in group["params"] if param not in gone]

    def make(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: Any
    ) -> None:
        """Ties the pairs of ``config.tied``, as :meth:`tie` does."""
        self.tie(model, optimizers, config.tied)

    def undo(self) -> None:
        """Restores the separate parameters."""
        for module, name, before in reversed(self._replaced):
            module._parameters[name] = before
        for group, params in self._groups:
            group["params"] = params


def _tie(
    model: nn.Module, first: str, second: str, replaced: list[tuple[nn.Module, str, nn.Parameter]]
) -> None:
    params = dict(model.named_parameters(remove_duplicate=False))
    if missing := [name for name in (first, second) if name not in params]:
        raise ConfigError(f"tied: {type(model).__name__} has no parameter {missing[0]}")
    one, other = params[first], params[second]
    if one is other:
        return
    if (
        one.shape != other.shape
        or one.dtype != other.dtype
        or getattr(one, "placements", None) != getattr(other, "placements", None)
    ):
        ways = [
            f"{tuple(p.shape)} {p.dtype} {getattr(p, 'placements', '')}".strip()
            for p in (one, other)
        ]
        raise ConfigError(
            f"tied: {first} is {ways[0]} and {second} is {ways[1]}: they cannot be one"
        )
    mine, theirs = local_of(one), local_of(other)
    if not mine.is_meta and not theirs.is_meta and not torch.equal(mine, theirs):
        raise ConfigError(
            f"tied: {first} and {second} have other values: give both the same, or leave them two"
        )
    if raw_grad(other) is not None:
        raise ConfigError(
            f"tied: {second} has a gradient already: call zero_grad() before wrap_model"
        )
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is other:
                replaced.append((module, name, other))
                module._parameters[name] = one
