"""Parameters at rest: what they answer without their bytes, what they ask the engine for, and what
they refuse.

Words used here: **engine**: a small one, that gathers when it is ``computing`` and refuses
elsewhere. **alias**: what ``detach`` gives of a parameter at rest.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from memory_arrays import MemoryArray

import infinity
from infinity import native
from infinity.core.machine import storage_guard
from infinity.core.params.parameter import (
    ResidentParameter,
    StoredAlias,
    StoredParameter,
)
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.handle import ParamHandle, own_bytes, raw_grad, set_raw_grad
from infinity.errors import UsageError
from infinity.ext.checkpoint.initialiser import give_storage, take_storage

F32 = torch.float32
SPEC = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, (), stepped=True)
VALUES = [torch.arange(6.0).view(2, 3), torch.ones(3), torch.ones(3)]
NAMES = ["a", "b", "c"]


class Gone:
    """An engine that nobody keeps."""


class Value(SimpleNamespace):
    """Stands for what a block of full_params has of a parameter."""

    __slots__ = ("__weakref__",)


class Job:
    """The engine, unit and gradients of three parameters at rest."""

    def __init__(self) -> None:
        self.computing, self.said, self.version, self.inside = False, [], 0, []
        self.lets = False  # whether a parameter may be touched outside of a forward
        self.gradients = self.uses = self
        params = [torch.nn.Parameter(value.clone()) for value in VALUES]
        self.flat_param = FlatParam(SPEC, params)
        self.flat_param.arrays["weight"] = MemoryArray("weight", torch.zeros(4096))
        for index, param in enumerate(params):
            param._infinity = ParamHandle([NAMES[index]], self, self.flat_param, index, self)
            take_storage(param)
            param.__class__ = StoredParameter
        self.params = params

    # --- the engine ---

    @contextmanager
    def block(self, name: str):
        self.inside.append(name)
        try:
            yield
        finally:
            self.inside.pop()

    def begin(self):
        return self.block("use")

    def saving_tensors(self):
        self.said.append(f"saving inside {self.inside}")
        return self.block("saving")

    def refusal(self, handle, operation: str) -> UsageError:
        return UsageError(f"{operation} of {handle.name} is refused")

    def put_to_rest(self, handle) -> None:
        self.said.append(f"put {handle.name} to rest")

    def touch(self, handle, operation: str) -> None:
        self.said.append(f"{operation} of {handle.name} inside {self.inside}")
        if not self.computing:
            raise self.refusal(handle, operation)
        with torch._C.DisableTorchFunctionSubclass():
            give_storage(handle.param)
            own_bytes(handle.param).copy_(VALUES[handle.index])
        handle.param.__class__ = ResidentParameter

    @contextmanager
    def touching(self, handles, operation: str, *, writes: bool):
        if self.computing:
            for handle in handles:
                self.touch(handle, operation)
                handle.param.__class__ = StoredParameter
            yield
            return
        if not self.lets:
            raise self.refusal(handles[0], operation)
        names = ", ".join(handle.name for handle in handles)
        self.said.append(f"{operation} of {names}{', which may be written' if writes else ''}")
        self.computing = True
        for handle in handles:
            if handle.param.__class__ is StoredParameter:
                self.touch(handle, operation)
                self.said.pop()
        self.computing = False
        yield
        for handle in handles:
            handle.param.__class__ = StoredParameter

    def write_value(self, handle, value) -> None:
        self.said.append((f"write {handle.name} inside {self.inside}", value))

    def read_value(self, handle) -> torch.Tensor:
        return VALUES[handle.index]

    # --- the unit, and the gradients ---

    def watch(self, param, data) -> None:
        self.said.append(("watch", param, data))

    def get(self, handle):
        return f"gradient of {handle.name}"

    def set(self, handle, value) -> None:
        self.said.append(("set", handle.name, value))


@pytest.fixture
def job() -> Job:
    return Job()


# --- without bytes ---


def test_a_parameter_at_rest_says_what_it_is_without_its_bytes(job):
    """Claim: its alias does too. Twin: nothing is asked of the engine."""
    param = job.params[0]
    for tensor in (param, param.detach()):
        assert tensor.shape == (2, 3) and tensor.stride() == (3, 1) and tensor.dtype is F32
        assert tensor.numel() == 6 and tensor.device.type == "cpu" and len(tensor) == 2
        assert tensor.type() == "torch.FloatTensor"
        assert tensor.requires_grad is (tensor is param) and not tensor.is_pinned()
    assert isinstance(param, torch.nn.Parameter) and param.is_leaf
    assert job.said == []


def test_tensors_like_one_at_rest_are_made_without_its_bytes(job):
    """Twin: an argument that is at rest itself is gathered, or refused."""
    made = torch.zeros_like(job.params[0], dtype=torch.int64)
    assert made.tolist() == [[0] * 3] * 2 and made.dtype is torch.int64
    assert job.params[0].detach().new_full((2,), 3).tolist() == [3, 3]
    assert type(torch.ones_like(job.params[1])) is torch.Tensor and job.said == []
    with pytest.raises(UsageError, match="new_tensor of a is refused"):
        job.params[0].new_tensor(job.params[1])


def test_its_text_has_its_name_and_its_home(job):
    """Twin: that of a parameter whose engine is gone says so."""
    text = "StoredParameter(a, shape=(2, 3), dtype=torch.float32, home=host)"
    param = job.params[0]
    # Its values are refused here
    assert repr(param) == str(param) == f"{param}" == text and f"{param:>70}" == f"{text:>70}"
    assert "StoredAlias(a, " in repr(param.detach())
    param._infinity = ParamHandle(["a"], job, job.flat_param, 0, Gone())
    assert repr(param).endswith("home=gone)") and job.said == []


@pytest.mark.parametrize("kind", ["at rest", "an alias", "resident"])
def test_it_is_not_pickled(kind, job):
    tensor = job.params[0].detach() if kind == "an alias" else job.params[0]
    if kind == "resident":
        tensor.__class__ = ResidentParameter
    with pytest.raises(UsageError, match="parameter a is managed by Infinity and cannot be pick"):
        pickle.dumps(tensor)


def test_a_deep_copy_is_a_plain_parameter_of_the_values():
    """Once for several references, at rest and in a forward. Twin: of a detached one, a tensor."""
    layer, copies = torch.nn.Linear(3, 2), []
    expected = layer.weight.detach().clone()
    layer.register_forward_pre_hook(lambda module, _: copies.append(copy.deepcopy(module.weight)))
    model, _ = infinity.wrap_model(torch.nn.Sequential(layer), None, {"params": "host"})
    model(torch.ones(1, 3))
    first, again = copy.deepcopy([layer.weight, layer.weight])
    for each in (*copies, first):
        assert type(each) is torch.nn.Parameter and torch.equal(each, expected)
    detached = copy.deepcopy(layer.weight.detach())
    assert first is again and type(detached) is torch.Tensor and torch.equal(detached, expected)


def test_a_conversion_to_itself_returns_it(job):
    """Twin: another one needs its bytes."""
    param = job.params[0]
    assert param.to("cpu") is param.float() is param.contiguous() is param.to(F32) is param
    with pytest.raises(UsageError, match="to of a is refused"):
        param.to(torch.float64)


# --- aliases ---


def test_an_alias_has_the_same_form_no_graph_and_no_readable_bytes(job):
    """Twin: of an alias there is an alias, too."""
    param = job.params[0]
    for alias in (param.detach(), param.data, param.detach().detach()):
        assert type(alias) is StoredAlias and alias._infinity is param._infinity
        assert alias.shape == (2, 3) and alias.stride() == (3, 1) and not alias.requires_grad
        if storage_guard.is_available():
            with pytest.raises(RuntimeError):
                alias.untyped_storage().data_ptr()
    columns = torch.nn.Parameter(torch.ones(3, 2).t())
    assert StoredAlias.of(columns).stride() == (1, 2)
    job.computing = True
    assert param.detach().tolist() == VALUES[0].tolist()


def test_an_aliass_bytes_are_the_parameters_and_are_watched(job):
    """Method: another tensor is set to its memory. Twin: of one that is read no view leaves."""
    job.computing = True
    alias = job.params[0].detach()
    assert torch.equal(alias + 1, VALUES[0] + 1)
    assert type(alias.t()) is StoredAlias and "watch" not in [said[0] for said in job.said]
    assert torch.equal(torch.empty(0).set_(alias), VALUES[0])
    ((_, param, data),) = [said for said in job.said if said[0] == "watch"]
    assert param is job.params[0] and data.data_ptr() == own_bytes(param).data_ptr()


def test_an_alias_that_is_read_past_torchs_functions_is_gathered(job):
    """Method: a C++ operator, which comes to dispatch. Twin: elsewhere it is refused."""
    alias = job.params[0].detach()
    with pytest.raises(UsageError, match=r"add of a is refused"):
        with torch._C.DisableTorchFunctionSubclass():
            torch.add(alias, 1)
    job.computing = True
    job.said.clear()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(torch.add(alias, 1), VALUES[0] + 1)
    assert job.said[0] == "add of a inside ['use']"


def test_another_parameter_over_its_memory_is_refused(job):
    """Twin: detaching alone is not."""
    with pytest.raises(UsageError, match=r"torch.nn.Parameter of a is refused"):
        torch.nn.Parameter(job.params[0])
    job.params[0].detach()


# --- equality and values ---


def test_it_is_compared_by_its_value_at_home(job):
    """Twins: itself and its alias are equal unless it has a NaN; another shape needs no look."""
    a, b, c = job.params
    assert torch.equal(a, a) and a.equal(a.detach())
    assert torch.equal(b, c) and torch.equal(b, torch.ones(3)) and not b.equal(torch.zeros(3))
    assert not torch.equal(a, b) and job.said == []
    job.read_value = lambda handle: torch.full((2, 3), float("nan"))
    assert not torch.equal(a, a) and not torch.equal(a, a.detach())
    job.read_value = None
    assert not torch.equal(a, b)


def test_in_a_forward_it_is_compared_as_any_tensor(job):
    job.computing = True
    job.read_value = None
    assert torch.equal(job.params[1], job.params[2])
    assert [said.split(" inside")[0] for said in job.said if " of " in said] == [
        "equal of b",
        "equal of c",
    ]


def test_a_whole_copy_writes_home_and_returns_the_parameter(job):
    """Claim: inside a use. Twin: in a forward it writes the bytes on the device."""
    value = torch.full((2, 3), 5.0)
    with torch.no_grad():
        for tensor in (job.params[0], job.params[0].detach()):
            assert tensor.copy_(value) is tensor
            assert job.said.pop() == ("write a inside ['use']", value) and job.said == []
        job.computing = True
        job.params[0].copy_(value)
    assert own_bytes(job.params[0]).tolist() == value.tolist()
    assert job.said[0] == "copy_ of a inside ['use']"


def test_data_that_is_assigned_goes_home(job):
    """In a forward it is brought, and changed there. Twins: its own is no assignment; another shape
    or dtype, and another parameter's memory are refused."""
    a, b, c = job.params
    value = torch.zeros(2, 3)
    a.data = a
    a.data = a.detach()
    assert job.said == [] and a._infinity.replaced == 0
    a.data = value
    assert job.said == [("write a inside ['use']", value)] and a._infinity.replaced == 1
    job.said.clear()
    for param, other in ((a, torch.zeros(3)), (a, value.double()), (b, c), (b, c.detach())):
        with pytest.raises(UsageError, match=r"assigning [ab]\.data would not reach its home"):
            param.data = other
    assert job.said == []
    job.computing = True
    a.data = torch.full((2, 3), 4.0)
    assert own_bytes(a).tolist() == torch.full((2, 3), 4.0).tolist() and a._infinity.replaced == 2


# --- with bytes ---


def test_a_use_in_a_forward_gathers_all_that_it_takes(job):
    """Claim: inside a use, and so that autograd saves references. Twin: elsewhere it is refused."""
    a, b, _ = job.params
    x = torch.ones(1, 3)
    with pytest.raises(UsageError, match="linear of a is refused"):
        torch.nn.functional.linear(x, a)
    job.said.clear()
    job.computing = True
    out = torch.addmv(torch.zeros(2), a, b)
    assert torch.equal(out, VALUES[0].sum(1)) and out.requires_grad
    assert job.said == [
        "addmv of a inside ['use']",
        "addmv of b inside ['use']",
        "saving inside ['use']",
    ]
    assert job.inside == []
    assert type(a) is StoredParameter and type(b) is StoredParameter


def test_a_parameter_in_a_list_or_by_name_is_gathered_too(job):
    job.computing = True
    out = torch.cat([job.params[1], torch.zeros(1), job.params[2].detach()])
    assert out.tolist() == [1, 1, 1, 0, 1, 1, 1]
    job.said.clear()
    assert torch.add(torch.zeros(3), other=job.params[1].detach()).tolist() == [1, 1, 1]
    assert torch.zeros_like(input=job.params[0]).shape == (2, 3)
    assert [said for said in job.said if " of " in said] == [
        "add of b inside ['use']",
        "zeros_like of a inside ['use']",
    ]


def test_gradients_are_asked_for_by_its_place_in_the_graph(job):
    """Method: torch.autograd.grad outside of a forward. Twin: another tensor among the inputs."""
    job.computing = True
    x = torch.ones(3, requires_grad=True)
    out = (job.params[1] * x * 2).sum()
    job.computing = False
    job.said.clear()
    by_param, by_x = torch.autograd.grad(out, [job.params[1], x], retain_graph=True)
    assert by_param.tolist() == by_x.tolist() == [2, 2, 2]
    edges = [torch.autograd.graph.get_gradient_edge(x), job.params[1]]
    assert len(torch.autograd.grad(out, edges, retain_graph=True)) == 2
    assert torch.autograd.grad(out, job.params[1])[0].tolist() == [2, 2, 2]
    assert not [said for said in job.said if " of " in said]


# --- gradients ---


@pytest.mark.parametrize("kind", [ResidentParameter, StoredParameter])
def test_the_gradient_of_a_stepped_parameter_is_the_engines(kind, job):
    """Twin: any other one's is autograd's own."""
    param, grad = job.params[1], torch.ones(3)
    param.__class__ = kind
    param.grad = grad
    assert param.grad is raw_grad(param) is grad and job.said == []
    del param.grad
    assert param.grad is None
    param._infinity.grad = "a record"
    assert param.grad == "gradient of b"
    param.grad = grad
    del param.grad
    assert job.said == [("set", "b", grad), ("set", "b", None)] and raw_grad(param) is None


def test_in_a_backward_a_hook_sees_what_was_accumulated(job):
    """Twin: what has not come there yet is the engine's."""
    param, seen = job.params[1], []
    param.__class__ = ResidentParameter
    param._infinity.grad = "a record"
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda _: seen.append(param.grad))
    (x * 2).sum().backward()
    set_raw_grad(param, torch.ones(3))
    (x * 2).sum().backward()
    assert seen[0] == "gradient of b" and seen[1] is raw_grad(param)
    assert param.grad == "gradient of b"


# --- data of a resident one ---


def test_data_of_a_resident_parameter_is_watched_and_written_through(job):
    """Twin: an unmanaged one's is torch's own."""
    job.computing = True
    job.touch(job.params[1]._infinity, "a gather")
    job.said.clear()
    param = job.params[1]
    data = param.data
    assert data.data_ptr() == own_bytes(param).data_ptr() and not data.requires_grad
    assert job.said[0][:2] == ("watch", param) and job.said[0][2] is data
    param.data = torch.full((3,), 4.0)
    assert data.tolist() == [4, 4, 4] and len(job.said) == 2
    plain, value = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)
    plain.__class__ = ResidentParameter
    plain.data = value
    assert plain.data.data_ptr() == value.data_ptr() and len(job.said) == 2


# --- borrowed values ---


@pytest.fixture
def borrowed(job) -> torch.Tensor:
    """What replaces the first parameter."""
    handle = job.params[0]._infinity
    tensor = torch.full((2, 3), 2.0)
    job.kept = Value(user_tensor=lambda: tensor, is_superseded=False)
    handle.borrowed = weakref.ref(job.kept)
    return tensor


def test_a_lent_value_is_used_in_the_parameters_stead(job, borrowed):
    """Twin: another parameter beside it is still at rest."""
    a, b, _ = job.params
    assert torch.equal(a + 1, borrowed + 1) and torch.stack([a, borrowed]).sum() == 24
    assert job.said == []
    with pytest.raises(UsageError, match="mv of b is refused"):
        torch.mv(a, b)


def test_a_lent_value_is_changed_in_place_and_the_parameter_returned(job, borrowed):
    """Twin: other results are what they are."""
    a, address = job.params[0], borrowed.data_ptr()
    with torch.no_grad():
        assert a.mul_(3) is a and a.copy_(a + 1) is a
    assert borrowed.tolist() == [[7] * 3] * 2
    a.data = torch.zeros(2, 3)
    assert borrowed.tolist() == [[0] * 3] * 2 and borrowed.data_ptr() == address
    assert type(a.sum()) is torch.Tensor and job.said == []
