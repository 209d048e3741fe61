"""The prefetcher, with units made up: what it does with one whatever stage that is in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity
from infinity.distributed.collectives import Collectives
from infinity.machine.device import Device
from infinity.machine.ledger import Ledger
from infinity.machine.traffic import Traffic
from infinity.planning.schedule import Schedule
from infinity.runtime.prefetch import Prefetcher
from infinity.state.journal import Journal
from infinity.state.residency import Residency

FLEETING = {Residency.FETCHING: ["drop"], Residency.STAGED: ["drop"], Residency.GATHERING: ["finish_gather", "release"],
            Residency.RESIDENT: ["release"], Residency.STORED: []}  # fmt: skip


class Unit:
    """One that notes what is asked of it."""

    index, name, weight_nbytes, stays = 0, "a unit", 8, False

    def __init__(self, residency: Residency):
        self.residency, self.asked = residency, []

    def drop(self, store) -> None:
        self.asked.append("drop")

    def finish_gather(self, store) -> None:
        self.asked.append("finish_gather")
        self.residency = Residency.RESIDENT

    def release(self) -> None:
        assert self.residency is Residency.RESIDENT, "what is under way still writes to the memory"
        self.asked.append("release")


@pytest.mark.parametrize("residency", Residency, ids=lambda residency: residency.name)
def test_a_unit_goes_home_from_every_stage(residency):
    """What is under way is finished, or dropped, before its memory goes."""
    unit, device = Unit(residency), Device(torch.device("cpu"), Traffic())
    prefetcher = Prefetcher(
        [unit], SimpleNamespace(), Ledger(), Schedule(), window_nbytes=8, units_ahead=1, give_way=lambda: False, before_gather=lambda: None,
        collectives=Collectives(), device=device, journal=Journal(),
    )  # fmt: skip
    prefetcher.release_all([unit])
    assert unit.asked == FLEETING[residency]


class ReturnsViews(nn.Module):
    """Gives views of its own weight beside a result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4096.0).view(64, 64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x @ self.weight, "row": self.weight[1], "all": self.weight.t()}


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_views_of_weights_in_an_output_outlive_the_unit(home, swap):
    """Method: a forward gives views of its weight; they have its values after another unit took the memory, and after a step."""
    model = nn.ModuleList([ReturnsViews(), nn.Linear(64, 64)])
    root = nn.Module()
    root.blocks = model
    root.forward = lambda x: (model[0](x), model[1](x))
    expected = model[0].weight.detach().clone()
    config = {"params": home, "optimizer": home, "nvme_paths": [str(swap)]}
    root, optimizer = infinity.wrap_model(root, torch.optim.AdamW(root.parameters(), lr=0.1), config)
    first, second = root(torch.ones(2, 64))
    (first["y"].sum() + second.sum()).backward()
    optimizer.step()
    root(torch.ones(2, 64))
    assert torch.equal(first["row"], expected[1]) and torch.equal(first["all"], expected.t())
