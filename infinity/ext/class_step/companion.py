"""Companion: steps the parameters of an optimizer that the engine does not move, by its own class.

outside     such a parameter: of a loss or another module, of a dtype that has no kernels (fp64,
            complex), of a sparse embedding. It stays where it is, and so does its state
plain       an optimizer of the class that was given, for them. It shares the books
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from ...core.params.books import OptimizerBooks
from ...core.seams import Extension, OutsideSteps
from ...core.step.known import Known
from ...core.step.plain_optimizer import PlainOptimizer
from ...core.step.rules import plain_step
from ...core.units.handle import HANDLE
from ...core.wrap.described_model import can_step
from ...errors import ConfigError, UsageError
from .entries import OwnCode

Groups = list[dict[str, Any]]


def outside_of(group: dict[str, Any]) -> list[torch.Tensor]:
    """Lists the parameters of ``group`` that the engine does not move."""
    return [param for param in group["params"] if HANDLE not in param.__dict__]


class Outside(Extension):
    """The parameters of one model that are trained where they are, by torch's own class."""

    @classmethod
    def unmoved(
        cls, model: Any, optimizers: Sequence[Any], config: Any, ranks: Any
    ) -> list[torch.Tensor]:
        """Lists those of a dtype without kernels, or of a sparse embedding. Raises ConfigError for
        any, and for parameters outside the model, unless this rank is alone: nobody would average
        their gradients."""
        sparse = {
            param
            for module in model.modules
            if getattr(module, "sparse", False) is True
            for param in module.parameters(recurse=False)
        }
        names = model.names
        trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        outside = [p for p in trained if p not in names or p in sparse or not can_step(p, config)]
        if outside and not ranks.alone:
            first = outside[0]
            raise ConfigError(
                f"parameter {names.get(first, ['outside the model'])[0]} ({type(first).__name__},"
                f" {first.dtype}, of shape {tuple(first.shape)}) cannot be trained over several"
                " ranks: fp32, bf16 and fp16 Parameters of the model with dense gradients can."
                " Train it in one process, or convert it."
            )
        return [param for param in outside if param in names]

    @classmethod
    def steps_outside(cls, given: Any, books: Any, known: Any) -> OutsideSteps:
        return Companion(given, books, known)


class Companion(OutsideSteps):
    """Steps what is outside, for one optimizer. Used from the thread that steps."""

    def __init__(self, given: torch.optim.Optimizer, books: OptimizerBooks, known: Known):
        self._known = known
        left_out = (*PlainOptimizer.REPLACED, *PlainOptimizer.HOOKS, "param_groups", "state")
        plain = object.__new__(type(given))
        vars(plain).update({k: v for k, v in vars(given).items() if k not in left_out})
        vars(plain).update({kind: OrderedDict() for kind in PlainOptimizer.HOOKS})
        plain.param_groups, plain.state = [], books
        self._plain, self._books = plain, books

    @torch.no_grad()
    def step(self, groups: Groups, clip: float) -> None:
        """Steps the parameters outside, as torch does. ``clip``: the factor of all gradients."""
        if not (own := self._take(groups)):
            return
        if isinstance(self._known, OwnCode) and self._known.measured is not None:
            raise UsageError(
                f"step(): {self._known.name} needs sums over all its parameters, and the engine"
                f" does not move {sum(len(group['params']) for group in own)} of them. Give these"
                " another optimizer: wrap_model(model, [first, second])."
            )
        for param in (param for group in own for param in group["params"]):
            if clip != 1.0 and param.grad is not None:
                param.grad.mul_(clip)
        plain_step(type(self._plain).step)(self._plain)

    def switch(self, groups: Groups, method: str) -> None:
        """Runs ``train`` or ``eval`` of the class on the parameters outside."""
        if self._take(groups):
            getattr(self._plain, method)()

    def load(self, state: dict[int, Any], groups: Groups, params: Sequence[torch.Tensor]) -> None:
        """Loads ``state``, by the numbers of ``params`` (those of ``groups``, in order), by torch's
        own rules for dtypes and devices."""
        if not (own := self._take(groups)):
            return
        numbers = {param: index for index, param in enumerate(params)}
        saved = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [numbers[param] for param in group["params"]]}
            for group in own
        ]
        wanted = {number for group in saved for number in group["params"]}
        of_plain = {number: values for number, values in state.items() if number in wanted}
        self._plain.load_state_dict({"state": of_plain, "param_groups": saved})
        loaded, self._plain.state = self._plain.state, self._books
        for param, values in loaded.items():
            self._books[param] = values

    def _take(self, groups: Groups) -> Groups:
        """Gives the plain optimizer its part of ``groups``, and returns it."""
        own = [group | {"params": outside_of(group)} for group in groups]
        self._plain.param_groups = [group for group in own if group["params"]]
        return self._plain.param_groups
