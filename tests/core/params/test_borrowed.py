"""Borrowed: what replaces a parameter inside a block, for how long, and where its gradient goes."""

from __future__ import annotations

import gc

import pytest
import torch

from infinity import native
from infinity.core.params.borrowed import Borrowed, lent_to
from infinity.core.params.lent import Source
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.handle import ParamHandle
from infinity.errors import UsageError

F32 = torch.float32
SPEC = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, (), stepped=True)


class Values(Source):
    def stamp(self, handle: ParamHandle) -> int:
        return handle.version


VALUES = Values()


class Job:
    """The engine and unit of one parameter, of columns."""

    def __init__(self, *, requires_grad: bool = True):
        self.computing, self.version, self.computes_at_home = False, 0, False
        self.param = torch.nn.Parameter(torch.zeros(3, 2).t(), requires_grad=requires_grad)
        self.flat_param = FlatParam(SPEC, [self.param])
        self.handle = ParamHandle(["a"], self, self.flat_param, 0, self)
        self.param._infinity = self.handle


def value() -> torch.Tensor:
    """A view by columns, that does not begin where its memory does."""
    return torch.arange(8.0)[2:].view(3, 2).t()


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_lent_value_is_the_memory_that_was_given_and_no_view(job):
    given = value()
    with torch.no_grad():
        borrowed = Borrowed(VALUES, job.param, given)
    assert torch.equal(borrowed.user_tensor(), given) and borrowed.user_tensor().stride() == (1, 2)
    assert (
        not borrowed.user_tensor()._is_view()
        and borrowed.user_tensor().data_ptr() == given.data_ptr()
    )
    borrowed.user_tensor().zero_()
    assert given.sum() == 0


def test_the_gradient_of_a_lent_value_is_the_parameters(job):
    """Claim: after changes in place, too, by which it is multiplied."""
    given = value()
    borrowed = Borrowed(VALUES, job.param, given)
    assert (
        borrowed.user_tensor().data_ptr() == given.data_ptr() and not borrowed.user_tensor().is_leaf
    )
    borrowed.user_tensor().mul_(2)
    (borrowed.user_tensor() * torch.arange(6.0).view(2, 3)).sum().backward()
    assert job.param.grad.tolist() == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.parametrize("requires_grad, is_enabled", [(False, True), (True, False)])
def test_a_lent_value_has_no_graph_where_its_parameter_gets_no_gradient(requires_grad, is_enabled):
    job = Job(requires_grad=requires_grad)
    with torch.set_grad_enabled(is_enabled):
        assert not Borrowed(VALUES, job.param, value()).user_tensor().requires_grad


def test_a_backward_after_the_parameter_has_changed_is_refused(job):
    """Twin: before, it is not."""
    borrowed = Borrowed(VALUES, job.param, value())
    out = borrowed.user_tensor().sum()
    out.backward(retain_graph=True)
    job.handle.changed()
    with pytest.raises(UsageError, match="this backward needs a as full_params gave it"):
        out.backward()


def test_a_value_is_lent_from_its_making_to_its_end(job):
    """Twins: another tensor has none. An end may come twice."""
    assert lent_to(job.param) is None
    borrowed = Borrowed(VALUES, job.param, value())
    assert lent_to(job.param) is borrowed.user_tensor()
    assert lent_to(torch.ones(1)) is None
    for _ in range(2):
        borrowed.end()
        assert lent_to(job.param) is None


def test_a_value_is_lent_as_long_as_somebody_has_it(job):
    """Method: an end that was never said. Twin: the parameter keeps it no longer than that."""
    borrowed = Borrowed(VALUES, job.param, value())
    assert lent_to(job.param) is borrowed.user_tensor()
    del borrowed
    gc.collect()
    assert lent_to(job.param) is None


def test_a_value_is_not_used_while_the_model_computes(job):
    """Twin: afterwards it is, again."""
    borrowed = Borrowed(VALUES, job.param, value())
    for computing in (True, False):
        job.computing = computing
        assert (lent_to(job.param) is borrowed.user_tensor()) == (not computing)


def test_a_value_is_not_used_after_the_parameter_has_changed(job):
    """Twin: one that is borrowed after that is."""
    borrowed = Borrowed(VALUES, job.param, value())
    job.handle.changed()
    assert lent_to(job.param) is None
    borrowed.end()
    borrowed = Borrowed(VALUES, job.param, value())
    assert lent_to(job.param) is borrowed.user_tensor()
    borrowed.user_tensor().sum().backward()
    assert job.param.grad.sum() == 6


def test_a_block_inside_another_gives_the_outer_one_its_value_back(job):
    """Twin: an outer block that ends first ends nothing of the inner one."""
    outer = Borrowed(VALUES, job.param, value())
    inner = Borrowed(VALUES, job.param, value())
    assert lent_to(job.param) is inner.user_tensor()
    inner.end()
    assert lent_to(job.param) is outer.user_tensor()
    inner = Borrowed(VALUES, job.param, value())
    outer.end()
    assert lent_to(job.param) is inner.user_tensor()
