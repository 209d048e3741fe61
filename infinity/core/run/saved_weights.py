"""SavedWeight: replaces a weight in autograd's graph, so that the graph holds no bytes of it.

Inside an owner, autograd saves each weight as a reference to its unit. Unpacking it makes the unit
resident. This works for any output of the module and any kind of checkpointing.

[Note: the saved parameter itself] Torch makes a new tensor of what an unpack hook returns, so a
Function of a user's would not find its class, nor the attributes that libraries set on parameters.
So ``saved_tensors`` of Functions returns the parameter itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ...errors import InternalError, UsageError
from ...torch_private import (
    FakeTensor,
    current_task,
    is_of_transform,
    neg_view,
    push_hooks,
    skip_code,
    top_hooks,
)
from ..units.forms import PLAIN, Form, form_of
from ..units.handle import DisableTorchFunction
from ..units.inner import has_inner, inner_tensors
from ..units.unit import ParamUnit
from ..units.weight_storages import WeightStorages, untyped_storage
from .context import too_late
from .saved_tensor import SavedLocal, SavedTensor


class SavedWeight(SimpleNamespace):
    """A saved tensor in a unit's device buffer: its location instead of its bytes."""

    unit: ParamUnit
    version: int  # of the unit's values when it was saved
    flat: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool
    there: frozenset[int] | None  # the rows that were on the device; None: all
    # The parameter, which a user's Function gets.
    param: weakref.ref[torch.nn.Parameter] | None

    def check(self) -> None:
        """Raises UsageError if the bytes that the forward computed with are not available in this
        backward: the unit has another version."""
        start = self.offset * self.dtype.itemsize // self.flat.itemsize - self.flat.storage_offset()
        changes = [
            handle.changed_at
            for buffer in self.unit.buffers.all
            if buffer.flat is self.flat
            for handle, placement in zip(
                buffer.flat_param.handles, buffer.flat_param.layout.placements
            )
            if placement.offset <= start
        ]
        # Others of the unit may have changed. Versions of older ones change without a parameter's.
        if self.unit.older or not changes or changes[-1] > self.version:
            raise UsageError(
                f"this backward needs weights of unit {self.unit.name} as they were in its forward,"
                " but they were changed since (by optimizer.step(), load_state_dict() or an edit)."
                " Run backward before that."
            )


@dataclass(frozen=True)
class SavedSubclass:
    """A saved tensor subclass around weights: its inner tensors in their saved forms."""

    kind: Any
    inner: dict[str, Any]
    form: tuple  # context, size and stride

    @classmethod
    def of(cls, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> SavedSubclass:
        """Saves the inner tensors of ``tensor`` by ``pack``."""
        names, context = tensor.__tensor_flatten__()
        inner = {
            name: cls.of(part, pack) if has_inner(part := getattr(tensor, name)) else pack(part)
            for name in names
        }
        return cls(type(tensor), inner, (context, tensor.size(), tensor.stride()))

    def tensor(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Makes the tensor that was saved, of inner tensors from ``unpack``."""
        inner = {
            name: saved.tensor(unpack) if isinstance(saved, SavedSubclass) else unpack(saved)
            for name, saved in self.inner.items()
        }
        return self.kind.__tensor_unflatten__(inner, *self.form)


def is_checkpoint(hooks: tuple | None) -> bool:
    """Tells whether a pair of saved-tensor hooks is a non-reentrant checkpoint's."""
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


# Classes of tensors that extensions compute when they are used. They get no hook of the engine.
LAZY: set[type] = set()
OPAQUE: set[type] = {FakeTensor}  # classes without bytes of their own: those, and fake tensors


_unpacked = threading.local()  # parameters that the running `saved_tensors` has found, in order


def _saved_tensors(ctx: Any) -> tuple:
    """Returns ``ctx.saved_tensors``, with the parameters themselves."""
    outer, unpacked = getattr(_unpacked, "params", None), []
    _unpacked.params = unpacked
    try:
        values = _SAVED_TENSORS.__get__(ctx)
    finally:
        _unpacked.params = outer
    if not unpacked:
        return values
    tensors, remaining = [], list(unpacked)
    for value in values:  # in their order: a view of a whole weight has its place
        at = next((n for n, (memory, _) in enumerate(remaining) if memory == _memory(value)), None)
        tensors.append(value if at is None or remaining[at][1] is None else remaining[at][1])
        remaining = remaining if at is None else remaining[at + 1 :]
    params = {id(param) for _, param in unpacked if param is not None}
    if not params <= set(map(id, tensors)):  # the Function would compute with other bytes
        raise InternalError("the backward of a Function did not get back the parameters it saved")
    return tuple(tensors)


# Of every class: as a weight is saved, nothing tells for which one. In torch 2.15 `apply` has no
# frame of Python.
_SAVED_TENSORS = BackwardCFunction.saved_tensors
BackwardCFunction.saved_tensors = property(_saved_tensors)


def _memory(tensor: torch.Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


class Pack:
    """Saves a tensor: a weight as a reference, others by the hooks around, if any.

    is_counted
        Whether a checkpoint counts the saved tensors. It must get the same count in its forward and
        in its recomputation, where the same weight may be saved with or without these hooks.
    count
        Tells the checkpoint of a tensor that it does not keep.
    gives_params
        Whether a Function gets the parameter itself. A user's checkpoint and others' hooks give
        back new tensors, without attributes.
    """

    def __init__(self, around: tuple | None, storages: WeightStorages):
        outer = around[0] if around else None
        self.storages, self._outer, self._count = storages, outer, getattr(outer, "count", outer)
        is_ours = str(getattr(outer, "__module__", None)).startswith("infinity.")
        self.is_counted = is_checkpoint(around) or getattr(outer, "is_counted", False)
        self.gives_params = around is None or getattr(outer, "gives_params", is_ours)
        if self._count is not outer:  # the tensors are kept, too
            self.count = self._count

    def __call__(self, tensor: torch.Tensor, *, is_whole: bool = True, is_part: bool = False):
        """Saves ``tensor``. Not ``is_whole``: it has no parts with forms of their own. ``is_part``:
        it is one, of a tensor that the Function gets."""
        kind = type(tensor)
        if kind is not torch.Tensor and is_whole:
            if (form := form_of(tensor)) is not PLAIN or has_inner(tensor):
                return self._of_parts(tensor, form)
        if (
            tensor.layout is torch.strided
            and kind not in OPAQUE
            and not is_of_transform(tensor)  # which has no storage
            and untyped_storage(tensor)._cdata in self.storages.entries
            and (entry := self.storages.find(tensor)) is not None
        ):
            if self.is_counted:
                self._count(tensor)
            unit, flat = entry
            rows = unit.arrival.rows
            with DisableTorchFunction():  # a packed parameter hides its place in the buffer
                saved: Any = SavedWeight(
                    unit=unit,
                    version=(unit.in_use or unit).version,
                    flat=flat,
                    size=tensor.size(),
                    stride=tensor.stride(),
                    offset=tensor.storage_offset(),
                    dtype=tensor.dtype,
                    conj=tensor.is_conj(),
                    neg=tensor.is_neg(),
                    there=None if rows is None else rows.there,
                    param=None,
                )
        elif self._outer:
            return self._outer(tensor)
        else:
            saved = SavedTensor(value=tensor.detach(), version=tensor._version, param=None)
        if kind is not torch.Tensor and self.gives_params and not is_part:
            saved.param = weakref.ref(tensor) if isinstance(tensor, torch.nn.Parameter) else None
        return saved

    def _of_parts(self, tensor: Any, form: Form) -> Any:
        if form is not PLAIN and self.is_counted:
            # A checkpoint compares what it counts: parts differ from what is saved without hooks.
            return self._outer(tensor)
        local = tensor if form is PLAIN else form.local(tensor)
        if has_inner(local) and any(self.storages.find(inner) for inner in inner_tensors(local)):
            # Its inner tensors are parameters, too, but the Function gets the subclass.
            packed: Any = SavedSubclass.of(local, partial(self, is_whole=False, is_part=True))
        else:
            packed = self(local, is_whole=False)
        return packed if form is PLAIN else SavedLocal(packed, form, form.spec(tensor))


class Unpack:
    """Makes a tensor that :class:`Pack` saved. ``backward``: the one that holds its unit."""

    def __init__(
        self, outer: Callable | None, storages: WeightStorages, backward: weakref.ref[Any]
    ):
        self._outer, self._storages, self._backward = outer, storages, backward

    def __call__(self, saved: Any, *, is_part: bool = False) -> torch.Tensor:
        """Makes the tensor, or a part of one. Brings the unit of a weight, which may block."""
        kind = type(saved)
        if kind is SavedLocal:
            return saved.form.build(saved.spec, self(saved.packed, is_part=True))
        if kind is SavedSubclass:
            return saved.tensor(partial(self, is_part=True))
        if kind not in (SavedTensor, SavedWeight):
            return self._outer(saved)
        params, param = getattr(_unpacked, "params", None), None
        if params is not None and saved.param is not None:
            param = saved.param()
        if kind is SavedTensor:
            value = saved.value if saved.value._version == saved.version else saved.tensor()
        else:
            unit = saved.unit
            if saved.version != (unit.in_use or unit).version:
                saved.check()
            if param is None and unit.arrival.rows is not None:
                unit.arrival.rows.want(saved.there)
            if (running := self._backward()) is not None:
                running.hold(unit, for_node=param is None)
            elif not unit.computes_at_home:
                raise too_late()
            if param is not None:
                # The Function gets the parameter, and each use of that brings it again.
                value = torch.empty((), dtype=saved.dtype, device=saved.flat.device).expand(
                    saved.size
                )
            else:
                if torch.is_grad_enabled() and current_task() != -1:
                    # The graph of this backward saves weights as references, too, before the node
                    # computes with them. Autograd restores the thread's hooks after each node.
                    push_hooks(*saving_hooks(top_hooks(True), self._storages, self._backward))
                value = torch.empty(0, dtype=saved.dtype, device=saved.flat.device)
                value.set_(saved.flat.untyped_storage(), saved.offset, saved.size, saved.stride)
                value = value.conj() if saved.conj else value
                value = neg_view(value) if saved.neg else value
        if params is not None and not is_part:
            params.append((_memory(value), param))
        return value


if skip_code is not None:  # autograd calls them in the middle of compiled code
    skip_code(Pack.__call__.__code__)
    skip_code(Unpack.__call__.__code__)


def saving_hooks(
    outer: tuple | None, storages: WeightStorages, backward: weakref.ref[Any]
) -> tuple[Callable, Callable]:
    """Returns a pair of saved-tensor hooks that save weights as references: that around, if it is
    one of them. Other tensors go to the hooks around them.

    ``outer``: the hooks around. ``storages``: of the units' device buffers. ``backward``: what
    holds units until the running backward is done with them.
    """
    if outer is not None and getattr(outer[0], "storages", None) is storages:
        return outer
    return Pack(outer, storages), Unpack(outer and outer[1], storages, backward)
