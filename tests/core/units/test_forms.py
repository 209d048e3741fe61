"""Forms: every registered form keeps the promises of the seam, and a broken one is found.

Words used here: **case**: a parameter of one form, and a way to another tensor of it. **break**: a
form of which one method does something else; each promise fails for one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deleted import needs
from lone import lone_group
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from infinity.core import seams
from infinity.core.machine import storage_guard
from infinity.core.units import forms
from infinity.core.units.forms import Division, Form
from infinity.errors import ConfigError, UsageError

WHOLE = torch.arange(10.0).view(5, 2)
NUMBERS = itertools.count()


class Boxed(torch.Tensor):
    """A tensor of a library: a wrapper around the values times two."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default, func
        return cls(args[0].inner)


class RestingBox(Boxed):
    """The same at rest."""


class BoxedForm(Form):
    """The form of a library that the engine has never heard of."""

    classes = Boxed, RestingBox

    def moves(self, tensor):
        """Tells by the class."""
        return type(tensor) is Boxed

    def local(self, tensor):
        """Returns what is in the box."""
        return tensor.inner

    def build(self, spec, local):
        """Makes another box."""
        return Boxed(local)

    def show(self, param, view):
        """Fills the box."""
        param.inner = view.data

    def part(self, param, value, what):
        """Halves a whole value."""
        return value.inner if isinstance(value, Boxed) else value / 2

    def whole(self, tensor):
        """Doubles what is in the box."""
        return tensor.inner * 2


def plain_case() -> SimpleNamespace:
    return SimpleNamespace(param=nn.Parameter(WHOLE.clone()), form=forms.PLAIN, wrong=None)


def boxed_case() -> SimpleNamespace:
    param = nn.Parameter(Boxed(WHOLE / 2), requires_grad=False)
    return SimpleNamespace(param=param, form=forms.form_of(param), wrong=None)


def mesh_case(placements: list) -> SimpleNamespace:
    mesh = dist.init_device_mesh("cpu", (1,))
    param = nn.Parameter(distribute_tensor(WHOLE.clone(), mesh, placements))
    wrong = nn.Parameter(distribute_tensor(WHOLE.clone(), mesh, placements))
    wrong._spec = SimpleNamespace(mesh=mesh, placements=(Partial(),), device_mesh=mesh)
    return SimpleNamespace(param=param, form=forms.form_of(param), wrong=wrong)


CASES: dict[str, Callable[[], SimpleNamespace]] = {
    "plain": plain_case,
    "of an unknown library": boxed_case,
    "a shard": lambda: mesh_case([Shard(0)]),
    "a replica": lambda: mesh_case([Replicate()]),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> Iterator[None]:
    """Registers a form of another library beside those of extensions."""
    registered = *forms.forms(), BoxedForm()
    monkeypatch.setattr(forms, "forms", lambda: registered)
    monkeypatch.setattr(forms, "_FORMS", forms._Forms())
    with lone_group():
        yield


# --- promises ---


def local_part_is_plain(form: Form, param) -> bool:
    return type(form.local(param)) is torch.Tensor or form is forms.PLAIN


def building_gives_the_form_back(form: Form, param) -> bool:
    built = form.build(form.spec(param), form.local(param).detach())
    return forms.form_of(built) is forms.form_of(param) and built.shape == param.shape


def building_copies_nothing(form: Form, param) -> bool:
    local = form.local(param).detach()
    return form.local(form.build(form.spec(param), local)) is local


def building_takes_the_dtype(form: Form, param) -> bool:
    local = form.local(param).detach().double()
    return form.build(form.spec(param), local).dtype is torch.float64


def built_tensor_requires_no_grad(form: Form, param) -> bool:
    return not form.build(form.spec(param), form.local(param).detach()).requires_grad


def shown_memory_is_the_local_part(form: Form, param) -> bool:
    memory = torch.full_like(form.local(param).detach(), 7.0)
    form.show(param, memory)
    there = form.local(param).detach()
    return storage_guard.identity(there) == storage_guard.identity(memory)


def shown_memory_has_its_own_counter(form: Form, param) -> bool:
    memory = torch.zeros_like(form.local(param).detach())
    memory += 1
    form.show(param, memory)
    return form.local(param)._version < memory._version or form is forms.PLAIN


def part_of_a_whole_value_is_a_local_part(form: Form, param) -> bool:
    part = form.part(param, WHOLE + 6, "w")
    built = form.build(form.spec(param), part)
    return torch.equal(form.whole(built), WHOLE + 6)


def part_of_its_own_form_is_the_local_part(form: Form, param) -> bool:
    value = form.build(form.spec(param), form.local(param).detach())
    return form.part(param, value, "w") is form.local(value)


def whole_has_the_values(form: Form, param) -> bool:
    return torch.equal(form.whole(param).detach(), WHOLE)


def reserved_elements_hold_the_local_part(form: Form, param) -> bool:
    return form.division(param).span >= form.local(param).numel()


def local_part_lies_within_the_tensor(form: Form, param) -> bool:
    ends = zip(form.division(param).offset, form.local(param).shape, param.shape, strict=True)
    return all(begin + length <= size for begin, length, size in ends)


def common_part_is_whole(form: Form, param) -> bool:
    division = form.division(param)
    return not division.is_common or form.local(param).shape == param.shape


def description_is_the_same_for_an_equal_tensor(form: Form, param) -> bool:
    again = form.build(form.spec(param), form.local(param).detach().clone())
    return form.division(again).told == form.division(param).told


def parameter_that_moves_passes_the_check(form: Form, param) -> bool:
    form.check("w", param)
    return form.moves(param)


def value_does_not_move(form: Form, param) -> bool:
    return not form.moves(form.local(param).detach())


def both_classes_have_the_form(form: Form, param) -> bool:
    if form.classes is None:
        return True
    resident, at_rest = form.classes
    param.__class__ = at_rest
    found = forms.form_of(param) is forms._FORMS[resident] and issubclass(at_rest, resident)
    param.__class__ = resident
    return found


PROMISES = [
    local_part_is_plain,
    building_gives_the_form_back,
    building_copies_nothing,
    building_takes_the_dtype,
    built_tensor_requires_no_grad,
    shown_memory_is_the_local_part,
    shown_memory_has_its_own_counter,
    part_of_a_whole_value_is_a_local_part,
    part_of_its_own_form_is_the_local_part,
    whole_has_the_values,
    reserved_elements_hold_the_local_part,
    local_part_lies_within_the_tensor,
    common_part_is_whole,
    description_is_the_same_for_an_equal_tensor,
    parameter_that_moves_passes_the_check,
    value_does_not_move,
    both_classes_have_the_form,
]


@needs("ext/dtensor")
@pytest.mark.parametrize("name", CASES)
def test_a_form_keeps_its_promises(name):
    """Asks each form for each promise, with a parameter of its own. Covers all that are registered,
    plain tensors, and a library that the engine has not heard of."""
    for promise in PROMISES:
        case = CASES[name]()
        assert promise(case.form, case.param), promise.__name__
    assert {type(form) for form in forms.forms()} == {
        type(CASES[name]().form) for name in CASES if name != "plain"
    }


class _Thrice(Division):
    span, is_common, offset = 1, False, (3, 0)

    @property
    def told(self):
        return str(next(NUMBERS))


class _Common(Division):
    is_common = True


BREAKS = {
    local_part_is_plain: {"local": lambda self, tensor: tensor},
    building_gives_the_form_back: {"build": lambda self, spec, local: local},
    building_copies_nothing: {"build": lambda self, spec, local: Boxed(local.clone())},
    building_takes_the_dtype: {"build": lambda self, spec, local: Boxed(local.float())},
    built_tensor_requires_no_grad: {
        "build": lambda self, spec, local: Boxed(local).requires_grad_()
    },
    shown_memory_is_the_local_part: {"show": lambda self, param, view: None},
    shown_memory_has_its_own_counter: {
        "show": lambda self, param, view: setattr(param, "inner", view)
    },
    part_of_a_whole_value_is_a_local_part: {"part": lambda self, param, value, what: value},
    part_of_its_own_form_is_the_local_part: {
        "part": lambda self, param, value, what: value.inner + 0
    },
    whole_has_the_values: {"whole": lambda self, tensor: tensor.inner},
    reserved_elements_hold_the_local_part: {"division": _Thrice},
    local_part_lies_within_the_tensor: {"division": _Thrice},
    common_part_is_whole: {"division": _Common, "local": lambda self, tensor: tensor.inner[:2]},
    description_is_the_same_for_an_equal_tensor: {"division": _Thrice},
    parameter_that_moves_passes_the_check: {"moves": lambda self, tensor: False},
    value_does_not_move: {"moves": lambda self, tensor: True},
    both_classes_have_the_form: {"classes": (Boxed, nn.Parameter)},
}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_a_promise_that_a_form_breaks_is_found(promise):
    """Breaks one method at a time: the twin of the test above."""
    case = boxed_case()
    broken = type("Broken", (BoxedForm,), BREAKS[promise])()
    assert promise(case.form, boxed_case().param)
    try:
        kept = promise(broken, case.param)
    except TypeError:  # the class of another layout
        kept = False
    assert not kept


@needs("ext/dtensor")
def test_what_cannot_be_trained_is_refused_and_names_the_parameter():
    """Twins: the same parameter with another placement; a plain one; a plain buffer."""
    case = mesh_case([Shard(0)])
    with pytest.raises(ConfigError, match="parameter w"):
        case.form.check("w", case.wrong)
    with pytest.raises(ConfigError, match="buffer b"):
        case.form.check("b", case.param.detach())
    case.form.check("w", case.param)
    forms.PLAIN.check("w", plain_case().param)
    forms.PLAIN.check("b", WHOLE)


@needs("ext/dtensor")
def test_a_value_that_does_not_fit_is_refused():
    """Twin: the value of the right shape."""
    param = mesh_case([Shard(0)]).param
    with pytest.raises(UsageError, match="w.grad: a tensor of shape"):
        forms.part_of(param, WHOLE.t(), "w.grad")
    assert torch.equal(forms.part_of(param, WHOLE, "w.grad"), WHOLE)


# --- the registry ---


def test_the_helpers_ask_the_form_of_the_class():
    """Compares each helper with the method of the form, for all cases. Twin: something that is no
    tensor is plain."""
    for make in CASES.values():
        param, form = (case := make()).param, case.form
        local = form.local(param)
        assert forms.local_of(param) is local and forms.is_plain(param) is (form is forms.PLAIN)
        assert torch.equal(forms.gathered(param), form.whole(param))
        assert forms.form_of(forms.like(param, local.detach())) is form
        assert torch.equal(forms.part_of(param, WHOLE, "w"), form.part(param, WHOLE, "w"))
        assert forms.is_common(param) is form.division(param).is_common
        assert type(forms.division_of(param)) is form.division
        assert forms.plain_class(param) is (form.classes or (nn.Parameter,))[0]
    assert forms.local_of(None) is None and forms.is_plain("w")


@needs("ext/dtensor")
def test_a_plain_parameter_takes_the_whole_of_a_value_in_another_form():
    """Twin: a plain value stays itself."""
    for name in ("of an unknown library", "a shard", "a replica"):
        value = CASES[name]().param
        assert torch.equal(forms.part_of(nn.Parameter(WHOLE), value, "w"), WHOLE)
    assert forms.part_of(nn.Parameter(WHOLE), WHOLE, "w") is WHOLE


def test_extensions_are_asked_once_and_only_for_a_class_that_is_not_torchs(monkeypatch):
    """Counts the looks at the list. Twin: a class of torch's own, and a second look at a class."""
    asked = []
    monkeypatch.setattr(forms, "forms", lambda: asked.append(1) or (BoxedForm(),))
    known = forms._Forms({torch.Tensor: forms.PLAIN, nn.Parameter: forms.PLAIN})
    monkeypatch.setattr(forms, "_FORMS", known)
    assert forms.is_plain(torch.ones(1)) and forms.is_plain(nn.Parameter(torch.ones(1)))
    assert asked == []
    for _ in range(2):
        assert not forms.is_plain(boxed_case().param)
    assert asked == [1]


@needs("ext/dtensor")
def test_a_form_whose_folder_is_gone_is_skipped(monkeypatch):
    """Twin: the same list with the folder."""
    monkeypatch.setattr(seams, "FORMS", ["ext.gone.form.Form", "ext.dtensor.dtensors.DTensorForm"])
    assert [kind.__name__ for kind in seams.classes_of(seams.FORMS)] == ["DTensorForm"]
    assert list(seams.classes_of(seams.FORMS[:1])) == []
