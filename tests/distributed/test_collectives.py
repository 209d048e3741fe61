"""Collectives of one process, with other ranks made up: what they compute, without a launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.distributed import collectives as module
from infinity.distributed.collectives import BACKWARD_OVER, MOST_OFFERED, Collectives
from infinity.distributed.data_ranks import DataRanks
from infinity.distributed.lockstep import Lockstep


def replicas(of: torch.Tensor, monkeypatch) -> Collectives:
    """This rank's collectives beside one replica, which has ``of``; nobody shares the arrays."""

    def all_gather(out, mine, **how):
        out, mine = out.view(torch.float32), mine.view(torch.float32)
        out.view(2, -1)[0].copy_(mine)
        out.view(2, -1)[1].copy_(of)
        return SimpleNamespace(wait=lambda limit: None, is_completed=lambda: True)

    monkeypatch.setattr(module, "all_gather", all_gather)
    place = SimpleNamespace(rank=0, size=2, bulk=None, lockstep=Lockstep(), finish_meeting=lambda: None)
    return Collectives(DataRanks(replicas=place))


def test_averages_are_over_all_data_ranks(monkeypatch):
    """A row of one and two replicas: the sum of both is divided by two, not by the row's size."""
    found = []
    pending = replicas(torch.tensor([5.0, 7.0]), monkeypatch).reduce(torch.tensor([1.0, 2.0]), "a gradient", found.append)
    pending.wait()
    assert torch.equal(found[0], torch.tensor([3.0, 4.5]))


@pytest.mark.parametrize(
    ("mine", "theirs", "least"), [(3, 2, 2), (2, 3, 2), (None, 4, 4), (4, None, 4), (None, None, None), (999, None, MOST_OFFERED)]
)
def test_an_offer_is_the_least_of_all_ranks(mine, theirs, least):
    """None: a rank whose backward is over can start whatever the others can."""

    def rendezvous(what, flags):
        other = BACKWARD_OVER if theirs is None else theirs
        return torch.tensor([flags, [255 - other]], dtype=torch.uint8).amax(0)

    ranks = DataRanks(size=2, row=SimpleNamespace(rank=0, size=2, rendezvous=rendezvous, finish_meeting=lambda: None))
    assert Collectives(ranks).offer(mine) == least
