"""UnitVersions: the parameters of a unit are its newest or its stale weights, and an update makes
the newest ones the older."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.ext.versions_2bw.versions import UnitVersions


class Buffers:
    """Shows its weights: the parameter gets the ``value``."""

    def __init__(self, param: torch.nn.Parameter, value: float):
        self.param, self.flats = param, [torch.full((2, 2), value)]

    def show(self) -> None:
        self.param.data = self.flats[0]


class Unit:
    """Stands for a unit of one parameter, and for its stale weights."""

    def __init__(self, *, computes_at_home: bool = False, stepped: tuple[bool, ...] = (True,)):
        self.param = torch.nn.Parameter(torch.zeros(2, 2))
        self.version, self.in_use, self.computes_at_home, self.older = 5, None, computes_at_home, []
        self.log: list[Any] = []
        self.buffers = Buffers(self.param, 1.0)
        self.flat_params = [
            SimpleNamespace(
                spec=SimpleNamespace(stepped=each),
                weight=SimpleNamespace(flat=flat),
                homes=SimpleNamespace(
                    readers=(0, 1),
                    hold=self.log.append,
                    drop_drafts=lambda: self.log.append("drop"),
                ),
            )
            for each, flat in zip(stepped, self.buffers.flats * len(stepped))
        ]

    def make_pinned(self, index: int):
        value = 2.0 + len(self.older)
        self.older.append(
            SimpleNamespace(index=index, version=0, buffers=Buffers(self.param, value))
        )

    def change_places(self, other) -> None:
        self.buffers, other.buffers = other.buffers, self.buffers

    @property
    def shown(self) -> float:
        return self.param.detach().unique().item()


@pytest.fixture
def versions() -> UnitVersions:
    """Of a unit whose newest weights are ones and whose older ones are twos and threes."""
    unit = Unit()
    for index in (7, 8):
        unit.make_pinned(index)
    unit.buffers.show()
    return UnitVersions(unit)


def cast(unit: Unit) -> float:
    """The weight as an operation under autocast gets it: torch keeps the cast for the next one."""
    return (torch.ones(1, 2) @ unit.param).unique().item() / 2


def test_a_unit_has_versions_if_any_of_its_shards_is_stepped():
    assert UnitVersions.has(Unit(stepped=(False, True)))
    assert not UnitVersions.has(Unit(stepped=(False, False)))


def test_parameters_are_the_version_that_is_computed_with(versions):
    """Claim: and so is what torch has cast of them. Twin: without a change they are not shown
    anew."""
    unit = versions.unit
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for slot, value in ((0, 2), (None, 1), (1, 3), (0, 2)):
            versions.compute_with(slot)
            assert (unit.shown, cast(unit)) == (value, value)
            assert unit.in_use is (None if slot is None else unit.older[slot])
    unit.older[0].buffers.flats[0] = torch.full((2, 2), 9.0)
    versions.compute_with(0)
    assert unit.shown == 2


def test_an_update_makes_the_newest_weights_the_older_ones(versions):
    """Claim: with their version, in the slot that was asked for. The parameters are views of what
    is written next. Twin: the other slot stays as it was."""
    unit = versions.unit
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cast(unit) == 1
        versions.begin_update(0)
        assert (unit.version, unit.older[0].version) == (6, 5)
        assert unit.shown == cast(unit) == 2
        versions.compute_with(0)
        assert unit.shown == cast(unit) == 1
        versions.compute_with(1)
        assert unit.shown == cast(unit) == 3
    versions.begin_update(1)
    assert (unit.version, unit.older[0].version, unit.older[1].version) == (7, 5, 6)
    assert unit.log == [0, 1]


@pytest.mark.parametrize(
    "computes_at_home, is_swapped", [(True, True), (True, False), (False, True), (False, False)]
)
def test_after_an_interrupt_the_newest_weights_are_computed_with(computes_at_home, is_swapped):
    """Claim: buffers that are the home go back to it. Twin: other buffers, which are filled again,
    stay where they are."""
    unit = Unit(computes_at_home=computes_at_home)
    unit.make_pinned(7)
    versions = UnitVersions(unit)
    if is_swapped:
        unit.change_places(unit.older[0])
    unit.in_use = unit.older[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        unit.in_use.buffers.show()
        cast(unit)
        versions.settle()
        assert unit.in_use is None and unit.log == ["drop"]
        assert unit.shown == cast(unit) == (2 if is_swapped and not computes_at_home else 1)
