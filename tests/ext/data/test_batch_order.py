"""Order: each sample once an epoch, the same batches for any ranks, workers and restarts."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from marks import few
from torch.utils.data import DataLoader, Dataset

import infinity
from infinity.data import Order
from infinity.errors import ConfigError


class Numbers(Dataset):
    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def epochs(order: Order, count: int) -> list[list[int]]:
    return [list(batch) for _ in range(count) for batch in order]


def forever(order: Order) -> Iterator[list[int]]:
    while True:
        yield from order


def test_an_epoch_has_every_sample_once():
    order = Order(103, batch_size=10, seed=4)
    first, second = epochs(order, 1), epochs(order, 1)
    for batches in (first, second):
        assert sorted(sum(batches, [])) == list(range(103))
        assert [len(batch) for batch in batches] == [10] * 10 + [3]
    assert first != second and len(order) == 11
    assert epochs(Order(103, batch_size=10, seed=5), 1) != first


@pytest.mark.parametrize("jobs", few([40, 200], 1))
def test_batches_are_the_same_after_any_number_of_restarts(jobs):
    """Method: a job ends and goes on at random places, also on 1, 2 or 4 ranks."""
    picks = random.Random(1)
    expected = epochs(Order(96, batch_size=8, seed=3), 4)
    for _ in range(jobs):
        found, done = [], 0
        while done < len(expected):
            until = min(len(expected), done + picks.randint(0, 30))
            ranks = picks.choice([1, 2, 4])
            parts = [
                Order(96, batch_size=8, seed=3, consumed=done, rank=rank, ranks=ranks)
                for rank in range(ranks)
            ]
            iterators = list(map(forever, parts))
            for _ in range(done, until):
                each = [next(iterator) for iterator in iterators]
                found.append([each[n % ranks][n // ranks] for n in range(8)])
            done = until
        assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_has_the_orders_batches(workers):
    order = Order(Numbers(40), batch_size=8, seed=1, consumed=2)
    loader = DataLoader(Numbers(40), batch_sampler=order, num_workers=workers)
    found = [batch.tolist() for _ in range(2) for batch in loader]
    assert found == epochs(Order(40, batch_size=8, seed=1), 2)[2:]


def test_an_iteration_is_an_epoch_and_the_first_one_its_rest():
    order = Order(40, batch_size=10, consumed=6)
    assert order.epoch == 1 and len(list(order)) == 2
    assert order.epoch == 2 and len(list(order)) == 4


def test_a_trainer_that_counts_epochs_from_0_changes_nothing():
    order = Order(40, batch_size=10, consumed=6)
    order.set_epoch(0)
    assert [batch.number for batch in order] == [6, 7]


def test_samples_may_stay_in_place_or_the_last_batch_be_left_out():
    assert epochs(Order(5, batch_size=2, shuffle=False), 1) == [[0, 1], [2, 3], [4]]
    order = Order(5, batch_size=2, drop_last=True)
    assert [len(batch) for batch in epochs(order, 1)] == [2, 2] and len(order) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_the_generator_goes_on_as_in_the_job_that_was_not_ended(workers):
    """Claim: numbers drawn beside a loader. The twin: a plain sampler has others after a restart,
    as its loader draws once more."""

    def drawn(order, state=None):
        found = []
        torch.manual_seed(5)
        loader = DataLoader(Numbers(40), batch_sampler=order, num_workers=workers)
        if state is not None:
            torch.set_rng_state(state)
        for _ in range(3):
            for _ in loader:
                found.append((torch.rand(()).item(), torch.get_rng_state()))
        return found

    whole = drawn(Order(40, batch_size=10))
    resumed = drawn(Order(40, batch_size=10, consumed=6), whole[5][1])
    assert [value for value, _ in resumed[:6]] == [value for value, _ in whole[6:]]
    plain = drawn([[0], [1]], whole[5][1])
    assert plain[0][0] != whole[6][0]


def test_a_batch_keeps_its_number_on_the_way_to_a_worker():
    batch = Order(40, batch_size=8).batch(7)
    sent = pickle.loads(pickle.dumps(batch))
    assert sent == batch and sent.number == 7


@pytest.mark.parametrize("samples, batch_size", [(1, 1), (7, 7), (3, 9), (10**9, 512)])
def test_unusual_sizes(samples, batch_size):
    order = Order(samples, batch_size=batch_size, consumed=1)
    batch = next(iter(order))
    assert len(set(batch)) == min(batch_size, samples) and max(batch) < samples


BAD = {
    "no samples": (lambda: Order(0, batch_size=1), "samples=0"),
    "a batch of none": (lambda: Order(8, batch_size=0), "batch_size=0"),
    "half a batch": (lambda: Order(8, batch_size=2.5), "batch_size=2.5"),
    "a seed that is a word": (lambda: Order(8, batch_size=2, seed="one"), "seed='one'"),
    "a seed that is a switch": (lambda: Order(8, batch_size=2, seed=True), "seed=True"),
    "consumed before the first": (lambda: Order(8, batch_size=2, consumed=-1), "consumed=-1"),
    "a rank too many": (lambda: Order(8, batch_size=2, rank=2, ranks=2), "count from 0"),
    "an uneven batch": (lambda: Order(80, batch_size=10, ranks=4), "Set it to 8 or 12"),
    "a batch below the ranks": (lambda: Order(80, batch_size=2, ranks=4), "Set it to 4"),
    "an uneven last batch": (lambda: Order(9, batch_size=4, ranks=2), "drop_last=True"),
    "no whole batch": (lambda: Order(3, batch_size=4, drop_last=True), "no batch of 4"),
    "no length": (lambda: Order(iter(()), batch_size=4), "has no length"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_makes_no_batches_is_refused(what):
    make, said = BAD[what]
    with pytest.raises(ConfigError, match=said):
        make()


def test_numbers_of_numpy_are_numbers():
    order = Order(np.int64(8), batch_size=np.int64(4), seed=np.int64(1), consumed=np.int64(1))
    assert epochs(order, 1) == epochs(Order(8, batch_size=4, seed=1), 1)[1:]


def test_it_is_found_by_its_name():
    assert infinity.data.Order is Order
    assert isinstance(Order(4, batch_size=2), torch.utils.data.Sampler)
