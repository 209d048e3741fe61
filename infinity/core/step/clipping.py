"""Clipping: bounds the norm of all gradients, over all ranks and homes."""

from __future__ import annotations

import torch

from ...errors import UsageError
from ..units.handle import handle_of


def clip_factor(total: torch.Tensor, max_norm: float) -> float:
    """Computes the factor that scales gradients of norm ``total`` to a norm of at most
    ``max_norm``, with torch's arithmetic."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    # torch, too, multiplies by the number's fp32 value, for gradients of every dtype.
    return torch.tensor(factor.item(), dtype=torch.float32, device="cpu").item()


@torch.no_grad()
def clip_grad_norm_(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales all gradients of a wrapped ``optimizer`` so that their norm of order ``norm_type`` is
    at most ``max_norm``.

    Does what torch.nn.utils.clip_grad_norm_ does for the parameters of one process, with the same
    bits. With tensor parallelism it counts each element once over all ranks. It also takes mixed
    distributed and plain parameters, which torch's own refuses.

    Returns the norm before, the same bits on every rank. Every rank calls this. Raises UsageError
    for an optimizer that is not wrapped, and RuntimeError for a non-finite norm with
    ``error_if_nonfinite``.
    """
    if not hasattr(optimizer, "total_norm"):
        raise UsageError(
            "clip_grad_norm_ takes the optimizer that wrap_model returned, not a"
            f" {type(optimizer).__name__}: of parameters use torch.nn.utils.clip_grad_norm_"
        )
    total = optimizer.total_norm(norm_type, error_if_nonfinite=error_if_nonfinite)
    factor, noted = clip_factor(total, float(max_norm)), False
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                handle = handle_of(param)
                if handle.has_raw_grad:
                    param.grad.mul_(factor)
                    continue
                if not noted:
                    handle.engine.gradients.clips.append(factor)
                    noted = True
                handle.engine.gradients.assigned.scale_as_user(handle, factor)
    return total
