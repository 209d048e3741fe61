"""Seeding: random augmentation that does not depend on workers, or on where a job was resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ...errors import ConfigError
from .order import Batch, Order
from .permutation import mixed


class Seeded(Dataset):
    """A dataset whose random numbers depend on the seed of ``order``, the epoch and the sample.

        loader = DataLoader(infinity.data.Seeded(dataset, order), batch_sampler=order)

    If the dataset has ``at(index, seed)``, it gets a seed for each sample: the same for any number
    of ranks. Else torch, numpy and random are seeded for each batch of a rank: the same for any
    number of workers. The process's own generators stay as they are.

    Raises ConfigError for a dataset without ``__getitem__``.
    """

    def __init__(self, dataset: Any, order: Order):
        if not hasattr(dataset, "at") and not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"Seeded: {type(dataset).__name__} has neither at(index, seed) nor __getitem__"
            )
        self._dataset, self._order = dataset, order

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, batch: Batch) -> list[Any]:
        """Reads the samples of one batch of the order."""
        if not isinstance(batch, Batch):
            raise ConfigError("Seeded: give the DataLoader batch_sampler=order, the same one")
        order = self._order
        epoch = order.epoch_of(batch.number)
        if hasattr(self._dataset, "at"):
            return [self._dataset.at(each, mixed(order.seed, epoch, each)) for each in batch]
        first = batch[0] if batch else 0  # ranks differ in it
        with _seeded(mixed(order.seed, batch.number, first)):
            return [self._dataset[each] for each in batch]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of this process, and puts them back."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(seed)  # not those of GPUs
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
