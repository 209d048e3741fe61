"""Rotation: which pieces of the work are audited next.

piece   elements of one flat param: of this rank's shard, or of the whole one
step    a step or a pass: it audits as many pieces as the share says
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...core.run.step_counter import StepCounter

PIECE_NUMEL = 256 * 1024  # elements of a piece; whole blocks of 8-bit moments and of kernels
SEED = 64  # equal on all ranks, which have to choose the same pieces


@dataclass(frozen=True)
class Piece:
    """Elements ``begin`` to ``end`` of a flat param."""

    flat_param: Any
    begin: int
    end: int


def coming(steps: StepCounter) -> int:
    """Returns the number of the step that is being made, or is made next."""
    return steps.index + (not steps.begun)


class Rotation:
    """A seeded order of ``count`` pieces, of which each step takes the next ``share``. All have
    come once before one comes again."""

    def __init__(self, count: int, share: float, seed: int):
        self._count, self._share, self._seed = count, share, seed
        self._epoch = -1
        self._order: list[int] = []

    def at(self, step: int) -> list[int]:
        """Returns the indices of the pieces of ``step``, a number from 0 on."""
        first, last = (int(each * self._share * self._count + 1e-9) for each in (step, step + 1))
        return [self._at(number) for number in range(first, last)]

    def _at(self, number: int) -> int:
        epoch, place = divmod(number, self._count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(1_000_003 * epoch + self._seed)
            self._order = torch.randperm(self._count, generator=generator, device="cpu").tolist()
            self._epoch = epoch
        return self._order[place]


class ChosenPieces:
    """The pieces of the running step, by flat param. ``seed``: another for each kind of audit."""

    def __init__(self, share: float, seed: int):
        self._share, self._seed = share, SEED + seed
        self._flat_params: list[Any] = []
        self._pieces: list[Piece] = []
        self._rotation = Rotation(0, share, self._seed)
        self._at_step = -1
        self._by_flat: dict[Any, list[Piece]] = {}

    def choose(
        self, step: int, flat_params: Callable[[], list[Any]], *, whole: bool = False
    ) -> dict[Any, list[Piece]]:
        """Returns the chosen pieces of ``flat_params()`` at ``step``: of this rank's shards, or
        with ``whole`` of those of all ranks."""
        if step != self._at_step:
            if (present := flat_params()) != self._flat_params:
                self._flat_params, self._pieces = present, list(_pieces_of(present, whole))
                self._rotation = Rotation(len(self._pieces), self._share, self._seed)
            self._by_flat = {}
            for index in self._rotation.at(step):
                piece = self._pieces[index]
                self._by_flat.setdefault(piece.flat_param, []).append(piece)
            self._at_step = step
        return self._by_flat


def _pieces_of(flat_params: list[Any], whole: bool) -> Iterator[Piece]:
    for flat_param in flat_params:
        layout = flat_param.layout
        numel = layout.shard_numel
        for first in range(0, layout.numel if whole else numel, numel):  # none has parts of two
            for begin in range(first, first + numel, PIECE_NUMEL):
                yield Piece(flat_param, begin, min(begin + PIECE_NUMEL, first + numel))
