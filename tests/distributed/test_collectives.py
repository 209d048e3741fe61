"""Collectives of one process, with other ranks made up: what they compute, without a launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.distributed import collectives as module
from infinity.distributed.collectives import BACKWARD_OVER, MOST_OFFERED, Collectives
from infinity.distributed.data_ranks import DataRanks


def replicas(of: torch.Tensor, monkeypatch) -> Collectives:
    """This rank's collectives beside one replica, which has ``of``; nobody shares the arrays."""

    def all_gather(out, mine, **how):
        out.view(2, -1)[0].copy_(mine)
        out.view(2, -1)[1].copy_(of)

    monkeypatch.setattr(module, "all_gather", all_gather)
    return Collectives(DataRanks(replicas=SimpleNamespace(rank=0, size=2, bulk=None)))


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
        return torch.tensor([flags, [other]], dtype=torch.uint8)

    ranks = DataRanks(size=2, row=SimpleNamespace(rank=0, size=2, rendezvous=rendezvous))
    assert Collectives(ranks).offer(mine) == least
