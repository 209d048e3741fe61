"""Passes: holds units while a forward of the model needs them, and hooks their use in the backward.

owner       a module whose forward needs a unit: it holds some of its parameters
frame       one running forward of an owner (or of the root), with the units it holds

A forward holds a unit from its owner's pre-hook to its post-hook. The holds of the backward are in
:mod:`infinity.core.grads.backward`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...torch_private import current_task, top_hooks
from ..grads.backward import Backward
from ..machine.sizes import format_nbytes
from ..params.outside_modes import makes_hooks
from ..units.forms import local_of
from ..units.handle import ParamHandle, drop_raw_grads, handle_of, own_bytes
from ..units.rows import ChosenRows
from ..units.unit import ParamUnit, flat_params_of
from .job import Job
from .operations import Operation, State
from .pass_state import Frame
from .saved_weights import LAZY, OPAQUE, is_checkpoint, saving_hooks

logger = logging.getLogger(__name__)

WORTH_TELLING_NBYTES = 256 * 1024 * 1024  # of copies by autocast


class Passes:
    """The running forwards, and their links to the backward."""

    def __init__(self, job: Job, backward: Backward):
        self.job, self.scopes, self._pass, self.backward = job, job.scopes, job.running, backward
        # Called with each parameter that is stepped from a later time on.
        self.hook: Callable[[torch.Tensor], None] = lambda param: None
        self._lone_hooks = saving_hooks(None, job.storages, weakref.ref(backward))
        # Run last, after hooks that a forward may have registered.
        self.reorder_hooks: list[Callable[[], None]] = []
        self._has_warned = False  # of autocast's copies

    @property
    def computing(self) -> bool:
        """Whether a forward or backward of the model is running."""
        return bool(self._pass.frames) or current_task() != -1

    @property
    def is_recomputed(self) -> bool:
        """Whether the running forward is recomputed in the backward, or is itself that
        recomputation. Both have to compute the same."""
        if current_task() != -1 or (self._pass.frames and self._pass.frames[-1].is_recomputed):
            return True
        return is_checkpoint(top_hooks(True))

    @property
    def _keeps_all(self) -> bool:
        """Whether all that autograd saves stays as it is."""
        return self.job.activations is None and not self.job.events.packing

    @property
    def _takes_inner(self) -> bool:
        """Whether a root's forward may hold the units of all inside. A timeline shows each, and a
        plan counts autocast's copies for each."""
        moves_nothing = self.job.prefetcher.moves_nothing and not self.job.traffic.moved
        return moves_nothing and self._keeps_all and not (self.job.device.is_host and self._casts)

    @property
    def _casts(self) -> bool:
        return torch.is_autocast_enabled(self.job.device.where.type)

    @property
    def _saves_weights(self) -> bool:
        """Whether autograd saves weights themselves, as it does those of a plain model."""
        return self._keeps_all and self.job.prefetcher.saves_weights

    # --- forward ---

    def enter(
        self,
        module: torch.nn.Module,
        units: list[ParamUnit],
        *,
        is_root: bool,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> None:
        """Begins a forward of ``module``, called with ``args`` and ``kwargs``. Blocks until its
        units are resident, so it may wait for the disk and for other ranks."""
        in_backward = current_task() != -1
        if self._is_inside_root(module) and not in_backward:
            self._take(units)
            for listener in self.job.events.forward_begun:
                listener(module, units)
            return
        if not self._pass.frames:
            self.job.store.check_process()
            if self.job.uses.is_in(State.UNWRAPPED):
                self.job.uses.check(Operation.FORWARD, f"this forward of {type(module).__name__}")
        if begins := not self._pass.frames and not in_backward:
            self.job.lents.settle()
        if begins and is_root:
            for listener in self.job.events.pass_begun:
                listener(module, args, kwargs or {})
            self._begin(training=torch.is_grad_enabled())
        # Before any unit is held: this may raise, for a module with tensors of an unknown kind.
        keeping = self.job.activations if torch.is_grad_enabled() and begins else None
        foreign = {  # that the module keeps itself: buffers, and parameters that nothing moves
            local_of(tensor).untyped_storage()._cdata
            for tensor in ((*module.buffers(), *module.parameters()) if keeping is not None else ())
            if handle_of(tensor) is None and tensor.layout is torch.strided
        }
        held: list[ParamUnit] = []
        for unit in (self.job.units if is_root else units) if begins else ():
            unit.arrival.begin_pass()
        for rows in _rows_of(units):  # they come now, if no hook of a user changes the choice
            rows.want_for(module, args, kwargs)
        try:
            with self.job.store.guard:
                for unit in units:
                    if in_backward:
                        self.backward.gather(unit)
                    else:
                        self.job.prefetcher.hold(unit)
                    held.append(unit)
        except BaseException:
            self.job.prefetcher.unhold_all(held)
            raise
        self._pass.frames.append(
            Frame(module, held, is_recomputed=self.is_recomputed, hooks=self.scopes.hooks)
        )
        self._pass.frames[-1].takes_inner = takes_inner = begins and is_root and self._takes_inner
        outer = top_hooks(True)
        # A checkpoint recomputes: nothing is kept.
        if keeping is not None and not is_checkpoint(outer):
            keeping.begin(foreign)
            self.scopes.push_hooks(*keeping.hooks(outer))
        # A Function may save a weight that no operation has brought: that of another module.
        is_used = units or takes_inner or keeping is not None
        if is_used and torch.is_grad_enabled() and not self._saves_weights:
            self.scopes.push_hooks(*self._saving_hooks())
        for listener in self.job.events.forward_begun:
            listener(module, units)

    def _is_inside_root(self, module: torch.nn.Module) -> bool:
        """Whether ``module`` runs inside a root that holds the units of all forwards inside."""
        frames = self._pass.frames
        return bool(frames) and frames[0].takes_inner and frames[0].module is not module

    def _take(self, units: list[ParamUnit]) -> None:
        """Lets the root's forward hold ``units``. Waits for their last updates."""
        for unit in units:
            if unit not in self._pass.holds:
                self.job.prefetcher.hold(unit)
                self._pass.frames[0].units.append(unit)

    def _begin(self, *, training: bool) -> None:
        """Begins the pass of a root forward, unless an accumulation pass has begun already. Every
        data rank calls this."""
        job = self.job
        if not self._pass.begin_root():
            return
        if not self._pass.is_accumulating:
            job.uses.check(Operation.LONE_FORWARD)
        job.device.begin_pass()
        if training:
            # Left by a backward that was interrupted before the engine knew of it.
            flats = [flat for flat in flat_params_of(job.units) if flat.homes.spec.stepped]
            drop_raw_grads([param for flat in flats for param in flat.params])
            job.gradients.assigned.let_go_unheld()
            if not self._has_warned and self._casts:
                self._has_warned = True
                _tell_of_autocast(job)
        job.schedule.begin(self._pass.kind if training else "infer")
        job.prefetcher.begin_pass(training=training)

    def leave(
        self,
        module: torch.nn.Module,
        args: tuple,
        kwargs: dict,
        output: Any,
        units: Sequence[ParamUnit] = (),
    ) -> Any:
        """Ends the forward of ``module``, with an output or with an exception (then the output is
        None).

        Returns the output, with views of weights replaced by copies: the weight may be released
        before the view is used.
        """
        has_frame = any(frame.module is module for frame in reversed(self._pass.frames))
        if not has_frame and not self._is_inside_root(module):
            return output  # its pre-hook failed before it entered
        for listener in self.job.events.forward_ended:
            listener(module)
        watches = torch.is_grad_enabled() and output is not None
        if not has_frame:
            if watches:
                self._watch_backward(module, units, args, kwargs, output)
            return output
        if self._pass.frames[0].module is module:
            # A parameter itself is at home after this frame, so a loss could not use it.
            output = _with_copies(output, handle_of)
        let_go = self.job.prefetcher.unhold_all
        # Ended by an exception, for which torch called no hook.
        while (frame := self._pass.frames.pop()).module is not module:
            let_go((*frame.units, *frame.looked_at), frame.used_outside)
        try:
            for unit in frame.units:
                self.job.traffic.tell("forward", unit.name, frame.start)
            if frame.units:
                output = _with_copies(output, self._is_weight_view)
            self.scopes.pop_hooks(frame.hooks)
            if watches:
                self._watch_backward(module, units, args, kwargs, output)
        finally:
            let_go((*frame.units, *frame.looked_at), frame.used_outside)
        if self._pass.frames and self._pass.frames[-1].looked_at:
            looked_at = self._pass.frames[-1].looked_at
            for unit in (unit for unit in frame.units if unit in looked_at):
                looked_at.remove(unit)
                self.job.prefetcher.unhold(unit)
        if not self._pass.frames:
            if output is not None:  # a forward that failed uses no gather; recovery drops them
                self.job.collectives.wait_for_ordered()
            for listener in self.job.events.pass_ended:
                listener(module, (t for t in _tensors(output) if type(t) not in LAZY))
            for hook in self.reorder_hooks:
                hook()
            if not torch.is_grad_enabled():
                self.job.prefetcher.release_idle()
        return output

    def look_at(self, units: list[ParamUnit]) -> None:
        """Holds ``units``, whose weights the running forward inspects before it calls their own
        module, until that module's forward ends."""
        for unit in units:
            self.job.prefetcher.hold(unit)
            self._pass.frames[-1].looked_at.append(unit)

    def _is_weight_view(self, tensor: torch.Tensor) -> bool:
        if (
            tensor.layout is not torch.strided
            or type(tensor) in OPAQUE
            or handle_of(tensor) is not None
        ):
            return False
        return self.job.storages.find(local_of(tensor)) is not None

    def holds(self, unit: ParamUnit) -> bool:
        """Tells whether a running forward holds ``unit``."""
        return any(unit in frame.units or unit in frame.used_outside for frame in self._pass.frames)

    @contextmanager
    def using(self, handles: Sequence[ParamHandle], *, writes: bool) -> Iterator[None]:
        """Holds the units of parameters that one operation uses outside of their owners, in a block
        that runs it. ``writes``: it may change them."""
        held: list[ParamUnit] = []
        in_backward = current_task() != -1
        try:
            with self.job.store.guard:
                for handle in handles:
                    if (rows := handle.unit.arrival.rows) is not None:
                        rows.want_touched(handle.param)
                units = list(dict.fromkeys(handle.unit for handle in handles))
                moved = [unit for unit in units if not unit.computes_at_home]
                if len(moved) > 1:  # all at once: the error of one would not name them
                    self.job.prefetcher.refuse_over(moved, sum(u.weight_nbytes for u in moved))
                for unit in units:
                    if self.holds(unit):
                        self.job.prefetcher.complete(unit)
                        continue
                    if in_backward:
                        self.backward.hold(unit)
                    self.job.prefetcher.hold(unit, backward=in_backward, shows=False)
                    held.append(unit)
            for handle in handles if writes else ():
                handle.unit.watch(handle.param, own_bytes(handle.param))
            yield
        finally:
            self.job.prefetcher.unhold_all((), held)

    @contextmanager
    def running_again(self, units: Sequence[ParamUnit]) -> Iterator[None]:
        """Holds ``units`` in a block of the backward that runs their owner's forward again, and
        until their gradients have landed."""
        held: list[ParamUnit] = []
        try:
            for unit in units:
                self.backward.hold(unit)
                self.backward.gather(unit)
                held.append(unit)
            yield
        finally:
            self.job.prefetcher.unhold_all(held)

    def hold_for_frame(self, unit: ParamUnit) -> None:
        """Holds a unit until the outermost forward (or the backward) ends: an operation outside of
        its owners has given its memory away."""
        if current_task() != -1:
            self.backward.hold(unit)
        elif unit not in (*self._pass.frames[0].units, *self._pass.frames[0].used_outside):
            self.job.prefetcher.hold(unit, shows=False)
            self._pass.frames[0].used_outside.append(unit)

    @makes_hooks
    def _watch_backward(
        self,
        module: torch.nn.Module,
        units: Sequence[ParamUnit],
        args: tuple,
        kwargs: dict,
        output: Any,
    ) -> None:
        """Hooks tensors so that the backward holds ``units`` of ``module`` when it reaches them,
        and releases the frozen ones when it leaves them."""
        me = weakref.ref(self.backward)
        chosen, hook = tuple((rows, rows.there) for rows in _rows_of(units)), None
        is_leaf = next(module.children(), None) is None
        if units and (not is_leaf or (self._saves_weights and not self._casts)):
            # A checkpoint inside this forward hides the saved weights from our hooks. References
            # that autograd saves to the weights of a leaf module have their own unpack hook, an
            # embedding's are never needed, and of others autocast's copies are.
            # Defaults, not cells: fewer objects for the garbage collector, in each forward.
            def arrive(_grad: torch.Tensor, me=me, chosen=chosen, units=units) -> None:
                if backward := me():
                    for rows, there in chosen:
                        rows.want(there)
                    for unit in units:
                        backward.hold(unit)

            hook = arrive
        elif units and self._casts:
            dtype = torch.get_autocast_dtype(self.job.device.where.type)

            def expect(_grad: torch.Tensor) -> None:
                if backward := me():
                    for unit in units:
                        backward.expect_cast(unit, dtype)

            hook = expect
        for tensor in _computed(output if hook else None):
            tensor.register_hook(hook)
        frozen = [
            unit
            for unit in units
            if not any(p.requires_grad for flat in unit.flat_params for p in flat.params)
        ]
        if frozen:

            def depart(_grad: torch.Tensor) -> None:
                if backward := me():
                    for unit in frozen:
                        backward.unhold(unit)

            # With several inputs, a unit still needed after the first input's gradient is held
            # again when it is used. Leaf tensors get no hook: they outlive the graph, so hooks
            # would accumulate on them, and their gradients come last.
            for tensor in _computed((args, kwargs)):
                tensor.register_hook(depart)

    # --- saved tensors ---

    def saving_tensors(self) -> AbstractContextManager:
        """Returns a block that saves weights as references to their units."""
        return self.scopes.scope(*self._saving_hooks())

    def _saving_hooks(self) -> tuple[Callable, Callable]:
        hooks = self._lone_hooks
        if outer := top_hooks(True):
            hooks = saving_hooks(outer, self.job.storages, weakref.ref(self.backward))
        for listener in self.job.events.packing:
            hooks = listener(hooks)
        return hooks


def _rows_of(units: Iterable[ParamUnit]) -> list[ChosenRows]:
    return [unit.arrival.rows for unit in units if unit.arrival.rows is not None]


def _computed(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in ``value`` that may get a hook: those that are freed with their graph. A
    leaf (a parameter, or a user's tensor) stays, and would gather one more hook with each forward.

    The gradient of unused logits still reaches the hidden states that they are computed from.
    """
    return (tensor for tensor in _tensors(value) if type(tensor) not in LAZY and not tensor.is_leaf)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors inside nested containers, dataclasses and simple objects (caches, model
    outputs)."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, (list, tuple, set)):
            pending += item
        elif is_dataclass(item) and not isinstance(item, type):
            pending += vars(item).values() if hasattr(item, "__dict__") else []


def _with_copies(value: Any, is_copied: Callable[[torch.Tensor], Any]) -> Any:
    """Returns ``value``, with copies of the tensors inside for which ``is_copied`` says so."""
    if not any(map(is_copied, _tensors(value))):
        return value
    return tree_map_only(torch.Tensor, lambda t: t.clone() if is_copied(t) else t, value)


def _tell_of_autocast(job: Job) -> None:
    """Tells what copies of weights autocast keeps until the backward, beside the plan."""
    dtype = torch.get_autocast_dtype(job.device.where.type)
    flats = flat_params_of(job.units)
    copies = sum(flat.layout.numel for flat in flats if flat.spec.dtype is torch.float32)
    if (nbytes := copies * dtype.itemsize) >= WORTH_TELLING_NBYTES:
        name = str(dtype).removeprefix("torch.")
        logger.warning(
            "autocast makes a %s copy of each fp32 weight that it multiplies by, and keeps it for"
            " the backward: up to %s on %s beside the plan. Weights in %s need none, and have fp32"
            " masters all the same: Config(param_dtype=%s)",
            name,
            format_nbytes(nbytes),
            job.device.where,
            name,
            dtype,
        )
