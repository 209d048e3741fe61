"""Pieces: values at home in parts."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from models import at_home, seeded
from torch import nn

import infinity
from infinity.core.units import pieces
from infinity.core.units.pieces import pieces_of, read_value


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


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_masters_in_parts(home, dtype, swap, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 16)
    made = Made(home, swap, dtype)
    assert len(list(pieces_of(made.flat_params))) == 4 + 1
    expected = torch.cat([value.flatten() for value in made.before.values()]).float()
    assert torch.equal(made.read(), expected) and made.read().dtype == torch.float32
