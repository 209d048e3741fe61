"""WeightStorages: a tensor leads to the unit whose device buffer it is a view of, or to none."""

from __future__ import annotations

import gc

import pytest
import torch

from infinity.core.units.weight_storages import WeightStorages


class Unit:
    """Stands for a unit, which is only returned."""


def test_a_view_of_a_buffer_leads_to_its_unit_and_another_tensor_to_none():
    storages, units, flats = WeightStorages(), [Unit(), Unit()], [torch.zeros(6), torch.zeros(6)]
    for unit, flat in zip(units, flats):
        storages.enter(unit, flat)
    for unit, flat in zip(units, flats):
        for view in (flat, flat[2:4], flat.view(2, 3).t(), flat.detach(), torch.nn.Parameter(flat)):
            found, buffer = storages.find(view)
            assert found is unit and buffer is flat
        assert storages.find(flat.clone()) is None
    assert WeightStorages().find(flats[0]) is None


def test_a_unit_that_is_gone_is_not_found_and_is_not_kept():
    storages, unit, flat = WeightStorages(), Unit(), torch.zeros(6)
    storages.enter(unit, flat)
    assert storages.find(flat) is not None
    del unit
    gc.collect()
    assert storages.find(flat) is None


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_buffer_is_found_by_its_new_storage_once_it_has_it(is_replaced):
    """Twin: until then by its old one."""
    storages, unit, flat = WeightStorages(), Unit(), torch.zeros(6)
    storages.enter(unit, flat)
    before = flat.detach()
    before = torch.empty(0).set_(before.untyped_storage(), 0, (6,), (1,))
    other = torch.ones(6)
    storages.replace(flat, other.untyped_storage())
    if is_replaced:
        flat.data = other
    for tensor, is_found in ((flat, True), (other, is_replaced), (before, not is_replaced)):
        found = storages.find(tensor)
        assert (found is not None) == is_found
        assert found is None or (found[0] is unit and found[1] is flat)


def test_a_buffer_is_found_after_its_storage_was_replaced_twice():
    storages, unit, flat = WeightStorages(), Unit(), torch.zeros(6)
    neighbour, beside = Unit(), torch.zeros(3)
    storages.enter(unit, flat)
    storages.enter(neighbour, beside)
    for _ in range(2):
        other = torch.ones(6)
        storages.replace(flat, other.untyped_storage())
        flat.data = other
        assert storages.find(flat[1:]) == (unit, flat)
    assert storages.find(beside)[0] is neighbour


def test_a_tensor_of_functorch_is_found_as_no_weight():
    """Twin: the same weight outside the transform is found."""
    storages, unit, flat = WeightStorages(), Unit(), torch.zeros(6)
    storages.enter(unit, flat)
    found = []

    def seen(tensor):
        found.append(storages.find(tensor))
        return tensor

    torch.vmap(seen)(flat.view(2, 3))
    assert found == [None] and storages.find(flat) is not None
