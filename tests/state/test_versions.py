"""UnitVersions: the parameters of a unit are its newest or its stale weights, and an update makes
the newest ones the older."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.state.versions import UnitVersions


class Buffers:
    """Shows its weights: the parameter gets the ``value``."""

    def __init__(self, param: torch.nn.Parameter, value: float):
        self.param, self.flats = param, [torch.full((2, 2), value)]

    def show(self) -> None:
        self.param.data = self.flats[0]


class Unit:
    """Stands for a unit of one parameter, and for its stale weights."""

    def __init__(self, *, stays: bool = False, stepped: tuple[bool, ...] = (True,)):
        self.param = torch.nn.Parameter(torch.zeros(2, 2))
        self.version, self.uses_stale, self.stays, self.stale = 5, False, stays, None
        self.buffers = Buffers(self.param, 1.0)
        self.flat_params = [
            SimpleNamespace(spec=SimpleNamespace(stepped=each), weight=SimpleNamespace(flat=flat))
            for each, flat in zip(stepped, self.buffers.flats * len(stepped))
        ]

    @property
    def in_use(self):
        return self.stale if self.uses_stale else self

    def make_stale(self, index: int):
        self.stale = SimpleNamespace(index=index, version=0, buffers=Buffers(self.param, 2.0))
        return self.stale

    def change_places(self, other) -> None:
        self.buffers, other.buffers = other.buffers, self.buffers

    @property
    def shown(self) -> float:
        return self.param.detach().unique().item()


@pytest.fixture
def versions() -> UnitVersions:
    """Of a unit whose newest weights are ones and whose older ones are twos."""
    made = UnitVersions(Unit(), 7)
    made.unit.buffers.show()
    return made


def cast(unit: Unit) -> float:
    """The weight as an operation under autocast gets it: torch keeps the cast for the next one."""
    return (torch.ones(1, 2) @ unit.param).unique().item() / 2


def test_a_units_older_weights_are_made_with_it(versions):
    assert versions.stale is versions.unit.stale and versions.stale.index == 7


def test_a_unit_has_versions_if_any_of_its_shards_is_stepped():
    assert UnitVersions.has(Unit(stepped=(False, True)))
    assert not UnitVersions.has(Unit(stepped=(False, False)))


def test_parameters_are_the_version_that_is_computed_with(versions):
    """Claim: and so is what torch has cast of them. Twin: without a change they are not shown
    anew."""
    unit = versions.unit
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for stale, value in ((True, 2), (False, 1), (True, 2)):
            versions.compute_with(stale=stale)
            assert (unit.uses_stale, unit.shown, cast(unit)) == (stale, value, value)
    unit.stale.buffers.flats[0] = torch.full((2, 2), 9.0)
    versions.compute_with(stale=True)
    assert unit.shown == 2


def test_an_update_makes_the_newest_weights_the_older_ones(versions):
    """Claim: with their version. The parameters are views of what is written next."""
    unit = versions.unit
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cast(unit) == 1
        versions.begin_update()
        assert (unit.version, versions.stale.version) == (6, 5)
        assert unit.shown == cast(unit) == 2
        versions.compute_with(stale=True)
        assert unit.shown == cast(unit) == 1
    versions.begin_update()
    assert (unit.version, versions.stale.version) == (7, 6)


@pytest.mark.parametrize(
    "stays, is_swapped", [(True, True), (True, False), (False, True), (False, False)]
)
def test_after_an_interrupt_the_newest_weights_are_computed_with(stays, is_swapped):
    """Claim: buffers that are the home go back to it. Twin: other buffers, which are filled again,
    stay where they are."""
    versions = UnitVersions(Unit(stays=stays), 7)
    unit = versions.unit
    if is_swapped:
        unit.change_places(versions.stale)
    unit.uses_stale = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        unit.in_use.buffers.show()
        cast(unit)
        versions.settle()
        assert not unit.uses_stale
        assert unit.shown == cast(unit) == (2 if is_swapped and not stays else 1)
