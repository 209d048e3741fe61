"""Touch: runs one operation of torch on parameters at rest, outside of any pass.

touch   brings the units of the parameters among the arguments, runs, writes home what was changed,
        and lets the units go
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
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..machine import storage_guard
from .handle import Owner, ParamHandle, handle_of, managed
from .torch_functions import mutated_arguments
from .view_chain import ViewChain, ViewStep, chain_of, present
from .view_nodes import View

# They would give the memory away, replace it, or change the shape of a parameter in place.
REFUSED = frozenset(
    "numpy __array__ __dlpack__ data_ptr storage untyped_storage typed_storage share_memory_"
    " pin_memory set_ resize_ resize_as_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_"
    " as_strided_ detach_ rename_ __reduce_ex__ __deepcopy__".split()
)
KEEPING = frozenset(["_make_dual"])  # their results keep the arguments: these get copies
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
    rest: Rest,
    *,
    dispatched: bool = False,
) -> Any:
    """Calls ``func`` with the values of the tensors at rest ``touched``, all of which are among its
    arguments. ``rest`` makes the tensor at rest of a view. ``dispatched``: beneath autograd, which
    saved the tensors at rest, and does not count writes there. Raises UsageError if it is refused,
    before anything changed."""
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    if name in REFUSED:
        handle = managed(touched[0])
        raise handle.engine.refusal(handle, name)
    if name in KEEPING:
        copied = {id(tensor): tensor.clone() for tensor in touched}
        return func(*(_replaced(each, copied) for each in args), **_replaced(kwargs, copied))
    call = _Call(func, name, args, kwargs, rest, dispatched)
    return _for_each(call) if name.startswith("_foreach_") else call.run(touched)


def _replaced(given: Any, values: dict[int, torch.Tensor]) -> Any:
    """Returns an argument with every tensor at rest replaced by its value."""
    if isinstance(given, CONTAINERS):
        return tree_map(lambda each: values.get(id(each), each), given)
    return values.get(id(given), given)


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
        failure, result = None, None
        with ExitStack() as held:
            for engine, its in handles.items():
                writes = any(managed(each).engine is engine for each in self.targets)
                held.enter_context(engine.touching(its, self.name, writes=writes))
                if not self.dispatched:
                    held.enter_context(engine.saving_tensors())
            written = self.targets
            values = {
                id(tensor): present(tensor, written=any(each is tensor for each in written))
                for tensor in touched
            }
            args = tuple(_replaced(each, values) for each in self.args)
            kwargs = {name: _replaced(each, values) for name, each in self.kwargs.items()}
            try:
                result = self._at_rest(self.func(*args, **kwargs), values, touched)
            except Exception as error:  # noqa: BLE001 - torch's own: nothing is to be repaired
                failure = error
            finally:
                if self.dispatched:
                    for tensor in written:
                        torch.autograd.graph.increment_version(managed(tensor).param)
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
        if isinstance(self.func, torch._ops.OpOverload):
            written = mutated_arguments(self.func, self.args, self.kwargs)
        elif in_place or self.name in ASSIGNING or self.kwargs.get("inplace"):
            first = self.args[:1] or list(self.kwargs.values())[:1]
            written.append(first)
        return [leaf for leaf in tree_flatten(written)[0] if handle_of(leaf) is not None]

    def _at_rest(
        self, result: Any, values: dict[int, torch.Tensor], touched: Sequence[torch.Tensor]
    ) -> Any:
        """Returns ``result``, with tensors at rest for what lies in parameters' memory."""
        own = {id(values[id(tensor)]): tensor for tensor in touched}

        def rest_of(leaf: Any, index: int) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.is_nested:
                raise managed(touched[0]).engine.refusal(managed(touched[0]), self.name)
            rest = own.get(id(leaf))
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
        values: dict[int, torch.Tensor],
        touched: Sequence[torch.Tensor],
    ) -> torch.Tensor | None:
        """Returns the tensor at rest for ``view``, the result numbered ``index``. None if it lies
        in no parameter's memory."""
        storage = storage_guard.identity(view)
        sources = [
            tensor
            for tensor in {id(each): each for each in touched}.values()
            if storage_guard.identity(values[id(tensor)]) == storage
        ]
        for source in sources:
            first = values[id(source)].storage_offset()
            if len(sources) == 1:
                step = ViewStep.of_call(self.func, self.args, self.kwargs, source, index)
            elif first <= view.storage_offset() < first + max(values[id(source)].numel(), 1):
                step = ViewStep.of_place(view, values[id(source)])
            else:
                continue
            chain = chain_of(source).then(step)
            make = partial(self.rest, view.detach(), managed(source), chain)
            is_new = view.requires_grad and torch.is_grad_enabled()
            return View.apply(source, step, make) if is_new else make()
        return None


def _for_each(call: _Call) -> Any:
    """Calls a function of lists unit by unit, so that no more than one is needed at a time."""
    lists = [
        each for each in (*call.args, *call.kwargs.values()) if isinstance(each, (list, tuple))
    ]
    length = max((len(each) for each in lists), default=0)
    whole = [each for each in lists if len(each) == length]
    results: list[Any] = []
    for run in _runs_of_units(whole, length):
        cut = lambda each: each[run] if any(each is one for one in whole) else each
        args, kwargs = tuple(map(cut, call.args)), {k: cut(v) for k, v in call.kwargs.items()}
        leaves = tree_flatten((args, kwargs))[0]
        touched = [leaf for leaf in leaves if handle_of(leaf) is not None]
        part = replace(call, args=args, kwargs=kwargs)
        results.append(part.run(touched) if touched else call.func(*args, **kwargs))
    if any(result is None for result in results):
        return None
    return type(results[0])(each for result in results for each in result)


def _runs_of_units(lists: Sequence[Sequence], length: int) -> Iterator[slice]:
    """Yields runs of list positions whose parameters are in the same units."""

    def units(index: int) -> tuple:
        return tuple(
            handle.unit for each in lists if (handle := handle_of(each[index])) is not None
        )

    for _, run in groupby(range(length), units):
        positions = list(run)
        yield slice(positions[0], positions[-1] + 1)
