"""Counters: the numbers that a rule keeps for each parameter beside its moments.

They are fp32 scalars in ``optimizer.state``, under torch's names, on every rank. A step takes them
from there, and the new ones are put there when it is submitted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

ParamGroup = Mapping[str, Any]
Numbers = dict[str, torch.Tensor]


class Counters(ABC):
    """What a rule counts, by torch's names. Has no state of its own."""

    settings: tuple[str, ...] = ()  # keys of a group that only this reads

    @staticmethod
    def unusable(param_group: ParamGroup) -> str:
        """Returns which settings of ``param_group`` have no step, and the remedy; or ""."""
        return ""

    @staticmethod
    @abstractmethod
    def first(param_group: ParamGroup) -> Numbers:
        """Returns the numbers before the first step of a parameter of ``param_group``."""

    @staticmethod
    @abstractmethod
    def step(
        param_group: ParamGroup, step: int, numbers: Numbers
    ) -> tuple[dict[str, float], Numbers]:
        """Returns the hyperparameters of a ``step``, counted from 1, and the numbers after it."""


class MuProduct(Counters):
    """NAdam's product of its momentum's factors."""

    @staticmethod
    def first(param_group: ParamGroup) -> Numbers:
        return {"mu_product": _scalar(1.0)}

    @staticmethod
    def step(
        param_group: ParamGroup, step: int, numbers: Numbers
    ) -> tuple[dict[str, float], Numbers]:
        decay = 0.96 ** (step * param_group["momentum_decay"])
        product = numbers["mu_product"] * (param_group["betas"][0] * (1.0 - 0.5 * decay))
        return {"mu_product": product.item()}, {"mu_product": product}


class StepSize(Counters):
    """ASGD's step size, and the weight of its average. torch sets both for the next step."""

    settings = ("alpha", "t0")

    @staticmethod
    def first(param_group: ParamGroup) -> Numbers:
        return {"eta": _scalar(float(param_group["lr"])), "mu": _scalar(1.0)}

    @staticmethod
    def step(
        param_group: ParamGroup, step: int, numbers: Numbers
    ) -> tuple[dict[str, float], Numbers]:
        lr = float(param_group["lr"])
        eta = lr / ((1 + param_group["lambd"] * lr * step) ** param_group["alpha"])
        after = {"eta": _scalar(eta), "mu": _scalar(1 / max(1, step - param_group["t0"]))}
        return {name: value.item() for name, value in numbers.items()}, after


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")
