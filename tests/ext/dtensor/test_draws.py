"""Draws: which generators a forward drew from, and that ranks in other states are told apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch

from infinity.core.machine.device import Device
from infinity.core.machine.traffic import Traffic
from infinity.ext.dtensor.draws import Draws

GENERATORS: dict[str, Callable[[], object]] = {
    "torch's generator": lambda: torch.rand(1),
    "NumPy's generator": lambda: numpy.random.rand(),
    "Python's generator": lambda: random.random(),
}


@pytest.fixture(autouse=True)
def seeds() -> Iterator[None]:
    """All generators as they were, after each test."""
    before = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    seed(1)
    yield
    torch.set_rng_state(before[0])
    numpy.random.set_state(before[1])
    random.setstate(before[2])


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def made() -> Draws:
    return Draws(Device(torch.device("cpu"), Traffic()))


def forward(draws: Draws, *drawing: Callable[[], object], are_compared: bool = True) -> dict:
    draws.begin(are_compared=are_compared)
    for draw in drawing:
        draw()
    draws.end()
    return dict(draws.drawn)


@pytest.mark.parametrize("name", GENERATORS)
def test_only_the_generator_that_was_drawn_from_is_named(name):
    assert list(forward(made(), GENERATORS[name])) == [name]


def test_nothing_is_named_where_nothing_is_drawn():
    """Method: what is drawn between two forwards is none of a forward's. Twin: inside it is."""
    draws = made()
    forward(draws)
    for draw in GENERATORS.values():
        draw()
    assert forward(draws) == {}
    assert set(forward(draws, *GENERATORS.values())) == set(GENERATORS)


def test_what_several_forwards_drew_from_is_named_together():
    draws = made()
    for draw in GENERATORS.values():
        forward(draws, draw)
    assert set(draws.drawn) == set(GENERATORS)


def test_what_ranks_need_not_share_is_not_named():
    """Twin: the next forward, which is compared, is."""
    draws = made()
    assert forward(draws, *GENERATORS.values(), are_compared=False) == {}
    assert forward(draws, GENERATORS["torch's generator"])


@pytest.mark.parametrize("name", GENERATORS)
def test_equal_states_have_equal_digests_and_others_have_others(name):
    """Method: the same draw of two ranks, seeded alike and differently. The second draws another
    number of values, which leaves the state before it as it was."""
    first = forward(made(), GENERATORS[name])
    seed(1)
    assert forward(made(), GENERATORS[name], GENERATORS[name]) == first
    seed(2)
    assert forward(made(), GENERATORS[name])[name] != first[name]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_digest_covers_earlier_forwards_until_they_are_forgotten(name):
    """Method: two ranks come to the same state by other ways; the last forwards alone are equal."""
    draws, alone = made(), made()
    seed(2)
    forward(draws, GENERATORS[name])
    seed(1)
    both = forward(draws, GENERATORS[name])
    seed(1)
    last = forward(alone, GENERATORS[name])
    assert both.keys() == last.keys() and both != last
    draws.forget()
    assert draws.drawn == {}
    seed(1)
    assert forward(draws, GENERATORS[name]) == last


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("NumPy's generator", lambda: numpy.random.randn()),
        ("Python's generator", lambda: random.gauss(0, 1)),
    ],
)
def test_half_a_pair_of_normal_numbers_is_a_draw(name, draw):
    """Claim: normal numbers come in pairs, and the second one of a pair changes only what is kept
    beside the generator's state."""
    draw()
    assert list(forward(made(), draw)) == [name]


def test_another_generator_of_numpy_is_seen():
    """Twin: one that nobody draws from is not named."""
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        assert forward(made()) == {}
        assert list(forward(made(), GENERATORS["NumPy's generator"])) == ["NumPy's generator"]
    finally:
        numpy.random.set_bit_generator(numpy.random.MT19937())


def test_every_digest_fits_what_ranks_exchange():
    """Claim: an int64, and never negative."""
    found = forward(made(), *GENERATORS.values())
    assert len(found) == 3 and all(0 < digest < 2**63 for digest in found.values())
