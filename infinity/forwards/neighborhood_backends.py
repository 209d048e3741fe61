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

from ..errors import ConfigError
from ..planning.attention_tiles import Axis, axes_of
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
    if not torch.is_autocast_enabled(q.device.type):
        return BACKENDS[_choose((q, k, v), backend)](q, k, v, axes)
    # A backward, which computes tiles again, runs without autocast: cast here, as torch's would.
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (each if each.dtype is torch.float64 else each.to(dtype) for each in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        return BACKENDS[_choose((q, k, v), backend)](q, k, v, axes)


def attend_by_natten(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: Sequence[Axis]
) -> torch.Tensor:
    """Computes it by NATTEN, whose tensors are batch x axes... x heads x width."""
    shape = [axis.tokens for axis in axes]
    attend = getattr(_natten(), f"na{len(axes)}d")
    out = attend(
        *(each.transpose(1, 2).unflatten(1, shape) for each in (q, k, v)),
        kernel_size=tuple(axis.window for axis in axes),
        stride=tuple(axis.stride for axis in axes),
        dilation=tuple(axis.dilation for axis in axes),
        is_causal=tuple(axis.causal for axis in axes),
    )
    return out.flatten(1, len(axes)).transpose(1, 2)


BACKENDS = {"natten": attend_by_natten, "flex": attend_by_flex, "tiles": attend_in_tiles}


def _choose(tensors: Tensors, forced: str | None) -> str:
    """Returns the backend's name. Raises ConfigError if it does not take the tensors."""
    if forced is not None and forced not in BACKENDS:
        raise ConfigError(f"backend={forced!r} is not one of {', '.join(BACKENDS)}, or None")
    if forced is not None:
        if why := REFUSALS[forced](*tensors, forced=True):
            raise ConfigError(f'backend="{forced}" cannot be used: {why}. Leave it out, or "tiles"')
        _tell(forced, "as asked for")
        return forced
    refusals = []
    for name, refusal in REFUSALS.items():
        if not (why := refusal(*tensors)):
            break
        refusals.append(f"no {name}: {why}")
    _tell(name, "; ".join(refusals) or "the fastest")
    return name


@functools.cache
def _tell(backend: str, why: str) -> None:
    logger.info("neighborhood attention runs by %s (%s)", backend, why)


def _natten_refusal(q, k, v, *, forced: bool = False) -> str:
    if q.device.type != "cuda":
        return "there is no GPU" if not forced else f"it needs a GPU, and q is on {q.device}"
    if isinstance(found := _natten(), str):
        return found
    if q.dtype not in KERNEL_DTYPES:
        return f"it has no kernels for {q.dtype}"
    if q.shape[-1] % 8 or v.shape[-1] % 8:
        return f"its widths are multiples of 8, given {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[1] != k.shape[1]:
        return f"it repeats keys for {q.shape[1]} heads over {k.shape[1]}"
    return ""


@functools.cache
def _natten() -> ModuleType | str:
    """Returns the library, or why it cannot be used."""
    try:
        found = importlib.import_module("natten")
    except ModuleNotFoundError:
        return "NATTEN is not installed"
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch
        return f"NATTEN cannot be imported ({error})"
    version = tuple(map(int, re.findall(r"\d+", found.__version__)[:2]))
    if version < NATTEN_VERSION:
        return f"NATTEN {found.__version__} is older than 0.21"
    return found if found.HAS_LIBNATTEN else "NATTEN was built without kernels"


def _flex_refusal(q, k, v, *, forced: bool = False) -> str:
    if q.device.type == "cpu" and forced:
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
        return "FlexAttention has no backward on a processor" if trains else ""
    if q.device.type != "cuda":
        return "there is no GPU" if not forced else f"q is on {q.device}"
    if q.dtype not in KERNEL_DTYPES:
        return f"it has no kernels for {q.dtype}"
    if min(q.shape[-1], v.shape[-1]) < 16:
        return f"its widths begin at 16, given {q.shape[-1]} and {v.shape[-1]}"
    return ""


def _tiles_refusal(q, k, v, *, forced: bool = False) -> str:
    return ""


REFUSALS = {"natten": _natten_refusal, "flex": _flex_refusal, "tiles": _tiles_refusal}


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: Sequence[Axis]) -> None:
    """Raises ConfigError if the tensors do not fit each other or the grid."""
    given = f"q {_of(q)}, k {_of(k)}, v {_of(v)}"
    if not all(isinstance(each, torch.Tensor) and each.dim() == 4 for each in (q, k, v)):
        raise ConfigError(f"{given}: give tensors of batch x heads x tokens x width")
    tokens = math.prod(axis.tokens for axis in axes)
    shape = tuple(axis.tokens for axis in axes)
    if any(each.shape[2] != tokens for each in (q, k, v)):
        raise ConfigError(f"{given}: shape={shape} has {tokens} tokens, the third size of each")
    if len({each.shape[0] for each in (q, k, v)}) > 1 or q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"{given}: all have one batch size, q and k one width")
    if k.shape[1] != v.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ConfigError(f"{given}: k and v have the same heads, q a multiple of them")
    if len({(each.dtype, each.device) for each in (q, k, v)}) > 1 or q.dtype not in DTYPES:
        raise ConfigError(f"{given}: give one device and one dtype of fp16, bf16, fp32, fp64")


def _of(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"is {type(tensor).__name__}"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}"
