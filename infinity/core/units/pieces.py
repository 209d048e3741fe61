"""Pieces: reads and writes parameters' values at home in parts that fit memory, for arrays that are
kept beside the masters.

piece   some elements of one parameter that this rank has at home: what is in memory at once
value   what the optimizer steps: the master, or the parameter itself
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ... import native
from ..homes.store import ArrayStore
from .flat_param import FlatParam

# Whole SIMD vectors on every CPU, so that elements round as in a whole tensor.
PIECE_NUMEL = 4 * 1024 * 1024


@dataclass(frozen=True)
class Piece:
    """Elements ``begin`` to ``end`` of this rank's shard of a flat param, all of one parameter."""

    flat_param: FlatParam
    begin: int
    end: int


def pieces_of(flat_params: Iterable[FlatParam]) -> Iterator[Piece]:
    """Yields every piece of ``flat_params``."""
    for flat_param in flat_params:
        for index in range(len(flat_param.params)):
            begin, end = flat_param.layout.part_at_home("weight", index)
            for at in range(begin, end, PIECE_NUMEL):
                yield Piece(flat_param, at, min(end, at + PIECE_NUMEL))


def read_value(store: ArrayStore, piece: Piece) -> torch.Tensor:
    """Reads the value of a piece: fp32 if it has a master."""
    flat_param = piece.flat_param
    weight = store.read(flat_param.weight, piece.begin, piece.end)
    if "master" not in flat_param.arrays:
        return weight
    master = store.read(flat_param.arrays["master"], piece.begin, piece.end)
    return (
        native.join_master(weight, master)
        if flat_param.spec.master == native.Master.SPLIT
        else master
    )
