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
    top_hooks,
)
from ..params.apart import makes_hooks
from ..units.forms import PLAIN, form_of
from ..units.handle import DisableTorchFunction
from ..units.inner import has_inner, inner_tensors
from ..units.unit import ParamUnit
from ..units.weight_storages import WeightStorages, untyped_storage
from .saved_tensor import SavedLocal, SavedTensor


@dataclass(eq=False)
class SavedWeight:
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
    param: weakref.ref[torch.nn.Parameter] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, unit: ParamUnit, flat: torch.Tensor) -> SavedWeight:
        """Returns a reference to ``tensor``, a view of ``flat``, a device buffer of ``unit``."""
        with DisableTorchFunction():  # a packed parameter hides its place in the buffer
            view = (
                tensor.size(),
                tensor.stride(),
                tensor.storage_offset(),
                tensor.dtype,
                tensor.is_conj(),
                tensor.is_neg(),
            )
        rows = unit.arrival.rows
        there = None if rows is None else rows.there
        return cls(unit, (unit.in_use or unit).version, flat, *view, there)

    def check(self) -> None:
        """Raises UsageError if the bytes that the forward computed with are not available in this
        backward: the unit has another version."""
        if self._is_changed():
            raise UsageError(
                f"this backward needs weights of unit {self.unit.name} as they were in its forward,"
                " but they were changed since (by optimizer.step(), load_state_dict() or an edit)."
                " Run backward before that."
            )

    def _is_changed(self) -> bool:
        """Tells whether the parameter itself has changed, not only others of its unit."""
        if self.unit.older:  # whose versions change without the parameters'
            return True
        start = self.offset * self.dtype.itemsize // self.flat.itemsize - self.flat.storage_offset()
        changes = [
            handle.changed_at
            for buffer in self.unit.buffers
            if buffer.flat is self.flat
            for handle, place in zip(buffer.flat_param.handles, buffer.flat_param.layout.placements)
            if place.offset <= start
        ]
        return not changes or changes[-1] > self.version

    def tensor(self) -> torch.Tensor:
        """Makes the tensor that was saved. Its unit is resident."""
        bare = torch.empty(0, dtype=self.dtype, device=self.flat.device)
        bare = bare.set_(self.flat.untyped_storage(), self.offset, self.size, self.stride)
        bare = bare.conj() if self.conj else bare
        return neg_view(bare) if self.neg else bare


@dataclass(frozen=True)
class SavedSubclass:
    """A saved tensor subclass around weights: its inner tensors in their saved forms."""

    kind: Any
    inner: dict[str, Any]
    rest: tuple  # context, size and stride

    @classmethod
    def of(cls, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> SavedSubclass:
        """Saves the inner tensors of ``tensor`` by ``pack``."""
        names, context = tensor.__tensor_flatten__()
        inner = {
            name: cls.of(each, pack) if has_inner(each := getattr(tensor, name)) else pack(each)
            for name in names
        }
        return cls(type(tensor), inner, (context, tensor.size(), tensor.stride()))

    def tensor(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Makes the tensor that was saved, of inner tensors from ``unpack``."""
        inner = {
            name: saved.tensor(unpack) if isinstance(saved, SavedSubclass) else unpack(saved)
            for name, saved in self.inner.items()
        }
        return self.kind.__tensor_unflatten__(inner, *self.rest)


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
    tensors, left = [], list(unpacked)
    for value in values:  # in their order: a view of a whole weight has its place
        at = next((n for n, (place, _) in enumerate(left) if place == _place(value)), None)
        tensors.append(value if at is None or left[at][1] is None else left[at][1])
        left = left if at is None else left[at + 1 :]
    params = {id(param) for _, param in unpacked if param is not None}
    if not params <= {id(each) for each in tensors}:  # the Function would compute with other bytes
        raise InternalError("the backward of a Function did not get back the parameters it saved")
    return tuple(tensors)


# Of every class: as a weight is saved, nothing tells for which one. In torch 2.15 `apply` has no
# frame of Python.
_SAVED_TENSORS = BackwardCFunction.saved_tensors
BackwardCFunction.saved_tensors = property(_saved_tensors)


def _place(tensor: torch.Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


@makes_hooks
def saving_hooks(
    outer: tuple | None, storages: WeightStorages, hold: Callable[[ParamUnit, bool], None]
) -> tuple[Callable, Callable]:
    """Returns a pair of saved-tensor hooks that save weights as references: that around, if it is
    one of them. Other tensors go to the hooks around them.

    ``outer``: the hooks around. ``storages``: of the units' device buffers. ``hold`` makes a unit
    resident until the running backward is done with it, and if its second argument is True, at
    least until the running node of the graph ends.
    """
    if outer is not None and getattr(outer[0], "storages", None) is storages:
        return outer
    outer_pack, outer_unpack = outer or (None, None)
    # A checkpoint counts the saved tensors, and must get the same count in its forward and in its
    # recomputation. There the same weight may be saved with or without these hooks.
    counted = is_checkpoint(outer) or getattr(outer_pack, "is_counted", False)
    count = getattr(outer_pack, "count", outer_pack)

    # A user's checkpoint and others' hooks give back new tensors, without attributes.
    is_ours = str(getattr(outer_pack, "__module__", None)).startswith("infinity.")
    gives_params = outer is None or getattr(outer_pack, "gives_params", is_ours)

    # No function refers to itself, which only the garbage collector would free.
    def pack_one(tensor: torch.Tensor, *, inner: bool = False) -> Any:
        kind = type(tensor)
        if (
            tensor.layout is torch.strided
            and kind not in OPAQUE
            and not is_of_transform(tensor)  # which has no storage
            and untyped_storage(tensor)._cdata in storages.entries
            and (entry := storages.find(tensor)) is not None
        ):
            if counted:
                count(tensor)
            saved: Any = SavedWeight.of(tensor, *entry)
        elif outer_pack:
            return outer_pack(tensor)
        else:
            saved = SavedTensor(tensor)
        if gives_params and not inner and kind is not torch.Tensor:
            saved.param = weakref.ref(tensor) if isinstance(tensor, torch.nn.Parameter) else None
        return saved

    def pack(tensor: torch.Tensor) -> Any:
        if type(tensor) is torch.Tensor:
            return pack_one(tensor)
        if (form := form_of(tensor)) is not PLAIN and counted:
            # A checkpoint compares what it counts: parts differ from what is saved without hooks.
            return outer_pack(tensor)
        local = tensor if form is PLAIN else form.local(tensor)
        if has_inner(local) and any(storages.find(each) for each in inner_tensors(local)):
            # Its inner tensors are parameters, too, but the Function gets the subclass.
            packed: Any = SavedSubclass.of(local, partial(pack_one, inner=True))
        else:
            packed = pack_one(local)
        return packed if form is PLAIN else SavedLocal(packed, form, form.spec(tensor))

    def unpack_one(saved: Any) -> torch.Tensor:
        if not isinstance(saved, SavedWeight):
            return saved.tensor() if isinstance(saved, SavedTensor) else outer_unpack(saved)
        if saved.version != (saved.unit.in_use or saved.unit).version:
            saved.check()
        params = getattr(_unpacked, "params", None)
        if params is not None and saved.param is not None and (param := saved.param()) is not None:
            # The Function gets the parameter, and each use of that brings it again.
            hold(saved.unit, False)
            value = torch.empty((), dtype=saved.dtype, device=saved.flat.device).expand(saved.size)
            params.append((_place(value), param))
            return value
        if saved.unit.arrival.rows is not None:
            saved.unit.arrival.rows.want(saved.there)
        hold(saved.unit, True)
        if torch.is_grad_enabled() and current_task() != -1:
            # The graph of this backward saves weights as references, too, before the node computes
            # with them. Autograd restores the thread's hooks at the end of each node.
            push_hooks(*saving_hooks(top_hooks(True), storages, hold))
        value = saved.tensor()
        if params is not None:
            params.append((_place(value), None))
        return value

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, SavedTensor):
            value, params = saved.tensor(), getattr(_unpacked, "params", None)
            if params is not None:
                params.append((_place(value), saved.param and saved.param()))
            return value
        inner = saved.packed if isinstance(saved, SavedLocal) else saved
        value = inner.tensor(unpack_one) if isinstance(inner, SavedSubclass) else unpack_one(inner)
        return saved.form.build(saved.spec, value) if isinstance(saved, SavedLocal) else value

    pack.storages, pack.is_counted, pack.gives_params = storages, counted, gives_params
    if count is not outer_pack:  # the tensors are kept, too
        pack.count = count
    return pack, unpack
