"""Optimizers as scripts define them, and a wrapper that makes its optimizer itself."""

from __future__ import annotations

import torch
from torch import optim


class Momentum(optim.Optimizer):
    """A sum of gradients, as many define it."""

    def __init__(self, params, lr=0.1, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param, self.state[param])

    def update(self, group, param, state):
        if "sum" not in state:
            state["sum"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["sum"].mul_(group["decay"]).add_(param.grad)
        param.add_(state["sum"], alpha=-group["lr"])


class Trusting(Momentum):
    """A rate by the norms of the parameter and of its step, as LAMB has it; counts its steps."""

    def update(self, group, param, state):
        state["step"] = state.get("step", 0) + 1
        state.setdefault("sum", torch.zeros_like(param)).lerp_(param.grad, 1 - group["decay"])
        by = state["sum"] / (1 - group["decay"] ** state["step"])
        param.sub_(by * (group["lr"] * param.norm() / by.norm().add(1e-6)))


class MuonWithAdam(Momentum):
    """Matrices by their orthogonal factor, all others as Adam does, in one class."""

    def __init__(self, params, lr=0.02):
        params = list(params)
        matrices = [param for param in params if param.ndim == 2]
        others = [param for param in params if param.ndim != 2]
        groups = [
            {"params": matrices, "use_muon": True},
            {"params": others, "use_muon": False},
        ]
        super().__init__([group for group in groups if group["params"]], lr)

    def update(self, group, param, state):
        if not group["use_muon"]:
            state["step"] = state.get("step", 0) + 1
            for name, value in (("first", param.grad), ("second", param.grad.square())):
                state.setdefault(name, torch.zeros_like(param)).lerp_(value, 0.1)
            unbiased = 1 - 0.9 ** state["step"]
            root = (state["second"] / unbiased).sqrt() + 1e-8
            param.addcdiv_(state["first"] / unbiased, root, value=-group["lr"])
            return
        state.setdefault("buffer", torch.zeros_like(param)).mul_(0.95).add_(param.grad)
        matrix = state["buffer"] / (state["buffer"].norm() + 1e-7)
        for _ in range(3):
            product = matrix @ matrix.mT
            matrix = 3.4 * matrix + (2.0 * product @ product - 4.8 * product) @ matrix
        param.add_(matrix, alpha=-group["lr"])


class Sharpness(optim.Optimizer):
    """Sharpness-aware minimization with the constructor of the public classes
    (https://arxiv.org/abs/2010.01412): it makes its optimizer from the parameters."""

    def __init__(self, params, base_optimizer, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base_optimizer(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure):
        groups = [(group["rho"], param) for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for _, param in groups]).norm()
        for rho, param in groups:
            self.state[param]["before"] = param.data.clone()
            param.add_(param.grad * (rho / (norm + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for _, param in groups:
            param.data = self.state[param]["before"]
        self.base_optimizer.step()
