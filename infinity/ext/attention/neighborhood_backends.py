"""Backends of neighborhood attention: NATTEN's kernels, FlexAttention, or tiles; the first that
takes the tensors computes, and one log line says which and why.

refusal   why a backend does not take the tensors; "" if it does
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ...errors import ConfigError
from .attention_tiles import Axis, axes_of
from .neighborhood import attend_in_tiles
from .neighborhood_flex import attend_by_flex

logger = logging.getLogger(__name__)

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*KERNEL_DTYPES, torch.float64)
NATTEN_VERSION = (0, 21)  # the oldest whose functions are called as here
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.compiler.disable
def neighborhood_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    shape: int | Sequence[int],
    window: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Computes softmax(q k^T / sqrt(width)) v over a window of keys around each query: generalized
    neighborhood attention (Hassani et al. 2025, arXiv 2504.16922). Differentiable once.

    Tensors: batch x heads x tokens x width, in fp16, bf16, fp32 or fp64 of one device. Tokens are a
    grid of ``shape``, 1 to 3 axes, the last one fastest. q may have a multiple of the heads of k
    and v; v may have another width. Returns batch x heads x tokens x width of v.

    ``window``: keys along each axis, from 2; at the borders windows are shifted, not cut.
    ``stride``: so many neighbouring queries share one window; equal to the window, blocks attend to
    themselves. ``dilation``: keys of a window are so far apart. ``causal``: no key is after its
    query along the axis. One value stands for all axes.

    ``backend``: "natten", "flex" or "tiles"; None: the first that takes the tensors. Tiles need the
    memory of one tile's scores in forward and backward, and a key outside a query's window never
    reaches it, nan or not. Runs on the current stream. Raises ConfigError for tensors or windows
    that do not fit, or a backend that does not take them.
    """
    axes = axes_of(shape, window, stride, dilation, causal)
    _check(q, k, v, axes)
    where = q.device.type
    if not (torch.amp.is_autocast_available(where) and torch.is_autocast_enabled(where)):
        return BACKENDS[choose((q, k, v), backend)](q, k, v, axes)
    # A backward, which computes tiles again, runs without autocast: cast here, as torch's would.
    dtype = torch.get_autocast_dtype(where)
    q, k, v = (each if each.dtype is torch.float64 else each.to(dtype) for each in (q, k, v))
    with torch.autocast(where, enabled=False):
        return BACKENDS[choose((q, k, v), backend)](q, k, v, axes)


def attend_by_natten(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: Sequence[Axis]
) -> torch.Tensor:
    """Computes it by NATTEN, whose tensors are batch x axes... x heads x width."""
    shape = [axis.tokens for axis in axes]
    attend = getattr(natten_or_why(), f"na{len(axes)}d")
    out = attend(
        *(each.transpose(1, 2).unflatten(1, shape) for each in (q, k, v)),
        kernel_size=tuple(axis.window for axis in axes),
        stride=tuple(axis.stride for axis in axes),
        dilation=tuple(axis.dilation for axis in axes),
        is_causal=tuple(axis.causal for axis in axes),
    )
    return out.flatten(1, len(axes)).transpose(1, 2)


BACKENDS = {"natten": attend_by_natten, "flex": attend_by_flex, "tiles": attend_in_tiles}


def choose(tensors: Tensors, forced: str | None) -> str:
    """Returns the backend's name, and logs it. Raises ConfigError if ``forced`` is none, or refuses
    the tensors."""
    if forced is not None:
        if forced not in BACKENDS:
            raise ConfigError(f"backend={forced!r} is not one of {', '.join(BACKENDS)}, or None")
        if why := refusal(forced, tensors, forced=True):
            raise ConfigError(
                f'backend="{forced}" cannot be used: {why}. Leave it out, or give "tiles"'
            )
        tell(forced, "as asked for")
        return forced
    refusals = {name: refusal(name, tensors) for name in BACKENDS}
    chosen = next(name for name, why in refusals.items() if not why)
    others = [f"no {name}: {why}" for name, why in refusals.items() if why]
    tell(chosen, "; ".join(others) or "its kernels are here")
    return chosen


@functools.cache
def tell(backend: str, why: str) -> None:
    """Tells a choice, in one line of the log, once."""
    logger.info("neighborhood attention runs by %s (%s)", backend, why)


def refusal(backend: str, tensors: Tensors, *, forced: bool = False) -> str:
    """Returns why a backend does not take the tensors; "" if it does."""
    q, k, v = tensors
    widths = f"given {q.shape[-1]} and {v.shape[-1]}"
    if backend == "tiles":
        return ""
    if backend == "flex" and forced and q.device.type == "cpu":
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        return "it has no backward on a processor" if trains else ""
    if q.device.type != "cuda":
        return f"it needs CUDA, and the tensors are on {q.device}"
    if q.dtype not in KERNEL_DTYPES:
        return f"it has no kernels for {q.dtype}"
    if backend == "flex":
        return "" if min(q.shape[-1], v.shape[-1]) >= 16 else f"its least width is 16, {widths}"
    if isinstance(library := natten_or_why(), str):
        return library
    if q.shape[-1] % 8 or v.shape[-1] % 8:
        return f"its widths are multiples of 8, {widths}"
    # It repeats keys in memory for this, and older versions refuse it.
    return "" if q.shape[1] == k.shape[1] else f"{q.shape[1]} heads share the keys of {k.shape[1]}"


@functools.cache
def natten_or_why() -> ModuleType | str:
    """Returns NATTEN, or why it cannot be used."""
    try:
        natten = importlib.import_module("natten")
    except ModuleNotFoundError:
        return "NATTEN is not installed"
    except (ImportError, OSError, RuntimeError) as error:  # it is built for another torch
        return f"NATTEN cannot be imported ({error})"
    if tuple(map(int, re.findall(r"\d+", natten.__version__)[:2])) < NATTEN_VERSION:
        return f"NATTEN {natten.__version__} is older than 0.21"
    return natten if natten.HAS_LIBNATTEN else "NATTEN was built without kernels"


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: Sequence[Axis]) -> None:
    """Raises ConfigError if the tensors do not fit each other or the grid."""
    shapes = f"q {_of(q)}, k {_of(k)}, v {_of(v)}"
    if not all(isinstance(each, torch.Tensor) and each.dim() == 4 for each in (q, k, v)):
        raise ConfigError(f"{shapes}: give tensors of batch x heads x tokens x width")
    tokens = math.prod(axis.tokens for axis in axes)
    shape = tuple(axis.tokens for axis in axes)
    if any(each.shape[2] != tokens for each in (q, k, v)):
        raise ConfigError(f"{shapes}: shape={shape} has {tokens} tokens, the third size of each")
    if len({each.shape[0] for each in (q, k, v)}) > 1 or q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"{shapes}: all have one batch size, q and k one width")
    if k.shape[1] != v.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ConfigError(f"{shapes}: k and v have the same heads, q a multiple of them")
    if len({(each.dtype, each.device) for each in (q, k, v)}) > 1 or q.dtype not in DTYPES:
        raise ConfigError(f"{shapes}: give one device and one dtype of fp16, bf16, fp32, fp64")


def _of(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"is {type(tensor).__name__}"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}"
