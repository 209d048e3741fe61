"""Ties: keeps a parameter on two pipeline stages equal: its gradients are added up, and counted
once.

Only the first stage's copy counts in norms and checkpoints. Both ranks add the first stage's
gradient and the last one's in fp32, in this order, so that both make the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.grads.record import GradRecord, GradState
from ...core.homes.store import ArrayStore
from ...core.run.engine import Engine
from ...core.run.job import Job
from ...core.units.flat_param import FlatParam
from ...core.units.handle import COUNTS, ParamHandle, handle_of
from ...errors import ConfigError
from .between import Between
from .stages import Chain


def read_own(store: ArrayStore, flat_param: FlatParam, name: str, index: int) -> torch.Tensor:
    """Reads the elements of parameter ``index`` in array ``name`` that are at home here."""
    array, (begin, end) = flat_param.arrays[name], flat_param.layout.part_at_home(name, index)
    if begin == end:
        return torch.empty(0, dtype=array.dtype, device="cpu")
    return store.read(array, begin, end)


class Ties:
    """The parameters on both the first and the last stage, on the ranks that have them."""

    def __init__(self, params: list[nn.Parameter], *, counts: bool):
        self._params, self._counts = params, counts

    @property
    def are_trained(self) -> bool:
        """Whether an optimizer steps any of them."""
        return any(handle_of(param).grad is not None for param in self._params)

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Marks the parameters as shared for a wrap inside the block."""
        for param in self._params:
            setattr(param, COUNTS, self._counts)
        try:
            yield
        finally:
            for param in self._params:
                vars(param).pop(COUNTS, None)

    def start(self, engine: Engine, between: Between) -> None:
        """Copies the first stage's values to the last: they may have been drawn separately. Both
        ranks call this."""
        job = engine.job
        for handle in map(handle_of, self._params):
            with job.uses.begin():
                for name in ("weight", "master"):
                    if name in handle.flat_param.arrays:
                        values = read_own(job.store, handle.flat_param, name, handle.index)
                        theirs = self._exchange(between, values)
                        if not self._counts:
                            begin, _ = handle.flat_param.layout.part_of_param(name, handle.index)
                            handle.changed()
                            job.prefetcher.release_all([handle.unit])
                            handle.flat_param.parts.write(
                                job.store,
                                name,
                                handle.index,
                                theirs,
                                begin=begin,
                                version=engine.steps.index,
                            )

    @contextmanager
    def adding_up(self, job: Job, between: Between) -> Iterator[None]:
        """Replaces the gradients that the pass inside adds to both copies by their sum. Both ranks
        call this.

        Gradients of earlier passes are already summed, and are set aside meanwhile. An exception
        leaves the gradients torn.
        """
        # The rest are frozen.
        handles = [handle for handle in map(handle_of, self._params) if handle.grad is not None]
        aside: dict[ParamHandle, torch.Tensor | None] = {}
        try:
            for handle in handles:
                aside[handle] = self._take(job, handle)
            yield
            for handle in handles:
                job.gradients.average()
                with job.uses.begin():
                    if handle.grad.state is GradState.ABSENT:
                        job.gradients.assigned.zero(handle)
                    job.gradients.values.change_own(
                        handle, lambda own, handle=handle: self._add(between, aside[handle], own)
                    )
        except BaseException:
            for handle in handles:
                handle.grad = GradRecord(GradState.TORN)
            raise

    @staticmethod
    def _take(job: Job, handle: ParamHandle) -> torch.Tensor | None:
        """Removes and returns this rank's elements of a landed gradient."""
        job.gradients.average()
        with job.uses.begin():
            if handle.grad.state is not GradState.LANDED:
                return None
            kept: list[torch.Tensor] = []
            job.gradients.values.change_own(handle, lambda own: kept.append(own.clone()))
            job.gradients.clear(handle)
        return kept[0]

    def _add(self, between: Between, aside: torch.Tensor | None, own: torch.Tensor) -> None:
        theirs = (
            self._exchange(between, own.detach().cpu().contiguous()).to(own.device).view_as(own)
        )
        first, last = (own, theirs) if self._counts else (theirs, own)
        own.copy_(first.float() + last.float())
        if aside is not None:
            own.add_(aside)

    def _exchange(self, between: Between, mine: torch.Tensor) -> torch.Tensor:
        """Sends ``mine`` to the other rank with the tie, and returns its values. Needs no
        barrier: after an exception the group is closed with its pending transfers."""
        other, group = between.rank_of(-1 if self._counts else 0), between.host_group
        theirs = torch.empty_like(mine)
        raw, into = mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)
        works: list[Any] = [
            dist.isend(raw, other, group=group),
            dist.irecv(into, other, group=group),
        ]
        for work in works:
            work.wait()
        return theirs


def find_ties(
    chain: Chain, chunks: Sequence[nn.Module], rank_of: Callable[[int], int], rank: int
) -> Ties | None:
    """Finds the table of the first chunk that is the last one's head, if this rank has either.

    Raises ConfigError for any other parameter in chunks of two ranks.
    """
    holders: dict[nn.Parameter, list[int]] = {}
    names: dict[nn.Parameter, str] = {}
    for number, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            holders.setdefault(param, []).append(number)
            names.setdefault(param, name)
    shared = {
        param: numbers
        for param, numbers in holders.items()
        if len({rank_of(number) for number in numbers}) > 1
    }
    table = (
        chain.model.get_input_embeddings() if hasattr(chain.model, "get_input_embeddings") else None
    )
    for param, numbers in shared.items():
        if param is not getattr(table, "weight", None) or numbers != [0, len(chunks) - 1]:
            raise ConfigError(
                f"{names[param]} is one parameter in chunks {', '.join(map(str, numbers))}, on"
                " different ranks: only the table of a transformers model that is its head, too,"
                " can be shared. Untie it, or use a schedule that has both on one rank"
                " (ZBVZeroBubble for the first and the last)."
            )
    if rank not in {rank_of(number) for numbers in shared.values() for number in numbers}:
        return None
    return Ties(list(shared), counts=rank == rank_of(0))
