"""Order: which samples each batch has, as a function of one number.

consumed   batches that the job has trained on, over all epochs: the whole state of an order

Batch n is the same for any number of ranks and workers and after any number of restarts. What
workers have read ahead is not a part of the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ...errors import ConfigError
from .permutation import mixed, shuffled


class Batch(list):
    """The samples of one rank's part of a batch. ``number``: of the batch, counted from the first
    epoch on."""

    def __init__(self, samples: list[int], number: int):
        super().__init__(samples)
        self.number = number

    def __reduce__(self) -> tuple:
        return Batch, (list(self), self.number)


class Order(Sampler):
    """A batch sampler whose state is one number. Each iteration is one epoch, the first one what is
    left of its own.

        order = infinity.data.Order(len(dataset), batch_size=64, seed=1, consumed=steps)
        for batch in DataLoader(dataset, batch_sampler=order, num_workers=4):
            ...

    An iteration that begins in the middle of an epoch leaves torch's generator as it was.

    samples
        The number of samples, or the dataset.
    batch_size
        Samples of a batch, over all ranks. Rank r of W has every W-th of them, from the r-th on.
    consumed
        Batches that were trained on before. With the steps of ``Checkpoints.resume()`` each
        iteration begins after the steps that were taken, also if an epoch is left early.
    shuffle
        False: in the order of the dataset, in every epoch.
    drop_last
        Leaves out a last batch that is not full.
    rank, ranks
        Of the processes with data of their own. Default: torch.distributed's. Give those of the
        data axis if others (``tp``, ``pp``) have the same batches.

    Raises ConfigError for numbers that make no batches, or that ranks cannot share evenly.
    """

    def __init__(
        self,
        samples: int | Sized,
        *,
        batch_size: int,
        seed: int = 0,
        consumed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ):
        started = dist.is_available() and dist.is_initialized()
        self._ranks = ranks if ranks is not None else dist.get_world_size() if started else 1
        self._rank = rank if rank is not None else dist.get_rank() if started else 0
        self._samples, self._batch_size, self._seed = _count_of(samples), batch_size, seed
        self._shuffle, self._drop_last = shuffle, drop_last
        self._check()
        self._batch_size, self._seed = int(batch_size), int(seed)
        short = 0 if drop_last or self._samples % self._batch_size == 0 else 1
        self._per_epoch = self._samples // self._batch_size + short
        if (continues := getattr(consumed, "continues", None)) is not None:  # of Checkpoints
            continues(self.fingerprint)
        if not isinstance(consumed, Integral) or isinstance(consumed, bool) or consumed < 0:
            raise ConfigError(f"Order: consumed={consumed!r} must be a number of batches, from 0")
        self._next = int(consumed)
        self._count = getattr(consumed, "now", None)
        self._before_draw: torch.Tensor | None = None

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the batches depend on, beside their number."""
        return {
            "samples": self._samples,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._first // self._per_epoch

    @property
    def _first(self) -> int:
        """The first batch of the next iteration: as Checkpoints counts them, if it does. So an
        epoch that was left early goes on."""
        now = self._count() if self._count is not None else None
        return self._next if now is None else now

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: one epoch follows the other. Trainers call this with a count of their own,
        which begins anew when a job is resumed."""

    def epoch_of(self, number: int) -> int:
        """Returns the epoch of a batch."""
        return number // self._per_epoch

    def batch(self, number: int) -> Batch:
        """Returns this rank's part of a batch by its number, counted from the first epoch on."""
        epoch, place = divmod(number, self._per_epoch)
        begin = place * self._batch_size
        places = np.arange(begin, min(begin + self._batch_size, self._samples))
        places = places[self._rank :: self._ranks]
        if self._shuffle:
            places = shuffled(places, self._samples, mixed(self._seed, epoch))
        return Batch(places.tolist(), number)

    def __iter__(self) -> Iterator[Batch]:
        # A DataLoader begins an iteration once or twice, and draws a number. The job that is
        # resumed in the middle of an epoch has drawn it before.
        if self._first % self._per_epoch and self._before_draw is None:
            self._before_draw = torch.get_rng_state()
        return self._epoch()

    def _epoch(self) -> Iterator[Batch]:
        """Yields the batches until the end of the epoch. Begins at the first one that is asked
        for."""
        first, end = self._first, (self.epoch + 1) * self._per_epoch
        if self._before_draw is not None:
            torch.set_rng_state(self._before_draw)
        self._next, self._before_draw = end, None
        yield from map(self.batch, range(first, end))

    def __len__(self) -> int:
        """Counts the batches of an epoch."""
        return self._per_epoch

    def _check(self) -> None:
        """Raises ConfigError for numbers that make no batches."""
        for name, value, least in (
            ("samples", self._samples, 1),
            ("batch_size", self._batch_size, 1),
            ("ranks", self._ranks, 1),
            ("rank", self._rank, 0),
        ):
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise ConfigError(f"Order: {name}={value!r} must be a whole number from {least}")
        if not isinstance(self._seed, Integral) or isinstance(self._seed, bool):
            raise ConfigError(f"Order: seed={self._seed!r} must be a whole number")
        if self._rank >= self._ranks:
            raise ConfigError(f"Order: rank={self._rank} of ranks={self._ranks}: count from 0")
        if over := self._batch_size % self._ranks:
            below, above = self._batch_size - over, self._batch_size + self._ranks - over
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"Order: batch_size={self._batch_size} is of all ranks, and {self._ranks} ranks"
                f" cannot share it evenly. Set it to {near}."
            )
        last = self._samples % self._batch_size
        if self._drop_last and self._samples < self._batch_size:
            raise ConfigError(
                f"Order: {self._samples} samples make no batch of {self._batch_size}: set"
                " batch_size to fewer, or drop_last=False"
            )
        if not self._drop_last and last % self._ranks:
            raise ConfigError(
                f"Order: the last batch of an epoch has {last} samples, which {self._ranks} ranks"
                " cannot share evenly. Set drop_last=True, or another batch_size."
            )


def _count_of(samples: int | Sized) -> int:
    if isinstance(samples, Integral):
        return int(samples)
    try:
        return len(samples)
    except TypeError:
        raise ConfigError(
            f"Order: {type(samples).__name__} has no length, so that its samples have no numbers."
            " Give it __len__ and __getitem__, or give Checkpoints(loader=...) a"
            " torchdata StatefulDataLoader."
        ) from None
