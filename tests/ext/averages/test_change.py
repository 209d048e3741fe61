"""Change: of arrays beside the masters, which may be interrupted."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from models import at_home, seeded
from torch import nn

import infinity
from infinity.core.units.pieces import pieces_of, read_value
from infinity.ext.averages.change import Progress, change_pieces


class Made:
    def __init__(self, home: str, swap, dtype: torch.dtype = torch.float32):
        model = seeded(3, lambda: nn.Linear(8, 8)).to(dtype)
        self.before = {name: value.clone() for name, value in model.state_dict().items()}
        self.model, self.optimizer = infinity.wrap_model(
            model, torch.optim.SGD(model.parameters(), lr=0.5), at_home(home, home, swap)
        )
        self.job = parts_of(self.model).job
        self.flat_params = [flat for unit in self.job.units for flat in unit.flat_params]

    def read(self) -> torch.Tensor:
        found = [read_value(self.job.store, piece) for piece in pieces_of(self.flat_params)]
        return torch.cat(found)


@pytest.mark.parametrize("interrupted_at", [0, 1])
def test_what_was_computed_is_only_written_again(interrupted_at, swap):
    """Claim: a change of the old value is made once. Twin: without progress it would be made
    twice."""
    made = Made("host", swap)
    begun, written = [], []

    def compute(piece):
        return {"weight": read_value(made.job.store, piece) + 1}

    def write(piece, parts):
        if len(begun) == interrupted_at and not written:
            written.append(piece)
            made.job.store.write(piece.flat_param.weight, piece.begin, parts["weight"], version=1)
            raise KeyboardInterrupt
        begun.append(piece)
        made.job.store.write(piece.flat_param.weight, piece.begin, parts["weight"], version=1)

    before, progress = made.read(), Progress()
    with pytest.raises(KeyboardInterrupt):
        change_pieces(made.flat_params, compute, write, progress)
    change_pieces(made.flat_params, compute, write, progress)
    assert torch.equal(made.read(), before + 1)
    change_pieces(made.flat_params, compute, write, progress)  # done
    assert torch.equal(made.read(), before + 1)
    change_pieces(made.flat_params, compute, write, Progress())
    assert torch.equal(made.read(), before + 1 + 1)
