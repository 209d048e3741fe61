"""ParamHandle: leads from a parameter to its unit, flat param and engine, keeps none of them alive,
and counts the changes of its value."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from infinity import native
from infinity.core.params.parameter import ResidentParameter, StoredParameter
from infinity.core.params.tensors import checksum_of
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.handle import (
    COUNTS,
    ParamHandle,
    handle_of,
    managed,
    own_bytes,
    raw_grad,
    set_raw_grad,
)
from infinity.errors import InternalError, UsageError

F32 = torch.float32
SPEC = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, (), stepped=True)


class Unit:
    """Has what a handle changes."""

    version, computes_at_home = 5, False


class Engine:
    """Stands for the engine, which is only returned."""


class Case:
    """A flat param of two parameters, with the second one's handle."""

    def __init__(self, *, shared: bool = False, counts: bool = True):
        params = [torch.nn.Parameter(torch.arange(4.0)) for _ in range(2)]
        if shared:
            setattr(params[1], COUNTS, counts)
        self.param, self.unit, self.engine = params[1], Unit(), Engine()
        self.flat_param = FlatParam(SPEC, params)
        self.handle = ParamHandle(["b", "tied.b"], self.unit, self.flat_param, 1, self.engine)
        self.param._infinity = self.handle


# --- what it leads to ---


def test_a_handle_leads_to_its_parameter_and_all_that_has_it():
    case = Case()
    handle = case.handle
    assert handle.unit is case.unit and handle.flat_param is case.flat_param
    assert handle.engine is case.engine and handle.param is case.param
    assert handle.is_alive and handle.name == "b" and handle.names == ["b", "tied.b"]


@pytest.mark.parametrize("gone", ["unit", "flat_param", "engine"])
def test_a_handle_keeps_nothing_alive_and_says_what_is_missing(gone):
    """Twin: the others are found still. A handle is alive as long as its engine."""
    case = Case()
    seen = weakref.ref(getattr(case, gone))
    delattr(case, gone)
    gc.collect()
    assert seen() is None
    for name in ("unit", "flat_param", "engine"):
        if name == gone:
            with pytest.raises(UsageError, match="parameter b: its engine is gone"):
                getattr(case.handle, name)
        else:
            assert getattr(case.handle, name) is getattr(case, name)
    assert case.handle.is_alive == (gone != "engine")


def test_a_managed_parameter_has_a_handle_and_another_tensor_has_none():
    case = Case()
    assert handle_of(case.param) is managed(case.param) is case.handle
    other = case.flat_param.params[0]
    assert handle_of(other) is None and handle_of(None) is None and handle_of("b") is None
    with pytest.raises(InternalError, match=r"a tensor of shape \(4,\) is not managed"):
        managed(other)


# --- what it counts ---


def test_a_new_handle_has_no_state_no_gradient_and_no_changes():
    handle = Case().handle
    assert handle.grad is handle.borrowed is None and not handle.has_state
    assert (handle.step, handle.version, handle.forward_edits, handle.edits) == (0, 0, 0, 0)
    assert not (handle.keeps_moments or handle.has_loaded_master or handle.is_tied)
    assert handle.is_counted


@pytest.mark.parametrize(
    "step, keeps, has", [(0, False, False), (1, False, True), (0, True, True), (2, True, True)]
)
def test_a_parameter_has_state_after_a_step_or_if_its_moments_are_kept(step, keeps, has):
    handle = Case().handle
    handle.step, handle.keeps_moments = step, keeps
    assert handle.has_state is has


@pytest.mark.parametrize("by_load", [True, False])
def test_a_change_counts_up_the_versions_of_value_and_unit(by_load):
    """Claim: the master that was loaded belongs to another value then. Twin: a load ends what users
    set, and any other change does not."""
    case = Case()
    case.handle.edits, case.handle.has_loaded_master = 17, True
    case.handle.changed(by_load=by_load)
    case.handle.changed(by_load=by_load)
    assert (case.handle.version, case.unit.version) == (2, 7)
    assert not case.handle.has_loaded_master
    assert case.handle.edits == (0 if by_load else 17)
    assert case.handle.forward_edits == 0 and case.handle.step == 0


@pytest.mark.parametrize("shared, counts", [(True, True), (True, False), (False, True)])
def test_a_parameter_is_tied_and_counted_as_it_is_marked(shared, counts):
    handle = Case(shared=shared, counts=counts).handle
    assert (handle.is_tied, handle.is_counted) == (shared, counts)


def test_the_values_that_users_set_in_a_tied_parameter_make_a_digest_in_their_order():
    """Twin: of another parameter nothing is noted."""
    first, second = torch.arange(4.0), torch.ones(4)
    case, other = Case(shared=True), Case()
    for each in (case, other):
        each.handle.note_edit(first)
        each.handle.note_edit(second)
    assert case.handle.edits == checksum_of(second, checksum_of(first))
    assert case.handle.edits != checksum_of(first, checksum_of(second))
    assert other.handle.edits == 0


# --- bytes and gradients ---


@pytest.mark.parametrize("kind", [torch.nn.Parameter, ResidentParameter, StoredParameter])
def test_own_bytes_are_the_parameters_memory_whatever_its_class(kind):
    """Claim: a plain tensor without a graph."""
    param = torch.nn.Parameter(torch.arange(4.0))
    address = param.data_ptr()
    param.__class__ = kind
    own = own_bytes(param)
    assert type(own) is torch.Tensor and not own.requires_grad and own.data_ptr() == address
    own[0] = 9
    assert own_bytes(param).tolist() == [9, 1, 2, 3]


@pytest.mark.parametrize("kind", [torch.nn.Parameter, ResidentParameter, StoredParameter])
def test_the_raw_gradient_is_what_autograd_accumulates_into(kind):
    """Twin: a managed one's gradient is asked of nobody for it."""
    param, grad = torch.nn.Parameter(torch.arange(4.0)), torch.ones(4)
    case = Case()
    param._infinity, case.handle.grad = case.handle, "a record"
    param.__class__ = kind
    assert raw_grad(param) is None
    set_raw_grad(param, grad)
    assert raw_grad(param) is grad
    set_raw_grad(param, None)
    assert raw_grad(param) is None
