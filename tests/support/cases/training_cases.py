"""What the tests of training share.

Words used here: **home**, **least** as in `models.py`; **run**, **plain**, **wrapped**, **same
bits**, **yardstick** as in `runs.py`. **prescribed**: with gradients that the test gives, so that
two optimizers see the same ones. **well-conditioned**: AdamW with eps=1e-3; the rounding of a
gradient then moves an update by rounding only, so that plain and wrapped can be held to rtol 1e-5,
atol 2e-6, a hundredth of what a forgotten weight decay does in a step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    at_home,
    loss_of,
    survey,
    ties_away,
    tokens,
    transformer,
    with_least,
)
from runs import adamw, ulp
from torch import nn
from twins import of_this_test, twin

import infinity

SEED = 20
LR = 1e-2
STEPS = 4
CLIP_STEPS = (1, 3)
DTYPES = {"fp32": None, "bf16": "bf16"}


def a_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = transformer(SEED)
    return model, adamw(model, LR)


# The hardest home and the easiest: what holds in both may be expected between them.
both_ends = pytest.mark.parametrize("home", ["nvme", "device"])


def hardest(
    home: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **more: Any
) -> dict[str, Any]:
    """Everything at home on ``home``; on disk with the least host memory, so with gradients on disk
    too."""
    config = at_home(home, home, folder, **more)
    return with_least(model, optimizer, config) if home == "nvme" else config


def within_ulps(ours: dict, theirs: dict, largest: dict, count: int) -> None:
    """Raises unless every element is within ``count`` ulps; the ulp is that of the largest value
    the element has had, which ``largest`` keeps: an element that passes zero keeps the rounding of
    where it came from.
    """
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        largest[name] = torch.maximum(expected.abs(), largest[name])
        size = ulp(largest[name])
        outside = ~((ours[name] - expected).abs() <= count * size)  # so that a NaN fails
        worst = ((ours[name] - expected).abs() / size).max().item() if outside.any() else 0
        assert not bool(outside.any()), (
            f"{name}: {int(outside.sum())} elements are up to {worst:.1f} ulps off, not {count}"
        )


def sizes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().abs() for name, value in model.state_dict().items()}


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """a b + c of fp32 tensors, rounded once: the product of two fp32 numbers is exact in fp64."""
    b = b if torch.is_tensor(b) else torch.tensor(b, dtype=torch.float32)
    return (a.double() * b.double() + c.double()).float()


class ReferenceAdamW:
    """AdamW over fp32 masters that the test keeps; ``round`` makes the weights of a plain model of
    them.

    The order of operations is torch's (`torch/optim/adam.py`, single tensor); each lerp and addcmul
    rounds as one fused multiply-add, and the square root is the nearest one.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: dict[str, torch.Tensor],
        *,
        lr: float = LR,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        round: Callable[[torch.Tensor], torch.Tensor] = ties_away,
        keep: Callable[[torch.Tensor], torch.Tensor] = lambda moment: moment,
    ) -> None:
        self.model, self.round, self.keep = model, round, keep
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.masters = {name: value.detach().float().clone() for name, value in masters.items()}
        self.m = {name: torch.zeros_like(value) for name, value in self.masters.items()}
        self.v = {name: torch.zeros_like(value) for name, value in self.masters.items()}
        self.steps = dict.fromkeys(self.masters, 0)
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        for name, param in self.model.named_parameters():
            param.copy_(self.round(self.masters[name]))

    def step(self, grads: dict[str, torch.Tensor]) -> None:
        beta1, beta2 = self.betas
        for name, grad in grads.items():
            self.steps[name] += 1
            count = self.steps[name]
            p, g, m, v = self.masters[name], grad.float(), self.m[name], self.v[name]
            p = p * (1 - self.lr * self.weight_decay)
            m = fma(g - m, 1 - beta1, m)
            v = fma(g * (1 - beta2), g, v * beta2)
            root = v.double().sqrt().float()
            denominator = root / (1 - beta2**count) ** 0.5 + self.eps
            p = p + (m * -(self.lr / (1 - beta1**count))) / denominator
            self.masters[name], self.m[name], self.v[name] = p, self.keep(m), self.keep(v)
        self.write()


def bf16_transformer() -> nn.Module:
    return transformer(SEED).bfloat16()


def named_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def well_conditioned(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3, weight_decay=0.1)


Loop = Callable[[nn.Module, torch.optim.Optimizer], Any]


def assert_trains_alike(
    loop: Loop,
    model: nn.Module,
    home: str,
    folder: Path,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = well_conditioned,
    rtol: float = 1e-5,
    atol: float = 2e-6,
    **more: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Runs ``loop`` on a plain copy and on the wrapped model; what it returns, weights, buffers and
    optimizer state agree. Returns the wrapped pair."""

    def plain() -> tuple[Any, dict[str, Any], dict[str, Any]]:
        its_model = copy.deepcopy(model)
        its_optimizer = make(its_model)
        torch.manual_seed(SEED)
        seen = loop(its_model, its_optimizer)
        return seen, its_model.state_dict(), its_optimizer.state_dict()

    expected, weights, its = twin(plain, of_this_test())
    optimizer = make(model)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, folder, **more)
    )
    torch.manual_seed(SEED)
    found = loop(model, optimizer)

    def close(ours: Any, theirs: Any, what: str) -> None:
        torch.testing.assert_close(
            ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )

    close(found, expected, "what the loop saw")
    close(model.state_dict(), weights, "state_dict")
    ours, theirs = optimizer.state_dict(), its
    assert ours["state"].keys() == theirs["state"].keys(), "not the same parameters have state"
    for index, state in theirs["state"].items():
        mine = ours["state"][index]
        close(
            mine,
            {key: value for key, value in state.items() if key in mine},
            f"state of parameter {index}",
        )
    for mine, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert mine.keys() == group.keys()
        for key in ("lr", "weight_decay", "params", "betas", "initial_lr"):
            assert mine.get(key) == group.get(key), key
    return model, optimizer


def simple_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    loss = loss_of(model, tokens(SEED + step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


CLIPS: dict[str, Callable[[list], Any]] = {
    "norm": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1),
    "norm-foreach": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "norm-single": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, foreach=False),
    "norm-inf": lambda p: torch.nn.utils.clip_grad_norm_(p, 1e-3, norm_type=float("inf")),
    "norm-1-foreach": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5, norm_type=1.0, foreach=True),
    "total-norm": lambda p: torch.nn.utils.get_total_norm(
        [q.grad for q in p if q.grad is not None]
    ),
    "total-norm-foreach": lambda p: torch.nn.utils.get_total_norm(
        [q.grad for q in p if q.grad is not None], foreach=True
    ),
    "clip-with-norm": lambda p: torch.nn.utils.clip_grads_with_norm_(p, 0.1, torch.tensor(3.0)),
    "clip-with-norm-foreach": lambda p: torch.nn.utils.clip_grads_with_norm_(
        p, 0.1, torch.tensor(3.0), foreach=True
    ),
    "value": lambda p: torch.nn.utils.clip_grad_value_(p, 1e-3),
    "value-foreach": lambda p: torch.nn.utils.clip_grad_value_(p, 1e-3, foreach=True),
    "twice": lambda p: [
        torch.nn.utils.clip_grad_norm_(p, 0.1),
        torch.nn.utils.clip_grad_norm_(p, 0.05),
    ],
    "seven-times": lambda p: [torch.nn.utils.clip_grad_norm_(p, 0.1 * 0.8**i) for i in range(7)],
    "value-then-norm": lambda p: [
        torch.nn.utils.clip_grad_value_(p, 1e-3),
        torch.nn.utils.clip_grad_norm_(p, 0.01),
    ],
    "by-hand": lambda p: [q.grad.mul_(0.1) for q in p if q.grad is not None][:0],
    "by-hand-foreach": lambda p: torch._foreach_mul_(
        [q.grad for q in p if q.grad is not None], 0.1
    ),
    "stacked": lambda p: torch.stack([q.grad.norm() for q in p if q.grad is not None]),
    "flattened": lambda p: torch.cat([q.grad.flatten() for q in p if q.grad is not None]).norm(),
    "cat": lambda p: torch.cat([q.grad for q in p if q.grad is not None and q.dim() == 1]).norm(),
    "row": lambda p: [q.grad[0].zero_() for q in p if q.grad is not None and q.dim() == 2][:0],
    "row-set": lambda p: [
        q.grad.__setitem__(0, 0.5) for q in p if q.grad is not None and q.dim() == 2
    ][:0],
    "view": lambda p: [q.grad.view(-1)[:3].mul_(5.0) for q in p if q.grad is not None][:0],
    "data": lambda p: [q.grad.data.mul_(0.3) for q in p if q.grad is not None][:0],
    "copy": lambda p: [
        q.grad.copy_(torch.full_like(q.grad, 0.01)) for q in p if q.grad is not None
    ][:0],
    "assigned": lambda p: [setattr(q, "grad", q.grad * 0.5) for q in p if q.grad is not None][:0],
    "in-place-assigned": lambda p: [
        setattr(q, "grad", q.grad.__imul__(0.5)) for q in p if q.grad is not None
    ][:0],
    "noise": lambda p: [
        q.grad.add_(torch.ones_like(q.grad), alpha=1e-3) for q in p if q.grad is not None
    ][:0],
    "masked": lambda p: [q.grad.__setitem__(q.grad > 0, 0.0) for q in p if q.grad is not None][:0],
    "nan-to-num": lambda p: [torch.nan_to_num_(q.grad, 0.0) for q in p if q.grad is not None][:0],
    "finite": lambda p: torch.stack(
        [torch.isfinite(q.grad).all() for q in p if q.grad is not None]
    ),
}


@pytest.fixture(scope="module")
def clipped(tmp_path_factory, chosen) -> Callable[[str], dict[str, str]]:
    """What went wrong with each way to change gradients, by home: tried in children, for some may
    crash."""

    @functools.cache
    def tried(home: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("swap")

        def check(name: str) -> None:
            def loop(model, optimizer):
                loss_of(model, tokens(SEED)).backward()
                seen = CLIPS[name](list(model.parameters()))
                optimizer.step()
                return seen if seen is not None else []

            with contextlib.suppress(infinity.UsageError):
                assert_trains_alike(loop, transformer(SEED, dropout=0.0), home, folder)

        return survey(
            [name for name, where in sorted(chosen("clip", "home")) if where == home], check
        )

    return tried
