"""Costs: measures the time of each layer of a chain, one after the other, so that the whole model
need not fit any memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import nn

from .stages import chain_of

SPREAD = 0.02  # standard deviation of values for layers on meta: a usual initialisation


def measure_costs(
    model: nn.Module,
    inputs: torch.Tensor,
    *,
    device: torch.device | str | None = None,
    repeats: int = 3,
) -> list[float]:
    """Measures the seconds of each layer's forward and backward, for ``pipeline(costs=...)``.

    model
        As :func:`pipeline` takes it, before it is wrapped; on ``meta`` random values are used. It
        is not changed.
    inputs
        Of one micro-batch: token ids for a transformers model.
    device
        Device of the measurement, with one layer at a time. None: that of ``inputs``.
    repeats
        Number of runs, of which the fastest counts. Layers of one kind and size are measured once.

    Raises ConfigError for a model that is not a chain of known form.
    """
    chain, where = chain_of(model), torch.device(device) if device is not None else inputs.device
    x, seconds, known = inputs.to(where), [], {}
    for number in range(len(chain.layers)):
        chunk = _real(chain.make_chunk(range(number, number + 1)), where)
        with torch.no_grad():
            output = chunk(x)
        kind = tuple(
            (name.partition(f".{number}.")[2] or name, tuple(p.shape), p.dtype)
            for name, p in chunk.named_parameters()
        )
        key = (kind, tuple(x.shape))
        if key not in known:
            known[key] = min(
                _time(lambda chunk=chunk, x=x: _run(chunk, x), where) for _ in range(repeats)
            )
        seconds.append(known[key])
        x = output.detach()
        del chunk
    return seconds


def _real(chunk: nn.Module, where: torch.device) -> nn.Module:
    """Returns a copy of ``chunk`` on ``where``, with values."""
    on_meta = any(param.is_meta for param in chunk.parameters())
    made = copy.deepcopy(chunk)
    if not on_meta:
        return made.to(where)
    made.to_empty(device=where)
    for param in made.parameters():
        nn.init.normal_(param, std=SPREAD) if param.is_floating_point() else nn.init.zeros_(param)
    for buffer in made.buffers():
        buffer.zero_()
    return made


def _run(chunk: nn.Module, x: torch.Tensor) -> None:
    leaf = x.clone().requires_grad_(x.is_floating_point())
    output = chunk(leaf)
    if output.requires_grad:
        output.backward(torch.ones_like(output))


def _time(work: Callable[[], None], where: torch.device) -> float:
    def settle() -> None:
        if where.type != "cpu":
            torch.accelerator.synchronize(where)

    settle()
    start = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - start
