"""Change: computes new parts of arrays that are kept beside the masters, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ...core.units.flat_param import FlatParam
from ...core.units.pieces import Piece, pieces_of


@dataclass
class Progress:
    """Progress of a change: the number of pieces done, and the computed parts of the next, perhaps
    unwritten."""

    at: tuple[int, dict[str, torch.Tensor] | None] = (0, None)


def change_pieces(
    flat_params: Iterable[FlatParam],
    compute: Callable[[Piece], dict[str, torch.Tensor]],
    write: Callable[[Piece, dict[str, torch.Tensor]], None],
    progress: Progress,
) -> None:
    """Computes new parts of arrays piece by piece, and writes them. If an exception interrupts it,
    it is called again with the same ``progress``: what was computed is then only written."""
    for number, piece in enumerate(pieces_of(flat_params)):
        done, ready = progress.at
        if number < done:
            continue
        if ready is None:
            ready = compute(piece)
            progress.at = (number, ready)
        write(piece, ready)
        progress.at = (number + 1, None)
