"""Mixture: the numbers of AdEMAMix (https://arxiv.org/abs/2409.03137) that change with its step."""

from __future__ import annotations

import math

from ...core.step.counters import Counters, Numbers, ParamGroup


class Mixture(Counters):
    """AdEMAMix's schedules: of its slow average's rate (beta3), and of that average's weight. It
    keeps no number."""

    settings = ("alpha", "t_alpha_beta3")

    @staticmethod
    def unusable(group: ParamGroup) -> str:
        steps, betas = group["t_alpha_beta3"], group["betas"]
        if steps is None or (steps > 0 and betas[0] > 0 and betas[2] > 0):
            return ""
        return (
            f"t_alpha_beta3={steps} with betas={betas}: it divides by the first, and takes the"
            " logarithms of the first and last of the others. Set numbers above 0, or None"
        )

    @staticmethod
    def first(group: ParamGroup) -> Numbers:
        return {}

    @staticmethod
    def step(group: ParamGroup, step: int, numbers: Numbers) -> tuple[dict[str, float], Numbers]:
        beta1, _, beta3 = map(float, group["betas"])
        alpha, steps = float(group["alpha"]), group["t_alpha_beta3"]
        if steps is None:
            return {"beta3": beta3, "alpha": alpha}, {}
        fast, slow, part = math.log(beta1), math.log(beta3), step / float(steps)
        try:
            rate = math.exp(fast * slow / ((1.0 - part) * slow + part * fast))
        except (OverflowError, ZeroDivisionError):  # long after its end, if beta3 is the smaller
            rate = beta3
        return {"beta3": min(rate, beta3), "alpha": min(step * alpha / float(steps), alpha)}, {}
