"""Optimizers: those of `infinity train --optim` and `infinity plan --optim`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..cli.options import one_of

if TYPE_CHECKING:
    import torch
    from torch import nn

Groups = list[dict[str, Any]]


BETAS = (0.9, 0.95)


def make_optimizers(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = BETAS,
) -> list[torch.optim.Optimizer]:
    """Makes the optimizers ``name`` of :data:`OPTIMS`, which decay matrices only, not biases and
    norm scales. ``betas``: of AdamW."""
    made = OPTIMS[name](model, lr, weight_decay)
    for optimizer in made:
        for group in optimizer.param_groups:
            if "betas" in group:
                optimizer.defaults["betas"] = group["betas"] = betas
    return made


def betas_of(given: str | None) -> tuple[float, float]:
    """Returns the value of --betas."""
    first, second = map(float, given.split(",")) if given is not None else BETAS
    return first, second


def _groups(params: list[nn.Parameter], weight_decay: float) -> Groups:
    decayed = [param for param in params if param.ndim >= 2]
    others = [param for param in params if param.ndim < 2]
    groups: Groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters that get a gradient."""
    return [param for param in model.parameters() if param.requires_grad]


def _adamw(params: list[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(_groups(params, weight_decay), lr=lr, betas=BETAS)


def _adamw_alone(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    return [_adamw(trained_of(model), lr, weight_decay)]


def _adafactor(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Makes an Adafactor with the learning rate of the schedule, without one of its own."""
    from transformers.optimization import Adafactor

    groups = _groups(trained_of(model), weight_decay)
    return [Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False)]


def _muon(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Makes a Muon of the matrices between embeddings and head, with steps as large as AdamW's
    (https://arxiv.org/abs/2502.16982), and an AdamW of the rest."""
    import torch

    ends = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    if (head := model.get_output_embeddings()) is not None:
        ends.append(head)
    at_ends = {param for end in ends for param in end.parameters()}
    matrices = [p for p in trained_of(model) if p.ndim == 2 and p not in at_ends]
    rest = [p for p in trained_of(model) if p.ndim != 2 or p in at_ends]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        settings = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        made.append(torch.optim.Muon(matrices, **settings))
    return [*made, *([_adamw(rest, lr, weight_decay)] if rest else [])]


OPTIMS: dict[str, Callable[[nn.Module, float, float], list[torch.optim.Optimizer]]] = {
    "adamw": _adamw_alone,
    "adafactor": _adafactor,
    "muon": _muon,
}

OPTIM = (
    "--optim",
    one_of(*OPTIMS, default="adamw"),
    "the optimizer (default adamw); adafactor keeps sums of rows and columns in place of moments,"
    " muon one moment of matrices, with adamw for embeddings, head and vectors",
)


def muon_cost(optimizers: list[torch.optim.Optimizer], ranks: int) -> dict[str, float] | None:
    """Counts what the matrices of a Muon among ``optimizers`` cost in a step: their number, the
    multiplications and additions of Newton-Schulz on one rank, and the bytes that one of ``ranks``
    receives for those that it steps, and back. None: there is no Muon."""
    import torch

    matrices = [
        (*sorted(param.shape), group["ns_steps"])
        for optimizer in optimizers
        if isinstance(optimizer, torch.optim.Muon)
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    if not matrices:
        return None
    # Of a matrix of m rows and n columns, m <= n: its product with itself, that one's square, and
    # the product of both.
    flops = sum(count * (4 * m * m * n + 2 * m**3) for m, n, count in matrices)
    # Elements, gradients and moments in fp32 to the stepping rank; elements and moments back
    nbytes = 5 * 4 * sum(m * n for m, n, _ in matrices) * (ranks - 1) / ranks**2
    return {"matrices": len(matrices), "flops": flops / ranks, "nbytes": nbytes}
