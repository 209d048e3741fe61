"""Forms: a tensor as torch and users see it, and the plain tensor of it that the engine moves.

form        how tensors of one class are made of plain ones. A library's classes get theirs from
            extensions (:data:`infinity.core.seams.FORMS`); all others are plain
local part  the plain tensor of a tensor's elements on this rank: itself for a plain one. Arrays,
            homes and kernels see local parts only
division    how the local parts of all ranks make up the tensor

[Note: why by class] The engine asks for a form at each use of a parameter. The class of a tensor is
looked up in a dict; the parameter stays the object that its owner made.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .. import seams

PLAIN_CLASS = "_infinity_plain"  # attribute of a class at rest: the class of the user's library


class Division:
    """The division of a plain tensor, which every rank has whole."""

    ranks: tuple[int, ...] = ()  # those that have the parts; none if there is only one part
    mesh: Any = None  # of the whole job, if the tensor knows it
    is_common = True  # whether each of these ranks has the whole tensor
    # Which of the copies of its local part this rank has. None: its number on the tp axis.
    copy: int | None = None
    told = ""  # a description, which is compared between ranks

    def __init__(self, tensor: torch.Tensor):
        self._tensor: Any = tensor

    @property
    def span(self) -> int:
        """The elements to reserve: those of the largest local part on any rank. So all ranks place
        the same parameters at the same offsets, whatever the remainders of the division."""
        return self._tensor.numel()

    @property
    def offset(self) -> tuple[int, ...]:
        """The first element of the local part, in every dimension of the tensor."""
        return (0,) * self._tensor.dim()


class Form:
    """The form of plain tensors, from which others derive. Only `part` and `whole` may wait for
    other ranks."""

    # Classes of a managed parameter while its bytes are on the device, and at rest. None: those of
    # plain parameters.
    classes: tuple[type, type] | None = None
    division: type[Division] = Division

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ConfigError for a parameter or buffer that cannot be trained with."""

    def moves(self, tensor: torch.Tensor) -> bool:
        """Tells whether ``tensor`` is a parameter that the engine can move."""
        return type(tensor) is torch.nn.Parameter

    def local(self, tensor: Any) -> torch.Tensor:
        """Returns the local part."""
        return tensor

    def spec(self, tensor: Any) -> Any:
        """Returns what a tensor of this form is beside its local part."""
        return None

    def build(self, spec: Any, local: torch.Tensor) -> torch.Tensor:
        """Makes a tensor of its local part, without a copy. Its dtype is that of ``local``."""
        return local

    def show(self, param: Any, view: torch.Tensor) -> None:
        """Makes the local part of ``param`` a view of the memory of ``view``."""
        param.data = view

    def part(self, param: Any, value: torch.Tensor, message: str) -> torch.Tensor:
        """Returns the local part of ``value`` (a tensor of any form, in the shape of ``param``),
        divided and summed up as ``param`` is. Raises UsageError, which begins with ``message``, for
        a value that does not fit."""
        return gathered(value)

    def whole(self, tensor: Any) -> torch.Tensor:
        """Returns the plain tensor of all elements."""
        return tensor


PLAIN = Form()


@cache
def forms() -> tuple[Form, ...]:
    """Makes the forms that extensions bring."""
    return tuple(kind() for kind in seams.classes_of(seams.FORMS))


class _Forms(dict):
    def __missing__(self, kind: type) -> Form:
        matching = (form for form in forms() if form.classes and issubclass(kind, form.classes[0]))
        self[kind] = form = next(matching, PLAIN)
        return form


_FORMS: dict[type, Form] = _Forms({torch.Tensor: PLAIN, torch.nn.Parameter: PLAIN})


def form_of(tensor: Any) -> Form:
    """Returns the form of ``tensor``; of anything else that of plain tensors."""
    return _FORMS[type(tensor)]


def is_plain(tensor: Any) -> bool:
    """Tells whether ``tensor`` is its own local part."""
    return _FORMS[type(tensor)] is PLAIN


def local_of(tensor: Any) -> torch.Tensor:
    """Returns the local part of ``tensor``."""
    form = _FORMS[type(tensor)]
    return tensor if form is PLAIN else form.local(tensor)


def like(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """Returns ``local`` in the form of ``tensor``."""
    form = _FORMS[type(tensor)]
    return local if form is PLAIN else form.build(form.spec(tensor), local)


def part_of(param: Any, value: torch.Tensor, message: str) -> torch.Tensor:
    """Returns the local part of ``value`` in the form of ``param``, as :meth:`Form.part` does."""
    form = _FORMS[type(param)]
    if form is PLAIN and _FORMS[type(value)] is PLAIN:
        return value
    return form.part(param, value, message)


def gathered(tensor: Any) -> torch.Tensor:
    """Returns the plain tensor of all elements. Every rank that has a part calls this."""
    return _FORMS[type(tensor)].whole(tensor)


def division_of(tensor: Any) -> Division:
    """Returns how ``tensor`` is divided over ranks."""
    return _FORMS[type(tensor)].division(tensor)


def is_common(tensor: Any) -> bool:
    """Tells whether every rank that has a local part of ``tensor`` has the whole."""
    form = _FORMS[type(tensor)]
    return form is PLAIN or form.division(tensor).is_common


def plain_class(param: torch.Tensor) -> type:
    """Returns the class of ``param`` when it is not managed."""
    classes = _FORMS[type(param)].classes
    return classes[0] if classes else getattr(type(param), PLAIN_CLASS, torch.nn.Parameter)
