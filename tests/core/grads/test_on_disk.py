"""Gradients at home on a disk: what nobody needs is not read."""

from __future__ import annotations

import pytest
import torch
from inside import parts_of
from models import at_home, least_host_memory, seeded
from runs import adamw
from torch import nn

import infinity
from infinity.core.machine.tiers import Tier


class Block(nn.Module):
    """Two layers, of which the second is left out at will."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.second(x).tanh() if both else x


class TwoPaths(nn.Module):
    """Twelve such blocks: more gradients than there are slots for those on their way."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, both)
        return x.pow(2).mean()


@pytest.mark.parametrize("micro", [1, 3])
def test_only_gradients_that_are_added_to_are_read(tmp_path, monkeypatch, micro):
    """Method: flat params whose gradients the store reads, in every backward of three steps; in the
    second step half of the parameters get none. The first backward of a step reads none, each
    further one all. The twin: with everything in memory the final bits are the same.
    """
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    finals = []
    for home in ("nvme", "host"):
        model = seeded(3, TwoPaths)
        optimizer = adamw(model, 1e-2)
        config = at_home(home, home, tmp_path)
        if home == "nvme":
            config["host_memory"] = least_host_memory(model, optimizer, config)
        model, optimizer = infinity.wrap_model(model, optimizer, config)
        engine, read = parts_of(model).engine, []
        grads = {
            flat.arrays["grad"]: flat
            for unit in parts_of(engine).units
            for flat in unit.flat_params
        }
        assert parts_of(engine).planned.plan.tiers["grad"] is (
            Tier.NVME if home == "nvme" else Tier.HOST
        )
        start_read = parts_of(engine).store.start_read
        monkeypatch.setattr(
            parts_of(engine).store,
            "start_read",
            lambda array, *args, **where: (read.append(array), start_read(array, *args, **where))[
                1
            ],
        )
        for step in range(3):
            for turn in range(micro):
                read.clear()
                model(x + turn, step != 1).backward()
                engine.gradients.homes.close_all(grads.values())
                found = {array for array in read if array in grads}
                assert found == (set() if turn == 0 or home == "host" else set(grads))
            optimizer.step()
            optimizer.zero_grad()
        finals.append(model.state_dict())
        infinity.unwrap_model(model, optimizer)
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
