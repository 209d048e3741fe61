"""Exposure: parameters are ordinary ones while they are used, and what is done to them then goes
home or is refused.

Words used here: **outside**: a way to change a weight that torch does not count.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lone import lone_group
from memory_arrays import MemoryStore, give_arrays
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from infinity import native
from infinity.core.machine import storage_guard
from infinity.core.machine.tiers import Tier
from infinity.core.params import forward_edits
from infinity.core.params.parameter import ResidentParameter, StoredParameter
from infinity.core.run.journal import Journal
from infinity.core.units.exposure import Exposure
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.handle import own_bytes
from infinity.errors import UsageError
from infinity.ext.dtensor.stored import StoredDTensor
from infinity.ext.shared_homes.quantize import BlockCodes

F32 = torch.float32
SPEC = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, (), stepped=True)


class Buffer:
    """Stands for a device buffer; an export of its flat param, or that it was moved, is only
    said."""

    def __init__(self, flat_param: FlatParam):
        self.flat_param, self.is_exported, self.is_moved = flat_param, False, False


class Case:
    """A unit of two flat params, whose parameters are as they are at home."""

    def __init__(self, *, refusal: str = "", alone: bool = True, compresses: bool = False):
        self.store, self.journal, self.compared = MemoryStore(), Journal(), []
        collectives = SimpleNamespace(
            ranks=SimpleNamespace(alone=alone, encoding=BlockCodes() if compresses else None),
            meet=self.meet,
        )
        self.flat_params = []
        for names in (["a", "b"], ["c"]):
            params = [torch.nn.Parameter(torch.arange(4.0)) for _ in names]
            flat_param = give_arrays(FlatParam(SPEC, params))
            flat_param.names[:] = names
            flat_param.weight.extent = SimpleNamespace(version=3)
            for index, (param, name) in enumerate(zip(params, names)):
                flat_param.write_value(self.store, index, torch.arange(4.0), version=3)
                param._infinity = SimpleNamespace(name=name, forward_edits=0, grad=None, unit=self)
            self.flat_params.append(flat_param)
        self.buffers = [Buffer(flat) for flat in self.flat_params]
        self.params = [param for flat in self.flat_params for param in flat.params]
        buffers = SimpleNamespace(all=self.buffers)
        self.exposure = Exposure("block", self.flat_params, buffers, collectives, refusal=refusal)
        self.store.writes.clear()

    def meet(self, what: str, *tensors: torch.Tensor, over_tensors: bool) -> None:
        self.compared.append(what)

    def watch(self, param: torch.Tensor, data: torch.Tensor) -> None:
        self.exposure.watch(param, data, no_copy=False)

    def find(self, *, no_copy: bool = False) -> bool:
        return self.exposure.find_edits(self.store, no_copy=no_copy)

    def write(self, *, no_copy: bool = False) -> None:
        self.exposure.write_edits(self.store, self.journal, no_copy=no_copy)

    def at_home(self, number: int) -> list[float]:
        flat_param, index = ((0, 0), (0, 1), (1, 0))[number]
        return self.flat_params[flat_param].read_value(self.store, index).tolist()


def outside(param: torch.Tensor, value: float) -> None:
    """Fills the memory of ``param``, which torch does not count."""
    own_bytes(param).numpy()[:] = value


# --- classes ---


def test_parameters_are_ordinary_ones_from_the_begin_to_the_end():
    """Claim: they stay the same objects. Twin: what is forgotten ends, too."""
    case = Case()
    for stop in (case.exposure.end, case.exposure.forget):
        case.exposure.begin()
        assert [type(param) for param in case.params] == [ResidentParameter] * 3
        stop()
        assert [type(param) for param in case.params] == [StoredParameter] * 3
    assert case.params == [param for flat in case.flat_params for param in flat.params]


def test_a_distributed_parameter_is_exactly_a_dtensor_while_it_is_used():
    """Twin: a plain one beside it is not."""
    with lone_group():
        mesh = dist.init_device_mesh("cpu", (1,))
        parts = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        flat_param = FlatParam(SPEC, [parts, torch.nn.Parameter(torch.ones(4))])
        ranks = SimpleNamespace(ranks=SimpleNamespace(alone=True, encoding=None))
        exposure = Exposure("block", [flat_param], SimpleNamespace(all=[]), ranks)
        for _ in range(2):
            exposure.begin()
            assert [type(param) for param in flat_param.params] == [DTensor, ResidentParameter]
            exposure.end()
            assert [type(param) for param in flat_param.params] == [StoredDTensor, StoredParameter]


# --- edits in place ---


@pytest.mark.parametrize("number", range(3))
def test_a_change_in_place_is_found_and_goes_home(number):
    """Twins: before it there is none; the others' homes are not written."""
    case = Case()
    case.exposure.begin()
    assert not case.find()
    with torch.no_grad():
        case.params[number].mul_(2)
    assert case.find()
    case.write()
    assert [case.at_home(each) for each in range(3)] == [
        [0, 2, 4, 6] if each == number else [0, 1, 2, 3] for each in range(3)
    ]
    assert [(each.name, each.version) for each in case.store.writes] == [("weight", 3)]
    assert case.compared == [f"changing {'abc'[number]} in a forward"]
    assert case.journal.is_clear


def test_an_edit_is_written_with_what_the_home_and_the_ranks_are():
    """Method: edits in place that are refused. A home on the device has the change already; of
    compressed weights the value before is nowhere. Twin: the change of another use."""
    case = Case()
    case.exposure.begin()
    with torch.no_grad():
        case.params[0].mul_(2)
    case.write(no_copy=True)
    assert case.store.writes == []
    case = Case(compresses=True)
    case.exposure.begin()
    with torch.no_grad():
        case.params[0].mul_(2)
    with pytest.raises(UsageError, match="a was changed in place inside a forward, but it came"):
        case.write()
    case.exposure.begin()
    case.write()


def test_a_change_before_the_begin_is_none():
    case = Case()
    with torch.no_grad():
        case.params[0].mul_(2)
    case.exposure.begin()
    assert not case.find()


# --- data ---


@pytest.mark.parametrize("no_copy, compresses", [(False, False), (True, False), (False, True)])
def test_a_change_through_data_goes_home(no_copy, compresses):
    """Claim: home is compared with, or else a copy of the value before, where home is what was
    changed or another value."""
    case = Case(compresses=compresses)
    case.exposure.begin()
    data = own_bytes(case.params[1])
    if no_copy:
        case.flat_params[0].weight.flat[64:68] = 5
        outside(case.params[1], 5)
    if not no_copy and not compresses:
        data[0] = 4  # which home shows, and a copy of it would not
    case.exposure.watch(case.params[1], data, no_copy=no_copy)
    data[0 if no_copy else 1 :].numpy()[:] = 9
    if compresses:
        case.flat_params[0].weight.flat[64] = 0.25  # as home has it, and the device does not
    assert case.find(no_copy=no_copy)
    case.write(no_copy=no_copy)
    first = 9 if no_copy else 0.25 if compresses else 4
    assert case.at_home(1) == [first, 9, 9, 9]


def test_what_is_forgotten_is_not_found():
    """Twin: a new use finds what it watches itself."""
    case = Case()
    case.exposure.begin()
    case.exposure.watch(case.params[0], own_bytes(case.params[0]), no_copy=False)
    assert case.find()
    case.exposure.forget()
    assert not case.find()


# --- stale weights ---


def stale() -> Case:
    case = Case(
        refusal="parameters of unit block in place, which are older: the change would be lost"
    )
    case.exposure.begin()
    return case


def test_a_change_of_older_weights_is_refused():
    """Twin: one that changes nothing, through data that was watched, is not."""
    case = stale()
    assert not case.find()
    case.exposure.watch(case.params[2], own_bytes(case.params[2]), no_copy=False)
    assert not case.find()
    outside(case.params[2], 9)
    with pytest.raises(UsageError, match="parameters of unit block in place, which are older"):
        case.find()
    case = stale()
    with torch.no_grad():
        case.params[0].add_(1)
    with pytest.raises(UsageError, match="the change would be lost"):
        case.find()


def test_exports_of_older_weights_are_not_compared_with_home():
    """Method: a home with other values. Twin: exports of the newest weights are."""
    for case in (stale(), Case()):
        case.exposure.begin()
        case.buffers[0].is_exported = True
        case.flat_params[0].weight.flat.fill_(8)
        assert case.find() == (not case.exposure._refusal)


# --- exports ---


@pytest.mark.parametrize("number", range(3))
def test_a_change_through_an_export_goes_home(number):
    """Twins: of an export that was not used nothing is found, nor of a change without one."""
    case = Case()
    case.exposure.begin()
    outside(case.params[number], 7)
    assert not case.find()
    case.buffers[number // 2].is_exported = True
    assert case.find()
    case.write()
    assert case.at_home(number) == [7] * 4 and len(case.store.writes) == 1
    case.exposure.begin()
    assert not case.find()


def test_each_parameter_that_may_have_been_exported_is_compared_with_its_own_home():
    """Method: one that is as the home of another one. Twin: one that is as its own."""
    case = Case()
    case.exposure.begin()
    case.buffers[0].is_exported = True
    case.flat_params[0].write_value(case.store, 1, torch.full((4,), 7.0), version=3)
    assert case.find()
    case = Case()
    case.exposure.begin()
    case.buffers[0].is_exported = True
    case.flat_params[0].write_value(case.store, 1, torch.full((4,), 7.0), version=3)
    outside(case.params[1], 7)
    assert not case.find()


def test_an_export_from_an_earlier_use_is_compared_with_the_begin_of_this_one():
    """Method: home has other values, as after a use whose change was refused. Twin: a change in
    this use is found."""
    case = Case()
    case.buffers[0].is_exported = True
    case.flat_params[0].weight.flat.fill_(8)
    case.exposure.begin()
    assert not case.find()
    outside(case.params[0], 7)
    assert case.find()


def test_rows_that_change_places_through_an_export_are_found():
    case = Case()
    case.buffers[0].is_exported = True
    case.exposure.begin()
    values = own_bytes(case.params[0]).numpy()
    values[[0, 3]] = values[[3, 0]]
    assert case.find()


@pytest.mark.parametrize("alone, master", [(True, False), (True, True), (False, False)])
def test_a_home_on_the_device_is_read_only_if_a_change_could_be_lost(alone, master, monkeypatch):
    """A home on the device without masters is changed by an export itself; masters and other ranks
    would not follow."""
    case, read = Case(alone=alone), []
    monkeypatch.setattr(forward_edits, "fingerprint", lambda each: read.append(each) or 0)
    for buffer, flat_param in zip(case.buffers, case.flat_params):
        buffer.is_exported, flat_param.weight.tier = True, Tier.DEVICE
        if master:
            flat_param.arrays["master"] = flat_param.weight
    case.exposure.begin()
    assert len(read) == (0 if alone and not master else 3)


@pytest.mark.parametrize("no_copy, compresses", [(True, False), (False, True)])
def test_an_export_is_not_compared_with_a_home_that_shows_no_change(no_copy, compresses):
    case = Case(compresses=compresses)
    case.exposure.begin()
    case.buffers[0].is_exported = True
    outside(case.params[0], 7)
    assert not case.find(no_copy=no_copy)


def test_with_several_ranks_a_change_through_an_export_is_refused():
    """Twins: an export that was not used, and a change that is watched another way, are not."""
    case = Case(alone=False)
    case.exposure.begin()
    case.buffers[0].is_exported = True
    assert not case.find()
    outside(case.params[1], 7)
    with pytest.raises(UsageError, match="b was changed in a forward through an array"):
        case.find()
    case.exposure.watch(case.params[1], own_bytes(case.params[1]), no_copy=False)
    assert case.find()


def test_weights_that_were_moved_to_shared_memory_are_refused():
    """Claim: even where nothing could be compared. Twin: of stale weights nothing is asked."""
    for settings in ({}, {"compresses": True}):
        case = Case(**settings)
        case.exposure.begin()
        case.buffers[1].is_moved = True
        with pytest.raises(
            UsageError, match=r"share_memory_\(\) of weights of unit block: .* host"
        ):
            case.find()
    case = stale()
    case.buffers[1].is_moved = True
    assert not case.find()


def test_the_parameters_memory_stays_its_own():
    """Claim: neither class makes another storage."""
    case = Case()
    before = [storage_guard.identity(own_bytes(param)) for param in case.params]
    case.exposure.begin()
    case.exposure.end()
    assert [storage_guard.identity(own_bytes(param)) for param in case.params] == before
