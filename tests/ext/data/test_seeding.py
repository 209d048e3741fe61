"""Seeding: the same random numbers for any workers, or for any ranks too, and after a restart."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from infinity.data import Order, Seeded
from infinity.errors import ConfigError


class Augmented(Dataset):
    """Samples with random numbers of all three generators."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


class OfItsOwn(Dataset):
    """Samples with the seed that they got."""

    def __len__(self) -> int:
        return 32

    def at(self, index: int, seed: int) -> torch.Tensor:
        return torch.tensor([index, seed >> 2])


def trained(dataset, workers=0, consumed=0, ranks=1) -> list[torch.Tensor]:
    parts = []
    for rank in range(ranks):
        order = Order(32, batch_size=8, seed=2, consumed=consumed, rank=rank, ranks=ranks)
        loader = DataLoader(Seeded(dataset, order), batch_sampler=order, num_workers=workers)
        parts.append([batch for _ in range(2) for batch in loader])
    if ranks == 1:
        return parts[0]
    return [torch.stack(each, 1).flatten(0, 1) for each in zip(*parts)]


def same(one, other) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


@pytest.mark.parametrize("dataset", [Augmented(), OfItsOwn()])
def test_workers_and_restarts_change_nothing(dataset):
    """The twin: without Seeded they do."""
    whole = trained(dataset)
    assert same(trained(dataset, workers=2), whole)
    assert same(trained(dataset, workers=1, consumed=3), whole[3:])
    order = Order(32, batch_size=8, seed=2)
    if isinstance(dataset, Augmented):
        plain = [batch for _ in range(2) for batch in DataLoader(dataset, batch_sampler=order)]
        assert not same(plain, whole)
    assert not torch.equal(whole[0], whole[4])  # another epoch


def test_ranks_change_nothing_if_samples_have_their_seeds():
    """The twin: seeded by batches, ranks differ from one process, and from each other."""
    assert same(trained(OfItsOwn(), ranks=2), trained(OfItsOwn()))
    found = trained(Augmented(), ranks=2)
    assert not same(found, trained(Augmented()))
    assert found[0][0, 1] != found[0][1, 1]


def test_the_process_keeps_its_own_generators():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    order = Order(32, batch_size=8, seed=2)
    Seeded(Augmented(), order).__getitems__(order.batch(0))
    assert torch.equal(torch.rand(3), expected)


def test_what_is_no_dataset_or_has_another_sampler_is_refused():
    order = Order(32, batch_size=8)
    with pytest.raises(ConfigError, match="neither at"):
        Seeded(iter(()), order)
    with pytest.raises(ConfigError, match="batch_sampler=order"):
        next(iter(DataLoader(Seeded(Augmented(), order), batch_size=8)))
