"""Measured: a class whose step needs a number of all parameters, and the class steps that it takes.

Prodigy estimates the distance to the solution once a step, from sums over all parameters
(https://arxiv.org/abs/2306.06101). Its own code gives both:

measuring   a class step of each parameter, of which only the sums that it leaves in its group count
settled     the sums of all parameters, and what the class makes of them: settings of the groups
stepping    a class step of each parameter, with the new distance forced on it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import UsageError

# Settings that the class takes from its first group, for all of them
OF_FIRST = (
    "betas",
    "beta3",
    "d",
    "d_max",
    "d_numerator",
    "d_coef",
    "growth_rate",
    "decouple",
    "use_bias_correction",
    "fsdp_in_use",
    "k",
)
Settings = dict[str, Any]
Group = Mapping[str, Any]
Sums = tuple[float, float]  # numerator and denominator


class Prodigy:
    """The sums of prodigyopt's Prodigy in one step. ``groups``: of the optimizer."""

    def __init__(self, groups: Sequence[Group]):
        of_first = {key: groups[0][key] for key in OF_FIRST}
        self._counts = [group["k"] for group in groups]
        self._groups = [
            {key: group[key] for key in group if key != "params"} | of_first for group in groups
        ]
        self._rate = max(group["lr"] for group in groups)
        if others := [group["lr"] for group in groups if group["lr"] not in (self._rate, 0.0)]:
            raise UsageError(
                f"step(): Prodigy has groups with lr={self._rate} and lr={others[0]}: it takes one"
                " rate, or 0 for a group that stays"
            )
        self._changes: Settings | None = None  # None: there are no sums yet
        self._distance = 0.0

    @property
    def is_settled(self) -> bool:
        return self._changes is not None

    def measuring(self, index: int) -> Settings:
        """Returns the settings by which a parameter of a group leaves its own sums."""
        group = self._groups[index] | {"d_numerator": 0.0}
        return {key: value for key, value in group.items() if key != "d_denom"}

    @staticmethod
    def sums_of(changed: Settings) -> Sums:
        """Returns the sums that a measured parameter has left."""
        return changed.get("d_numerator", 0.0), changed.get("d_denom", 0.0)

    def settle(self, sums: Iterable[Sums]) -> None:
        """Makes the new distance of ``sums``, in the order of the groups' parameters."""
        first, numerator, denominator = self._groups[0], 0.0, 0.0
        for of_one in sums:
            numerator, denominator = numerator + of_one[0], denominator + of_one[1]
        beta3 = first["beta3"] if first["beta3"] is not None else math.sqrt(first["betas"][1])
        self._distance = distance = first["d"]
        self._changes = {}
        if denominator == 0:
            return
        numerator += first["d_numerator"] * beta3
        estimate = distance
        largest = first["d_max"]
        if self._rate > 0:
            estimate = first["d_coef"] * numerator / denominator
            if distance == first["d0"]:
                distance = max(distance, estimate)
            largest = max(largest, estimate)
            distance = min(largest, distance * first["growth_rate"])
        self._distance = distance
        self._changes = {
            "d_numerator": numerator,
            "d_denom": denominator,
            "d": distance,
            "d_max": largest,
            "d_hat": estimate,
        }

    def stepping(self, index: int) -> Settings:
        """Returns the settings by which a parameter of a group is stepped. The class takes the
        least of ``d_max`` and the grown distance for the new one."""
        if not self._changes:
            return dict(self._groups[index])
        forced = {"d_coef": 0.0, "d_max": self._distance, "growth_rate": math.inf}
        return self._groups[index] | forced

    def changes(self, index: int) -> Settings:
        """Returns the settings of a group after the step."""
        if not self._changes:
            return {}
        return self._changes | {"k": self._counts[index] + 1}

    def complete(self, index: int, param: torch.Tensor, state: Settings) -> None:
        """Steps a parameter whose own sums are zero, which the class leaves as it is."""
        group = self._groups[index]
        if not self._changes or "k" not in group:
            return
        beta1, beta2 = group["betas"]
        count = group["k"] + 1
        correction = (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        rate = group["d"] * self._rate * (correction if group["use_bias_correction"] else 1)
        state["step"] += 1
        denominator = state["exp_avg_sq"].sqrt().add_(self._distance * group["eps"])
        if group["weight_decay"] != 0 and group["decouple"]:
            param.add_(param, alpha=-group["weight_decay"] * rate)
        if beta1 > 0:
            param.addcdiv_(state["exp_avg"], denominator, value=-rate)
        else:
            param.addcdiv_(param.grad, denominator, value=-rate * group["d"])
