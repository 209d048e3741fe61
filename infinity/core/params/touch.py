"""Touch: runs one operation of torch on parameters at rest, outside of any pass, or in a pass
outside of their owners' forwards.

touch   brings the units of the parameters among the arguments, runs, writes home what was changed,
        and lets the units go. Autograd saves references to the units
view    a result in a parameter's memory: it leaves as a tensor at rest, which a use brings again
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from ...errors import UsageError
from ...torch_private import OpOverload, clear_python_key, has_python_key, set_python_key
from ..machine import storage_guard
from ..units.handle import DisableTorchFunction, Owner, ParamHandle, handle_of, managed, own_bytes
from . import mistakes
from .torch_functions import mutated_arguments
from .view_chain import ViewChain, ViewStep, bytes_of, chain_of
from .view_nodes import View, with_node

# They would give the memory away
SHARING = frozenset(
    "numpy __array__ __dlpack__ data_ptr storage untyped_storage typed_storage share_memory_"
    " pin_memory __reduce_ex__ __deepcopy__".split()
)
# They would change the form of a parameter in place
RESHAPING = frozenset(
    "set_ resize_ resize_as_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_"
    " detach_ rename_".split()
)
STRIDED = {"as_strided": 3, "as_strided_copy": 3, "as_strided_scatter": 4}  # where the offset is
KEEPING = frozenset(["_make_dual"])  # their results keep the arguments: these get copies
# torch does not count what they write: statistics among their arguments, or each element
UNCOUNTED = ("batch_norm", "instance_norm", "moving_avg", "apply_", "map_", "map2_")
CONTAINERS = (list, tuple, dict)
ASSIGNING = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__"
    " __ior__ __ixor__ __ilshift__ __irshift__".split()
)


# Makes the tensor at rest of a view: from a tensor of its form, its handle and its chain.
Rest = Callable[[torch.Tensor, ParamHandle, ViewChain], torch.Tensor]


def touch(
    func: Callable,
    args: tuple,
    kwargs: dict,
    touched: Sequence[torch.Tensor],
    make_rest: Rest,
    *,
    dispatched: bool = False,
) -> Any:
    """Calls ``func`` with the values of the tensors at rest ``touched``, all of which are among its
    arguments. ``make_rest`` makes the tensor at rest of a view. ``dispatched``: beneath autograd,
    which saved the tensors at rest, and does not count writes there. Raises UsageError if it is
    refused, before anything changed."""
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    if name in RESHAPING or (name in SHARING and not managed(touched[0]).engine.computing):
        raise _refusal(managed(touched[0]), name)
    if name in STRIDED:
        func, args, kwargs = _from_own_element(func, STRIDED[name], args, dict(kwargs))
    if name in KEEPING:
        args, kwargs = tree_map(
            lambda leaf: leaf.clone() if handle_of(leaf) is not None else leaf, (args, kwargs)
        )
        return func(*args, **kwargs)
    call = _Call(func, name, args, kwargs, make_rest, dispatched)
    return _run_foreach(call) if name.startswith("_foreach_") else call.run(touched)


def _refusal(handle: ParamHandle, name: str) -> UsageError:
    if name in SHARING:
        return handle.engine.refusal(handle, name)
    return UsageError(
        f"{name} would change the form of parameter {handle.name}, whose home keeps shape, strides"
        f" and dtype. {mistakes.UNWRAP}"
    )


def _from_own_element(
    func: Callable, offset_at: int, args: tuple, kwargs: dict
) -> tuple[Callable, tuple, dict]:
    """Returns a call whose offset counts from the subject's first element: in memory the parameter
    has others before it, which users do not see. Raises RuntimeError beyond the parameter's
    end, as torch does. ``offset_at``: the offset's, among the arguments."""
    subject = args[0]
    offset = kwargs.pop("storage_offset", args[offset_at] if len(args) > offset_at else None)
    offset = subject.storage_offset() if offset is None else offset
    size, stride = kwargs.get("size"), kwargs.get("stride")
    size = args[offset_at - 2] if size is None else size
    stride = args[offset_at - 1] if stride is None else stride
    param = managed(subject).param
    room = 1 + sum((n - 1) * step for n, step in zip(param.shape, param.stride()))
    reach = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride))
    if 0 not in size and reach * subject.itemsize > room * param.itemsize:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and"
            f" itemsize {subject.itemsize} requiring a storage size of {reach * subject.itemsize}"
            f" are out of bounds for storage of size {room * param.itemsize}"
        )
    return partial(_strided, func, offset - subject.storage_offset()), args[:offset_at], kwargs


def _strided(func: Callable, offset: int, subject: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(subject, *args, storage_offset=subject.storage_offset() + offset, **kwargs)


class _Values:
    """The bytes of the tensors at rest ``touched``, for the arguments of one call. Those of
    ``written`` may be changed in place.

    Each use has a node of its own in the graph: autograd then adds up gradients as for any tensor.
    """

    def __init__(self, touched: Sequence[torch.Tensor], written: Sequence[torch.Tensor]):
        self._written = {id(tensor) for tensor in written}
        self._bytes = {
            id(tensor): bytes_of(tensor, written=id(tensor) in self._written) for tensor in touched
        }
        # A use, and the tensor at rest that it stands for
        self._uses: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of a tensor at rest."""
        return self._bytes[id(tensor)]

    def arguments(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Returns arguments with every tensor at rest replaced by its bytes. The last one is
        replaced first: autograd then adds up the gradients in the arguments' order."""
        named = {name: self._replaced(kwargs[name]) for name in reversed(kwargs)}
        return tuple([self._replaced(arg) for arg in reversed(args)][::-1]), named

    def _replaced(self, arg: Any) -> Any:
        if not isinstance(arg, CONTAINERS):
            return self._use(arg)
        leaves, form = tree_flatten(arg)
        return tree_unflatten([self._use(leaf) for leaf in reversed(leaves)][::-1], form)

    def at_rest(self, used: Any) -> torch.Tensor | None:
        """Returns the tensor at rest whose use is ``used``, or None."""
        return next((tensor for use, tensor in self._uses if use is used), None)

    def has(self, value: Any) -> bool:
        """Tells whether ``value`` is one of the tensors."""
        return id(value) in self._bytes

    def _use(self, arg: Any) -> Any:
        if not self.has(arg):
            return arg
        value = self.of(arg)
        if id(arg) not in self._written and "_chain" in arg.__dict__:
            value = with_node(arg, value)
        self._uses.append((value, arg))
        return value


@dataclass(frozen=True)
class _Call:
    """One call of a function of torch."""

    func: Callable
    name: str
    args: tuple
    kwargs: dict[str, Any]
    rest: Rest
    dispatched: bool

    def run(self, touched: Sequence[torch.Tensor]) -> Any:
        """Calls the function, with the parameters of ``touched`` resident meanwhile."""
        handles: dict[Owner, list[ParamHandle]] = {}
        for tensor in touched:
            handles.setdefault(managed(tensor).engine, []).append(managed(tensor))
        failure, result, written = None, None, self.targets
        with ExitStack() as held:
            for engine, on_engine in handles.items():
                writes = any(managed(target).engine is engine for target in written)
                held.enter_context(engine.touching(on_engine, self.name, writes=writes))
                if not self.dispatched:
                    held.enter_context(engine.saving_tensors())
                if on_engine[
                    0
                ].engine.computing:  # the parameters stay at rest: see core/run/prefetch.py
                    held.enter_context(DisableTorchFunction())
                    for param in [handle.param for handle in on_engine]:
                        if has_python_key(param):
                            clear_python_key(param)
                            held.callback(set_python_key, param)
            values = _Values(touched, written)
            args, kwargs = values.arguments(self.args, self.kwargs)
            try:
                result = self._at_rest(self.func(*args, **kwargs), values, touched)
            except BaseException as error:  # noqa: BLE001 - torch's own: nothing is to be repaired
                failure = error
            finally:
                self._note_uncounted(touched, written, failed=failure is not None)
                del values, args, kwargs
        if failure is not None:
            # An exception that a user keeps would keep weights in memory.
            traceback.clear_frames(failure.__traceback__)
            try:
                raise failure
            finally:
                del failure
        return result

    @property
    def targets(self) -> list[torch.Tensor]:
        """The tensors at rest that it may write to, by its schema or torch's naming."""
        written: list[Any] = [self.kwargs.get("out")]
        in_place = self.name.endswith("_") and not self.name.endswith("__")
        if isinstance(self.func, OpOverload):
            written = mutated_arguments(self.func, self.args, self.kwargs)
        elif in_place or self.name in ASSIGNING or self.kwargs.get("inplace"):
            first = self.args[:1] or list(self.kwargs.values())[:1]
            written.append(first)
        return [leaf for leaf in tree_flatten(written)[0] if handle_of(leaf) is not None]

    def _note_uncounted(
        self, touched: Sequence[torch.Tensor], written: Sequence[torch.Tensor], *, failed: bool
    ) -> None:
        """Notes writes that torch has not counted, so that they go home."""
        if self.dispatched:
            for tensor in written:
                torch.autograd.graph.increment_version(managed(tensor).param)
        if any(word in self.name for word in UNCOUNTED):
            written = touched
        elif not failed:  # a function that raises may have written before
            return
        for handle in map(managed, written):
            handle.unit.watch(handle.param, own_bytes(handle.param))

    def _at_rest(self, result: Any, values: _Values, touched: Sequence[torch.Tensor]) -> Any:
        """Returns ``result``, with tensors at rest for what lies in parameters' memory."""

        def rest_of(leaf: Any, index: int) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.is_nested:
                raise managed(touched[0]).engine.refusal(managed(touched[0]), self.name)
            rest = values.at_rest(leaf)
            if rest is None and leaf.layout is torch.strided:
                rest = self._view_at_rest(leaf, index, values, touched)
            return leaf if rest is None else rest

        if not isinstance(result, CONTAINERS):
            return rest_of(result, 0)
        leaves, spec = tree_flatten(result)
        rests = [rest_of(leaf, index) for index, leaf in enumerate(leaves)]
        return result if all(map(is_, rests, leaves)) else tree_unflatten(rests, spec)

    def _view_at_rest(
        self,
        view: torch.Tensor,
        index: int,
        values: _Values,
        touched: Sequence[torch.Tensor],
    ) -> torch.Tensor | None:
        """Returns the tensor at rest for ``view``, the result numbered ``index``. None if it lies
        in no parameter's memory."""
        storage = storage_guard.identity(view)
        sources = [
            tensor
            for tensor in {id(tensor): tensor for tensor in touched}.values()
            if storage_guard.identity(values.of(tensor)) == storage
        ]
        others = any(
            isinstance(leaf, torch.Tensor) and leaf.dim() and not values.has(leaf)
            for leaf in tree_flatten((self.args, self.kwargs))[0]
        )
        for source in sources:
            first = values.of(source).storage_offset()
            if len(sources) == 1 and (not others or self.name.endswith("_as")):
                step = ViewStep.of_call(self.func, self.args, self.kwargs, source, index)
            elif first <= view.storage_offset() < first + max(values.of(source).numel(), 1):
                step = ViewStep.of_strides(view, values.of(source))
            else:
                continue
            chain = chain_of(source).then(step)
            make = partial(self.rest, view.detach(), managed(source), chain)
            is_new = view.requires_grad and torch.is_grad_enabled()
            return View.apply(source, step, make) if is_new else make()
        return None


def _run_foreach(call: _Call) -> Any:
    """Calls a function of lists unit by unit, so that no more than one is needed at a time."""
    lists = [arg for arg in (*call.args, *call.kwargs.values()) if _is_list(arg)]
    if len({len(arg) for arg in lists}) > 1:
        return call.func(*map(_form, call.args), **tree_map(_form, call.kwargs))  # raises
    results: list[Any] = []
    for run in _runs_of_units(lists):
        args = tuple(arg[run] if _is_list(arg) else arg for arg in call.args)
        kwargs = {k: arg[run] if _is_list(arg) else arg for k, arg in call.kwargs.items()}
        leaves = tree_flatten((args, kwargs))[0]
        touched = [leaf for leaf in leaves if handle_of(leaf) is not None]
        part = replace(call, args=args, kwargs=kwargs)
        results.append(part.run(touched) if touched else call.func(*args, **kwargs))
    if any(result is None for result in results):
        return None
    return type(results[0])(arg for result in results for arg in result)


def _is_list(arg: Any) -> bool:
    """Tells whether an argument has an item for each tensor: a list, or a tensor of scalars."""
    is_scalars = isinstance(arg, torch.Tensor) and handle_of(arg) is None and arg.dim() == 1
    return is_scalars or isinstance(arg, (list, tuple))


def _form(arg: Any) -> Any:
    """Returns an argument whose tensors have form alone."""
    return tree_map_only(torch.Tensor, partial(torch.empty_like, device="meta"), arg)


def _runs_of_units(lists: Sequence[Sequence]) -> Iterator[slice]:
    """Yields runs of list positions whose parameters are in the same units."""

    def units(index: int) -> tuple:
        return tuple(
            handle.unit for items in lists if (handle := handle_of(items[index])) is not None
        )

    for _, run in groupby(range(len(lists[0])), units):
        positions = list(run)
        yield slice(positions[0], positions[-1] + 1)
