"""Compute: a model's compute time on this machine, measured on it or on a few of its blocks.

A model that computes a batch in seconds runs forward and backward as it is. Of a larger one, a
model of one block and one of three run on a batch of the real size: the difference is the time of
two blocks, and the rest is outside of blocks. A model too large for that is estimated from its
operations and the rate of one matrix product.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .classes import auto_class
from .model import is_trusted

if TYPE_CHECKING:
    import torch
    from torch import nn

LARGEST_PROBE_NBYTES = 3 << 29
LARGEST_PROBE_FLOPS = 3e12
WHOLE_FLOPS = 4e11  # of a batch; blocks that fit a cache compute faster than a whole model's
ON_A_GPU = 8  # times as much
SAVED = 24  # elements that a layer saves for its backward, per token and element of its width
ROUNDS = 3
LEAST_SECONDS = 0.5  # of all runs of which the fastest counts
ALONE = 0.9  # of the processors' time: with more of it nothing else is worth a word


def multiplies_bf16(device: str | None) -> bool:
    """Returns whether bf16 matrix products are fast on ``device``. On a CPU without AVX-512 torch
    uses a plain loop, about fifty times slower than fp32."""
    import torch

    if device is not None and not device.startswith("cpu"):
        return True
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


@dataclass(frozen=True)
class Compute:
    """Forward and backward of one batch."""

    seconds: float
    how: str  # measured or estimated
    share: float | None = None  # of the processors' time it could have used; None: unknown

    @property
    def said(self) -> str:
        """How it was found, and what else it depends on: other work on the same processors."""
        if self.share is None or self.share > ALONE:
            return f"{self.how} on this machine"
        return (
            f"{self.how} on this machine while other work took {1 - self.share:.0%} of the"
            " processors' time that it asked for; it changes with that"
        )


class Sharing:
    """What this process's threads ran, and waited for a processor, since it was made."""

    def __init__(self) -> None:
        self._before = _ran_and_waited()

    @property
    def share(self) -> float | None:
        """The part that they ran; None where the kernel does not tell."""
        ran, waited = (now - then for now, then in zip(_ran_and_waited(), self._before))
        return ran / (ran + waited) if ran > 0 and waited >= 0 else None


def _ran_and_waited() -> tuple[int, int]:
    """Returns the nanoseconds that the threads of this process ran, and were ready and waited."""
    ran = waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that ended
            mine = path.read_text().split()
            ran, waited = ran + int(mine[0]), waited + int(mine[1])
    return ran, waited


def compute_time(
    model: nn.Module,
    config: Any,
    *,
    batch: int,
    length: int,
    dtype: torch.dtype,
    checkpointing: bool,
    limits: Any,
    adapt: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Compute:
    """Measures or estimates the seconds of forward and backward of one batch. ``model`` may be on
    meta; ``config`` is its transformers configuration. Runs small models on the device of
    ``limits``, a Config, within its budgets. ``adapt`` gives a small one what the model has beside
    its configuration."""
    from ... import native

    where, room = limits.device or "cpu", _room_of(limits)
    sharing = Sharing() if where == "cpu" else None

    def found(seconds: float, how: str) -> Compute:
        return Compute(seconds, how, sharing and sharing.share)

    layers = _layer_count(config)
    flops = step_flops(model, config, batch=batch, length=length, checkpointing=checkpointing)
    try:
        if flops < WHOLE_FLOPS and _is_small(config, batch * length, length, dtype, where, room):
            whole = _measure(config, layers, batch, length, dtype, checkpointing, where, adapt)
            return found(whole, "measured")
        small = _with_layers(config, 3) if layers else config
        if layers and _is_small(small, batch * length, length, dtype, where, room):
            one, three = (
                _measure(config, count, batch, length, dtype, checkpointing, where, adapt)
                for count in (1, 3)
            )
            return found(max(one, one + (layers - 1) * (three - one) / 2), "measured")
    except Exception:  # noqa: BLE001 - an architecture that cannot be had smaller: it is estimated
        pass
    finally:
        gc.collect()
        native.trim_heap()  # of the probe, whose memory the job needs now
    return found(flops / product_rate(dtype, where), "estimated")


def step_flops(
    model: nn.Module, config: Any, *, batch: int, length: int, checkpointing: bool
) -> float:
    """Counts the multiplications and additions of a forward and backward; with ``checkpointing``,
    of a second forward too."""
    forward, backward = _passes_flops(model, config, batch * length, length)
    return forward * (1 + checkpointing) + backward


def forward_share(model: nn.Module, config: Any, **batch: Any) -> float:
    """Returns the part of :func:`step_flops` that is the first forward: less than a third with
    trained weights, half if all are frozen."""
    forward, _ = _passes_flops(model, config, batch["batch"] * batch["length"], batch["length"])
    return forward / step_flops(model, config, **batch)


def params_of_a_token(model: nn.Module, *, trained: bool = False) -> int:
    """Counts the parameters that a token is multiplied by: of each layer's experts, the chosen.
    ``trained``: only those that get a gradient."""
    from ...ext.experts_parallel.experts import chosen_of, expert_parameters
    from ...ext.packed.packed import dense_numel

    chosen, experts = chosen_of(model), set(expert_parameters(model))
    counted = (param for param in model.parameters() if param.requires_grad or not trained)
    return sum(
        dense_numel(param) // len(param) * chosen
        if chosen and param in experts
        else dense_numel(param)
        for param in counted
    )


def _with_layers(config: Any, layers: int) -> Any:
    """Returns a copy of ``config`` with ``layers`` layers, which repeats its layer types."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = layers
    if isinstance(types := vars(text).get("layer_types"), list) and types:
        text.layer_types = [types[index % len(types)] for index in range(layers)]
    small.use_cache = False
    return small


def _room_of(config: Any) -> int:
    """Returns the bytes that a probe may take: the budgets that the job will have on the device
    that computes. Without any, what is free."""
    from ...core.machine import limits

    is_host = config.device is None or config.device.startswith("cpu")
    budgets = [config.device_memory, config.host_memory if is_host else None]
    budgets_here = [int(budget) for budget in budgets if budget is not None]
    if budgets_here or not is_host:
        return sum(budgets_here) or sys.maxsize
    return limits.for_the_engine(limits.memory_left())


def _is_small(
    config: Any, tokens: int, length: int, dtype: torch.dtype, device: str, room: int
) -> bool:
    """Whether a model of ``config``, with gradients and what a batch saves, is small enough to
    build and run as a probe, and fits in ``room`` bytes."""
    import torch

    with torch.device("meta"):
        model = auto_class(config, None).from_config(config, trust_remote_code=is_trusted(config))
    params = sum(param.numel() for param in model.parameters())
    text = config.get_text_config()
    logits = 4 * tokens * (getattr(text, "vocab_size", 0) or 0)
    saved = SAVED * tokens * (getattr(text, "hidden_size", 0) or 0) * (_layer_count(config) or 0)
    nbytes = (2 * params + logits + saved) * dtype.itemsize
    flops = 6.0 * params * tokens + _attention_flops(config, tokens, length)
    times = 1 if device == "cpu" else ON_A_GPU
    most = min(times * LARGEST_PROBE_NBYTES, room)
    return nbytes < most and flops < times * LARGEST_PROBE_FLOPS


def _layer_count(config: Any) -> int | None:
    return getattr(config.get_text_config(), "num_hidden_layers", None)


def _passes_flops(model: nn.Module, config: Any, tokens: int, length: int) -> tuple[float, float]:
    """Counts multiplications and additions of the forward, and of the backward: 2 per parameter and
    token each, 2 more for the gradient of a trained one, and attention's products."""
    attention = _attention_flops(config, tokens, length)
    each = 2.0 * params_of_a_token(model) * tokens
    trained = 2.0 * params_of_a_token(model, trained=True) * tokens
    return each + attention / 3, each + trained + attention * 2 / 3


def _attention_flops(config: Any, tokens: int, length: int) -> float:
    width = getattr(config.get_text_config(), "hidden_size", 0) or 0
    return 12.0 * (_layer_count(config) or 0) * width * length * tokens / 2


def _measure(
    config: Any,
    layers: int | None,
    batch: int,
    length: int,
    dtype: torch.dtype,
    checkpointing: bool,
    device: str,
    adapt: Callable[[nn.Module], nn.Module],
) -> float:
    import torch

    model = (
        auto_class(config, None)
        .from_config(
            _with_layers(config, layers) if layers else config,
            dtype=dtype,
            trust_remote_code=is_trusted(config),
        )
        .train()
    )
    model = adapt(model).to(device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.zeros(batch, length, dtype=torch.long, device=device)

    def step() -> None:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()

    return statistics.median(_runs(step, device))


def fastest(job: Callable[[], object], device: str) -> float:
    """Returns the seconds of the fastest of a few runs, of more if they are short: each may have
    waited for other work."""
    return min(_runs(job, device, LEAST_SECONDS))


def _runs(job: Callable[[], object], device: str, least: float = 0.0) -> list[float]:
    """Returns the seconds of each of a few runs, of so many that they take the ``least`` seconds
    together."""
    import torch

    seconds: list[float] = []
    while len(seconds) < ROUNDS or sum(seconds) < least:
        start = time.perf_counter()
        job()
        if device != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def product_rate(dtype: torch.dtype, device: str) -> float:
    """Measures the multiplications and additions per second of a matrix product that is large
    enough for the device."""
    import torch

    size = 1024 if device == "cpu" else 8192
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / fastest(lambda: a @ b, device)
