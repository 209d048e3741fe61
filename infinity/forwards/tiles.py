"""Tiles: fetches a large layer's weight as consecutive rows, one tile on the device at a time.

rows    of a Linear: its outputs; of an Embedding: its vocabulary; of a transformers Conv1D: its inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..machine.tiers import Tier
from ..state.apart import apart
from ..state.handle import ParamHandle, handle_of
from .weights import Weights

SMALLEST_TILE_NBYTES = 64 * 1024

HEAD_RATIO = 8  # times as many outputs as inputs


def is_conv1d(module: nn.Module) -> bool:
    """Tells whether ``module`` is transformers' Conv1D: a Linear with its weight transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and type(module).__module__.startswith("transformers.")


def is_tileable(module: nn.Module) -> bool:
    """Tells whether ``module`` is a layer that this file can run in tiles."""
    if "forward" in module.__dict__:
        return False
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return type(module) is nn.Linear or is_conv1d(module)


def candidates(model: nn.Module, limit_nbytes: int, dtype_of: Callable[[torch.Tensor], torch.dtype]) -> dict[nn.Parameter, int]:
    """Finds weights of more than ``limit_nbytes`` (in the dtype that they compute in) whose every user can be tiled, each with the rows
    of a tile that has no more."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                users.setdefault(param, []).append((module, name))
    found = {}
    for param, using in users.items():
        size = dtype_of(param).itemsize
        if type(param) is not nn.Parameter or param.dim() != 2 or param.numel() * size <= limit_nbytes:
            continue
        if param._backward_hooks or not param.is_contiguous():
            continue
        if all(name == "weight" and is_tileable(module) for module, name in using):
            found[param] = max(1, limit_nbytes // (param.size(1) * size))
    return found


class GradUse(Enum):
    """What the running backward does with a parameter's gradient."""

    NONE = auto()
    ACCUMULATED = auto()  # into ``p.grad``
    RETURNED = auto()  # by ``torch.autograd.grad``

    @classmethod
    def of(cls, accumulator: Any) -> GradUse:
        """Tells it of a parameter's ``AccumulateGrad`` node, None for a parameter that has none."""
        if accumulator is None:
            return cls.NONE
        try:
            return cls.ACCUMULATED if torch._C._will_engine_execute_node(accumulator) else cls.NONE
        except RuntimeError:  # torch answers for every node but a leaf whose gradient is returned
            return cls.RETURNED


@dataclass(frozen=True)
class RowGrads:
    """Where rows of a gradient go: ``land(begin, end, compute)`` puts what ``compute()`` returns where rows ``begin`` to ``end`` are.
    ``whole``: what autograd is given; None where it is given nothing."""

    land: Callable[[int, int, Callable[[], torch.Tensor]], Any]
    whole: torch.Tensor | None = None


@dataclass(frozen=True)
class Tiles:
    """One tiled weight: where it is, and how many rows a tile has."""

    find_engine: Callable[[], Weights]
    param: nn.Parameter
    rows: int

    @property
    def engine(self) -> Weights:
        """The engine. Raises UsageError where it is gone."""
        return self.find_engine()

    @property
    def handle(self) -> ParamHandle:
        return handle_of(self.param)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields the first row and the one behind the last, of every tile."""
        total = self.param.shape[0]
        for begin in range(0, total, self.rows):
            yield begin, min(total, begin + self.rows)

    def each(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields every tile with its rows on the device: valid until the next is asked for."""
        engine, handle, width = self.engine, self.handle, self.param.shape[1]
        shard = handle.shard
        engine.store.check_process()
        with engine.store.guarding():
            shard.wait()
        offset = shard.layout.placements[handle.index].offset
        for begin, end in self.spans():
            nbytes = (end - begin) * width * shard.spec.dtype.itemsize
            charge = engine.ledger.reserve(Tier.DEVICE, nbytes, f"a tile of {handle.name}", passing=True)
            try:
                with engine.traffic.copying("host->device", nbytes, handle.name):
                    flat = apart(engine.store.read)(shard.weight, offset + begin * width, offset + end * width)
                    flat = flat.to(engine.device.where)
                yield begin, end, flat.view(end - begin, width)
            finally:
                charge.release()

    @contextmanager
    def taking_rows(self, ctx) -> Iterator[RowGrads]:
        """Takes the rows of the weight's gradient as the running backward computes them: home, or into the whole gradient that autograd is
        given where it goes elsewhere."""
        accumulator = ctx.next_functions[-1][0]  # the weight is the last tensor among the arguments
        use = GradUse.of(accumulator)
        if use is GradUse.ACCUMULATED and self.handle.grad is not None:
            with self.engine.gradients.landing_rows(self.handle) as land:
                yield RowGrads(land)
        elif use is GradUse.NONE:
            yield RowGrads(lambda begin, end, compute: None)
        else:  # returned by torch.autograd.grad, or accumulated for a weight that is not stepped
            whole = torch.empty(self.param.shape, dtype=self.param.dtype, device=self.engine.device.where)
            yield RowGrads(lambda begin, end, compute: whole[begin:end].copy_(compute()), whole)

    def check(self, handle: ParamHandle, version: int | None) -> None:
        """Checks a backward that comes to the layer. Raises UsageError when it cannot be right. ``handle``: the weight's in its
        forward; ``version``: of its values there, if they matter."""
        self.engine.join_backward()
        if self.handle is not handle:
            raise UsageError("this backward needs a weight that ran in tiles, and its model was unwrapped since")
        if torch.is_grad_enabled():
            raise UsageError(
                f"create_graph=True: {self.handle.name} runs in tiles, whose backward has no graph of its own. Second-order "
                "gradients need a larger device_memory."
            )
        if version is not None and version != self.handle.version:
            raise UsageError(
                f"this backward needs {self.handle.name} as it was in its forward, but it was changed since (by "
                "optimizer.step() or load_state_dict()). Run backward before the step."
            )
