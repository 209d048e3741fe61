"""Parameters at rest. While a unit is at home its parameters keep identity, shape, dtype and
device, and have no storage.

ResidentParameter   the bytes are on the device; torch treats it as any Parameter. Packed ones never
                    get this class: views of them, which modules keep for the backward, would hold
                    the device's memory. They leave as views at rest
StoredParameter     the bytes are at home. Metadata is available, ``detach`` and ``data`` give a
                    StoredAlias, a full ``copy_`` writes home. Any other use gathers (inside a
                    forward or backward) or raises
StoredAlias         the detached counterpart of a StoredParameter, under the same rules
StoredManaged       what the parameters of all forms are while their bytes are at home

``grad`` of both parameter classes is the engine's: see :mod:`infinity.core.grads`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ... import torch_private
from ...errors import UsageError
from ...torch_private import DisableTorchDispatch, current_task, uncompiled
from ..machine import storage_guard
from ..units.added import always_rests
from ..units.forms import PLAIN_CLASS, form_of, is_plain, plain_class
from ..units.handle import (
    DisableTorchFunction,
    ParamHandle,
    handle_of,
    own_bytes,
    raw_grad,
    raw_hooks,
    set_raw_grad,
    set_raw_hooks,
)
from . import mistakes, transforms
from .borrowed import call_on_borrowed, lent_to
from .torch_functions import (
    AS_ITSELF,
    DETACH,
    EQUAL,
    LIKE,
    METADATA,
    TO,
    converts_to_itself,
    type_name,
)
from .touch import SHARING, touch
from .view_chain import ViewChain, chain_of, is_whole, present
from .view_nodes import ASKING_FOR_PLACES, ask_for_edges
from .whole_value import equal, set_data, set_value


class _ManagedGrad:
    """The ``grad`` of a managed parameter: the engine's proxy for the landed gradient."""

    @uncompiled
    def __get__(self, param, owner=None):
        if param is None:
            return self
        handle = handle_of(param)
        if handle is None or handle.grad is None or handle.has_raw_grad:
            return raw_grad(param)
        if current_task() != -1 and (accumulated := raw_grad(param)) is not None:
            return accumulated  # not yet landed: another hook runs before ours
        return handle.engine.gradients.get(handle)

    def __set__(self, param, value):
        handle = handle_of(param)
        if handle is None or handle.grad is None or handle.has_raw_grad:
            set_raw_grad(param, value)
        else:
            handle.engine.gradients.set(handle, value)

    def __delete__(self, param):
        self.__set__(param, None)


USERS_HOOKS = "_infinity_hooks"  # the attribute of a parameter that has them


class _UsersHooks:
    """The hooks that users have on a managed parameter's accumulated gradient. The engine's hook,
    which alone is called by autograd, calls them."""

    def __get__(self, param, owner=None):
        if param is None:
            return self
        return users_hooks(param) if USERS_HOOKS in param.__dict__ else raw_hooks(param)

    def __set__(self, param, hooks):
        if USERS_HOOKS in param.__dict__:
            param.__dict__[USERS_HOOKS] = hooks
        else:
            set_raw_hooks(param, hooks)


def users_hooks(param: torch.Tensor) -> dict[Any, Callable] | None:
    """Returns users' hooks on the accumulated gradient of a parameter that is stepped."""
    return param.__dict__.get(USERS_HOOKS)


class _WatchedData:
    """``p.data`` of a resident parameter: changes through it inside a forward must reach the home
    too."""

    def __get__(self, param, owner=None):
        if param is None:
            return self
        data = torch.Tensor.data.__get__(param)
        if (handle := handle_of(param)) is not None:
            handle.unit.watch(param, data)
        return data

    def __set__(self, param, value):
        if handle_of(param) is None:
            torch.Tensor.data.__set__(param, value)
        else:
            self.__get__(param).copy_(value)


def _refuse_copy(param: torch.Tensor, action: str) -> UsageError:
    return UsageError(
        f"parameter {handle_of(param).name} is managed by Infinity and cannot be {action}. Use"
        " model.state_dict(), infinity.save_checkpoint(), or infinity.unwrap_model() first."
    )


def _copied(param: torch.Tensor, memo: dict) -> torch.Tensor:
    """Returns a plain copy of a parameter or of a tensor at rest, as ``copy.deepcopy`` does."""
    if mistakes.is_misuse() or not is_plain(param):
        raise _refuse_copy(param, "deep-copied")
    if id(param) not in memo:
        value = param.detach().clone()
        is_param = isinstance(param, torch.nn.Parameter)
        memo[id(param)] = torch.nn.Parameter(value, param.requires_grad) if is_param else value
    return memo[id(param)]


class ResidentParameter(torch.nn.Parameter):
    """A managed parameter whose bytes are on the device."""

    grad = _ManagedGrad()
    _post_accumulate_grad_hooks = _UsersHooks()
    data = _WatchedData()

    def set_(self, source=None, *form):
        """Copies ``source`` into the memory of the device, if the parameter is managed."""
        if handle_of(self) is None:
            return super().set_(*(() if source is None else (source,)), *form)
        if form or not isinstance(source, torch.Tensor):
            raise _refused(self, "set_")
        self.data = source
        return self

    def __deepcopy__(self, memo):
        return _copied(self, memo)

    def __reduce_ex__(self, protocol):
        raise _refuse_copy(self, "pickled")


class Stored:
    """The rules of tensors whose bytes are at home."""

    __dlpack_c_exchange_api__ = None  # which would give an address; __dlpack__ is refused

    def detached_at_rest(self) -> torch.Tensor:
        """Returns the detached counterpart, under the same rules."""
        return StoredAlias.of(self)

    def viewed_at_rest(self, func: Callable) -> torch.Tensor | None:
        """Returns ``func(self, self)``, a view of all of itself. None if it has to be computed."""
        return transforms.whole_view(self, StoredAlias.like)

    @classmethod
    @uncompiled
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ASKING_FOR_PLACES:
            return ask_for_edges(func, args, kwargs, Stored)
        if func in METADATA:
            if func is torch.Tensor.storage_offset and isinstance(args[0], StoredParameter):
                return 0  # what else is in the device's buffer is not seen
            if func is torch.Tensor.untyped_storage:
                if not storage_guard.is_available():  # each read of it would be of address zero
                    raise _refused(args[0], "untyped_storage")
                handle_of(args[0]).engine.put_to_rest(handle_of(args[0]))
            with DisableTorchFunction():
                return func(*args, **kwargs)
        if func is torch.Tensor.is_pinned:
            return False  # torch would read the address
        subject = args[0] if args and isinstance(args[0], Stored) else None
        leaves = tree_flatten((args, kwargs))[0]
        if (
            func in LIKE
            and subject is not None
            and not any(isinstance(leaf, Stored) for leaf in leaves[1:])
        ):
            return _like(func, subject, args[1:], kwargs)
        if any(isinstance(leaf, Stored) and lent_to(leaf) is not None for leaf in leaves):
            return call_on_borrowed(func, args, kwargs, Stored)
        if subject is not None:
            if func in DETACH:
                return _detached(subject)
            if func == torch.Tensor.type and len(args) == 1 and not kwargs:
                return type_name(subject)
            if func in EQUAL and (answer := equal(*args)) is not None:
                return answer
            if func in TO and converts_to_itself(func, subject, args, kwargs):
                return subject
            # By this a tensor's place in the graph is found: it needs no bytes.
            if func in AS_ITSELF and args[1:] and args[1] is subject:
                if not (handle_of(subject).engine.computing or transforms.are_running()):
                    return subject.viewed_at_rest(func)
            if func == torch.Tensor.data.__set__:  # a new object at every look-up, so never `is`
                return set_data(subject, args[1])
        touched = [leaf for leaf in leaves if isinstance(leaf, Stored)]
        if transforms.are_running() and all(map(is_plain, touched)):
            return transforms.call(func, args, kwargs, Stored, _for_transform)
        engine = handle_of(touched[0]).engine
        if engine.computing:
            with engine.uses.begin():  # another thread's pass is over by then
                if engine.computing:
                    return _compute(func, args, kwargs, touched)
        if subject is not None and func is torch.Tensor.copy_ and is_whole(subject):
            return set_value(subject, *args[1:], **kwargs)
        return touch(func, args, kwargs, touched, StoredAlias.like)

    def set_(self, source=None, *form):
        """Copies ``source`` home, as ``data = source`` does. torch asks no ``__torch_function__``
        here."""
        if form or not isinstance(source, torch.Tensor):
            raise _refused(self, "set_")
        set_data(self, source)
        return self

    def __repr__(self, *, tensor_contents=None):
        handle = handle_of(self)
        home = handle.flat_param.weight.tier if handle.is_alive else "gone"
        return (
            f"{type(self).__name__}({handle.name}, shape={tuple(self.shape)}, dtype={self.dtype},"
            f" home={home})"
        )

    def __str__(self):
        """Writes the values as torch does. Writes a description if they cannot be brought now."""
        handle = handle_of(self)
        if not handle.is_alive or handle.engine.computing:
            return repr(self)
        try:
            if isinstance(self, torch.nn.Parameter):
                return str(torch.nn.Parameter(self.detach().clone(), self.requires_grad))
            return torch.Tensor.__repr__(self)
        except UsageError:
            return repr(self)

    def __format__(self, spec):
        if self.dim() == 0 and spec:
            return format(self.item(), spec)  # as torch's does
        return format(str(self), spec)

    def __deepcopy__(self, memo):
        return _copied(self, memo)

    def __reduce_ex__(self, protocol):
        raise _refuse_copy(self, "pickled")


class StoredManaged(Stored):
    """A managed parameter of any form whose bytes are at home."""

    grad = _ManagedGrad()
    _post_accumulate_grad_hooks = _UsersHooks()
    __torch_function__ = Stored.__torch_function__


class StoredParameter(StoredManaged, torch.nn.Parameter):
    """A managed parameter of a plain form whose bytes are at home."""

    __torch_function__ = Stored.__torch_function__

    @classmethod
    @uncompiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatched(func, args, kwargs or {})


def _detached(subject: torch.Tensor) -> torch.Tensor:
    """Returns the detached counterpart of a parameter at rest, under the same rules."""
    caller = sys._getframe(1).f_back
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch._dynamo"):
        caller = caller.f_back  # of torch.compiler.disable
    if (
        caller is not None and caller.f_code is torch.nn.Parameter.__new__.__code__
    ):  # which would be another Parameter over the weight's memory
        raise _refused(subject, "torch.nn.Parameter")
    return subject.detached_at_rest()


class StoredAlias(Stored, torch.Tensor):
    """The detached tensor of a StoredParameter, or a view of either: same rules, and no readable
    storage. Its gradient is its own, as of any tensor."""

    grad = property(raw_grad, set_raw_grad, lambda alias: set_raw_grad(alias, None))

    @staticmethod
    def of(source: torch.Tensor) -> StoredAlias:
        """Makes the detached counterpart of a parameter, or of a tensor at rest that views one."""
        chain = replace(chain_of(source), is_detached=True)
        return StoredAlias.like(source, handle_of(source), chain)

    @staticmethod
    def like(view: torch.Tensor, handle: ParamHandle, chain: ViewChain) -> StoredAlias:
        """Makes the tensor at rest that ``chain`` leads to, with the form of ``view`` and no
        gradient."""
        offset = view.storage_offset()
        with DisableTorchFunction():
            if handle is not None and not isinstance(view, StoredAlias):
                param = handle.param  # what is before it in the device's buffer is not seen
                offset = view.storage_offset() - (
                    param.storage_offset() * param.itemsize // view.itemsize
                )
            alias = torch.Tensor._make_wrapper_subclass(
                StoredAlias,
                view.shape,
                strides=view.stride(),
                storage_offset=offset,
                dtype=view.dtype,
                device=view.device,
            )
            storage_guard.close(alias.untyped_storage())
        alias._infinity, alias._chain = handle, chain
        if handle is not None:
            handle.add_view(alias)
        return alias

    def gathered(self) -> torch.Tensor:
        """Returns its bytes, once the parameter's are on the device, in a forward or backward."""
        _bytes_in_pass(handle_of(self).param)
        return present(self)

    @classmethod
    @uncompiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatched(func, args, kwargs or {})


def _dispatched(func, args: tuple, kwargs: dict) -> Any:
    """Calls ``func``, an operation that bypassed ``__torch_function__``: of a constructor
    (``torch.tensor(p)``), a scripted function, or a transform of torch.func. Calls that bypass this
    too (DLPack) meet the storage guard."""
    touched = [
        leaf
        for leaf in tree_flatten((args, kwargs))[0]
        if isinstance(leaf, (StoredAlias, StoredParameter))
    ]
    handle, subject = handle_of(touched[0]), touched[0]
    if not handle.engine.computing and args and args[0] is subject:
        if func is torch.ops.aten.detach.default:
            return subject.detached_at_rest()
        if func is torch.ops.aten.copy_.default and is_whole(subject):
            return set_value(*args)
    with handle.engine.uses.begin() if handle.engine.computing else nullcontext():
        if not (handle.engine.computing and func.overloadpacket is torch.ops.aten.set_):
            return touch(func, args, kwargs, touched, StoredAlias.like, dispatched=True)
        for tensor in touched:  # whose memory another tensor has from then on
            handle.engine.touch(handle_of(tensor), str(func))
        args, kwargs = tree_map_only(StoredAlias, StoredAlias.gathered, (args, kwargs))
        args, kwargs = tree_map_only(StoredParameter, _bytes_in_pass, (args, kwargs))
        return func(*args, **kwargs)


def _bytes_in_pass(param: StoredParameter) -> torch.Tensor:
    handle = handle_of(param)
    handle.unit.watch(param, value := own_bytes(param))
    return value


def _for_transform(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what stands for a tensor at rest in a transform of torch.func."""
    if isinstance(tensor, StoredParameter):
        return transforms.whole_view(tensor, StoredAlias.like)
    return tensor


transforms.let_be_wrapped(Stored, _for_transform)


def _refused(rest: torch.Tensor, name: str) -> UsageError:
    return handle_of(rest).engine.refusal(handle_of(rest), name)


torch_private.close_doors(StoredParameter, _refused)
torch_private.close_doors(Stored, _refused, is_asked=True)


@cache
def _stored(plain: type) -> type:
    """Makes the class at rest of Parameters of another library's class ``plain``, which others know
    by its name."""
    members = {PLAIN_CLASS: plain, "__torch_function__": Stored.__torch_function__}
    return type(plain.__name__, (StoredParameter, plain), members)


def class_at_rest(param: torch.Tensor) -> type:
    """Returns the class of a managed ``param`` while its bytes are at home."""
    if (classes := form_of(param).classes) is not None:
        return classes[1]
    plain = plain_class(param) if isinstance(param, (Stored, ResidentParameter)) else type(param)
    return StoredParameter if plain is torch.nn.Parameter else _stored(plain)


def _compute(func, args: tuple, kwargs: dict, touched: list) -> Any:
    """Calls ``func`` in a forward or backward, outside of the parameters' owners."""
    name = getattr(func, "__name__", str(func))
    is_wrapped = not all(map(is_plain, touched))
    if is_wrapped or name in SHARING:
        # What it returns may read the memory later.
        for tensor in touched:
            handle_of(tensor).engine.touch(handle_of(tensor), name)
    if not is_wrapped or any(always_rests(handle_of(tensor).param) for tensor in touched):
        return touch(func, args, kwargs, touched, StoredAlias.like)
    args, kwargs = tree_map_only(StoredAlias, StoredAlias.gathered, (args, kwargs))
    with handle_of(touched[0]).engine.saving_tensors(), DisableTorchFunction():
        return func(*args, **kwargs)


def _like(func, subject: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
    """Calls ``func``, which needs only the shape of a tensor at rest. Raises UsageError for a known
    misuse."""
    handle = handle_of(subject)
    if mistakes.advice():
        raise _refused(subject, func.__name__)
    with DisableTorchFunction(), DisableTorchDispatch():
        if is_whole(subject):
            return func(handle.param, *args, **kwargs)
        twin = torch.empty_strided(
            subject.shape, subject.stride(), dtype=subject.dtype, device="meta"
        )
        return func(twin, *args, **{"device": subject.device} | kwargs)
