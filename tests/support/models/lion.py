"""Lion in plain torch, as its paper has it."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, as its users write it."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                beta1, beta2 = group["betas"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                direction = state["exp_avg"].mul(beta1).add(param.grad, alpha=1 - beta1).sign()
                param.add_(direction, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(param.grad, alpha=1 - beta2)
