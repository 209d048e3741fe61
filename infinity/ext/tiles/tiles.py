"""Tiles: fetches a large layer's weight as consecutive rows, one tile on the device at a time.

rows    of a Linear: outputs; of an Embedding: the vocabulary; of transformers' Conv1D: inputs
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.grads.meeting import GradUse
from ...core.grads.record import GradState
from ...core.machine.tiers import Tier
from ...core.params.outside_modes import outside_modes
from ...core.params.parameter import users_hooks
from ...core.run.context import ForwardContext
from ...core.units.forms import division_of, form_of, like, local_of
from ...core.units.handle import ParamHandle, handle_of
from ...core.wrap.partition import RowsAtOnce
from ...errors import UsageError
from .landing import landing_rows, sampling
from .over_ranks import average, averaging_nbytes, fetch
from .sharded_layers import can_run_in_tiles, style_of

SMALLEST_TILE_NBYTES = 64 * 1024
# Rows nearer to each other are read at once: a disk does so as fast as single ones.
NEAR_NBYTES = 256 * 1024

HEAD_RATIO = 8  # times as many outputs as inputs


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether ``module`` is transformers' Conv1D: a Linear with its weight transposed."""
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nf")
        and type(module).__module__.startswith("transformers.")
    )


def is_tileable(module: nn.Module) -> bool:
    """Returns whether ``module`` is a layer that can run in tiles."""
    if "forward" in module.__dict__ and style_of(module) is None:
        return False
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return type(module) is nn.Linear or is_conv1d(module)


def candidates(
    users: Mapping[nn.Parameter, list[tuple[nn.Module, str]]],
    limit_nbytes: int,
    dtype_of: Callable[[torch.Tensor], torch.dtype],
    without: Container[nn.Parameter] = (),
) -> dict[nn.Parameter, RowsAtOnce]:
    """Finds the weights larger than ``limit_nbytes``, in their compute dtype, whose every user can
    be tiled, but for those in ``without``. Returns for each the number of rows whose tile is within
    the limit, at least 1. ``users``: the modules that have a parameter, and their names for it.
    Of a weight that tensor parallelism has sharded, the rows are those of its local part."""
    at_once = {}
    for param, using in users.items():
        local, size = local_of(param), dtype_of(param).itemsize
        if (
            not form_of(param).moves(param)
            or param in without
            or local.dim() != 2
            or division_of(param).span * size <= limit_nbytes
            or not can_run_in_tiles(param)
        ):
            continue
        if param._backward_hooks or not local.is_contiguous():
            continue
        if all(name == "weight" and is_tileable(module) for module, name in using):
            width = local.shape[1]
            is_wide = division_of(param).span >= HEAD_RATIO * width**2
            summed = torch.float32.itemsize if is_wide else 0  # a head's
            at_once[param] = RowsAtOnce(max(1, limit_nbytes // (width * size)) * width, summed)
    return at_once


@dataclass(frozen=True)
class RowGrads:
    """Destination of a gradient's rows. ``land(begin, end, compute)`` stores the result of
    ``compute()`` as rows ``begin`` to ``end``. ``whole``: the gradient for autograd, or None.
    ``adds``: it is added to what is there, so that rows of zeros can be left out."""

    land: Callable[[int, int, Callable[[], torch.Tensor]], Any]
    whole: torch.Tensor | None = None
    adds: bool = False


@dataclass(frozen=True)
class Tiles:
    """One tiled weight: its job, its parameter, and the rows of a tile."""

    find_context: Callable[[], ForwardContext]
    param: nn.Parameter
    rows: int

    @property
    def context(self) -> ForwardContext:
        """The parts of its job. Raises UsageError if the engine is gone."""
        return self.find_context()

    @property
    def handle(self) -> ParamHandle:
        return handle_of(self.param)

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight's local part: [rows, width]."""
        return local_of(self.param).shape

    def spans(self, ids: torch.Tensor | None = None) -> Iterator[tuple[int, int]]:
        """Yields (first row, last row + 1) of every tile; with ``ids``, of tiles that have those
        rows, and few others."""
        total, width = self.shape
        if ids is None or self.handle.flat_param.ranks.data_size > 1:  # others may have other ids
            for begin in range(0, total, self.rows):
                yield begin, min(total, begin + self.rows)
            return
        near = max(1, NEAR_NBYTES // (width * self.param.itemsize))
        rows = torch.unique(ids).tolist()
        at = 0
        while at < len(rows):
            first = last = rows[at]
            while at < len(rows) and rows[at] - last <= near and rows[at] < first + self.rows:
                last, at = rows[at], at + 1
            yield first, last + 1

    def each(self, ids: torch.Tensor | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields (begin, end, rows on the device) of the tiles of :meth:`spans`; charges the device
        for one at a time. Blocks until the weight is at home, and on reading each tile."""
        context, handle, width = self.context, self.handle, self.shape[1]
        flat_param = handle.flat_param
        context.store.check_process()
        with context.store.guard:
            flat_param.homes.wait()
        offset = flat_param.layout.placements[handle.index].offset
        spans = list(self.spans(ids))
        most = max((end - begin for begin, end in spans), default=0)
        # One for all: the heap keeps what is freed between other allocations.
        memory = torch.empty(most * width, dtype=flat_param.spec.dtype, device="cpu")
        for begin, end in spans:
            nbytes = (end - begin) * width * flat_param.spec.dtype.itemsize
            charge = context.ledger.reserve(
                Tier.DEVICE, nbytes, f"a tile of {handle.name}", passing=True
            )
            try:
                with context.traffic.copying("host->device", nbytes, handle.name):
                    flat = memory[: (end - begin) * width]
                    first = offset + begin * width
                    what = f"rows {begin} to {end} of {handle.name}"
                    last = first + flat.numel()
                    outside_modes(fetch)(context.store, flat_param, first, last, flat, what)
                    flat = flat.to(context.device.where)
                yield begin, end, flat.view(end - begin, width)
            finally:
                charge.release()

    @contextmanager
    def taking_rows(self, ctx) -> Iterator[RowGrads]:
        """Takes the weight's gradient from the running backward, in ranges of rows. If ``p.grad``
        is kept at home, rows are accumulated there; else they fill a whole gradient for autograd,
        as for users' hooks on it. Rows that nothing needs are dropped."""
        accumulator = ctx.next_functions[-1][0]  # the weight is the last tensor among the arguments
        use, is_hooked = (
            GradUse.of(accumulator),
            self.param._backward_hooks or users_hooks(self.param),
        )
        takes, over_ranks = self.handle.grad is not None, self.handle.flat_param.ranks.data_size > 1
        if use is GradUse.ACCUMULATED and takes and is_hooked and over_ranks:
            raise UsageError(
                f"a hook on {self.handle.name}, which runs in tiles on several ranks: they average"
                " a tile at a time, and no rank has its whole gradient. Remove the hook, or give a"
                " larger device_memory"
            )
        if use is GradUse.ACCUMULATED and takes and not is_hooked:
            adds = self.handle.grad.state is not GradState.ABSENT
            gradients = self.context.gradients
            with (
                landing_rows(gradients, self.handle) as land,
                sampling(
                    gradients, self.handle, self._averaging(land) if over_ranks else land
                ) as land,
            ):
                yield RowGrads(land, adds=adds)
            self.handle.grad.averaged = over_ranks
        elif use is GradUse.NONE:
            yield RowGrads(lambda begin, end, compute: None, adds=True)
        else:  # returned by torch.autograd.grad, or accumulated: hooked, or not stepped
            whole = torch.empty(
                self.shape, dtype=self.param.dtype, device=self.context.device.where
            )
            yield RowGrads(
                lambda begin, end, compute: whole[begin:end].copy_(compute()),
                like(self.param, whole),
            )

    def _averaging(self, land: Callable) -> Callable:
        """Returns ``land`` of what all ranks' gradients of the rows average to."""
        context, handle, flat_param = self.context, self.handle, self.handle.flat_param
        offset = flat_param.layout.placements[handle.index].offset
        ranks = flat_param.ranks
        replicas = ranks.data_size // ranks.size

        def average_and_land(begin: int, end: int, compute: Callable[[], torch.Tensor]) -> None:
            part = compute()
            charge = context.ledger.reserve(
                Tier.DEVICE if context.device.is_host else Tier.HOST,
                averaging_nbytes(ranks.size, replicas, part.numel(), flat_param.spec.grad_dtype),
                f"the gradients of a tile of {handle.name}",
                passing=True,
            )
            try:
                what, first = f"rows {begin} to {end} of {handle.name}", begin * part.shape[1]
                mean = outside_modes(average)(
                    context.traffic, flat_param, offset + first, part.reshape(-1), what
                )
                land(begin, end, lambda: mean.view(part.shape))
            finally:
                charge.release()

        return average_and_land

    def check(self, handle: ParamHandle, version: int | None) -> None:
        """Joins the running backward and checks it. Raises UsageError if the model was unwrapped, a
        graph of the backward is wanted, or the weight has changed.

        ``handle``: the weight's handle in the forward. ``version``: the version of its values then,
        or None if the backward does not need them.
        """
        self.context.track_backward()
        if self.handle is not handle:
            raise UsageError(
                "this backward needs a weight that ran in tiles, and its model was unwrapped since"
            )
        if torch.is_grad_enabled():
            raise UsageError(
                f"create_graph=True: {self.handle.name} runs in tiles, whose backward has no graph"
                " of its own. Second-order gradients need a larger device_memory."
            )
        if version is not None and version != self.handle.version:
            raise UsageError(
                f"this backward needs {self.handle.name} as it was in its forward, but it was"
                " changed since (by optimizer.step() or load_state_dict()). Run backward before"
                " the step."
            )
