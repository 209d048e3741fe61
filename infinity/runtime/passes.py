"""Passes: holds units while a forward or a backward of the model needs them.

owner       a module whose forward needs a unit: it holds some of its parameters
frame       one running forward of an owner (or of the root), with the units it holds
task        one run of autograd; a reentrant checkpoint nests them. It has a token, which only autograd holds: a task whose token
            is gone without its end having been told was cut short

Forward holds a unit from its owner's pre-hook to its post-hook. Backward holds it from the first time a tensor saved
from it is asked for (or a gradient reaches its owner's output) until all its gradients have landed, and what is held
at the end of the outermost task is let go: unused parameters get no gradient, and nothing else would tell.

With slices on several ranks, all of them must gather the same units in the same order, whatever gradients each gets. So
a unit is then held until the backward has come two units further, and not until its gradients have landed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_map_only

from ..forwards.lazy_logits import Logits
from ..gradients.record import GradState
from ..state.dtensors import is_distributed, local_of, part_of
from ..state.handle import ParamHandle, handle_of, raw_grad, set_raw_grad
from ..state.unit import ParamUnit
from .saved_weights import OPAQUE, is_checkpoint, saving_hooks

if TYPE_CHECKING:
    from .engine import Engine
    from .hooks import LandingHook


@dataclass(eq=False)
class Frame:
    """One running forward."""

    module: torch.nn.Module
    units: list[ParamUnit]
    is_recomputed: bool = False  # inside a checkpoint
    hooks: int = 0  # pairs of our saved-tensor hooks that this thread had before
    start: float = field(default_factory=time.perf_counter)


class Passes:
    """The forwards and backwards that are running."""

    def __init__(self, engine: Engine):
        self._engine = weakref.ref(engine)  # the engine holds this object
        self.scopes = engine.scopes
        self.frames: list[Frame] = []
        self.awaited: dict[ParamUnit, set[ParamHandle]] = {}  # held by the backward; least recently used first
        self.expected: dict[ParamUnit, set[ParamHandle]] = {}  # in lockstep: what a unit still has to get, held or not
        self._since: dict[ParamUnit, float] = {}  # when the backward came to each of those
        self.tasks: dict[int, weakref.ref] = {}  # that are running, with their tokens
        self.landing_hooks: list[LandingHook] = []  # that are to run after every other, which a forward may have registered
        self.reached: set[ParamUnit] = set()  # units that got a gradient in this backward

    @property
    def engine(self) -> Engine:
        return self._engine()

    @property
    def in_lockstep(self) -> bool:
        """Whether other ranks gather with this one in mid-backward."""
        return self.engine.reducer is not None and self.engine.reducer.waits_elsewhere

    @property
    def computing(self) -> bool:
        """Whether a forward or backward of the model is running."""
        return bool(self.frames) or torch._C._current_graph_task_id() != -1

    @property
    def is_recomputed(self) -> bool:
        """Whether what runs now runs a second time in the backward, or this is that time: it then has to be the same."""
        if torch._C._current_graph_task_id() != -1 or (self.frames and self.frames[-1].is_recomputed):
            return True
        return is_checkpoint(torch._C._autograd._top_saved_tensors_default_hooks(True))

    # --- forward ---

    def enter(self, module: torch.nn.Module, units: list[ParamUnit], *, is_root: bool) -> None:
        """Begins a forward of ``module``."""
        self.engine.store.check_process()
        in_backward = torch._C._current_graph_task_id() != -1
        if not self.frames and not in_backward and is_root:
            self.engine.begin_pass(training=torch.is_grad_enabled())
        # Before anything is held: a module of unknown tensors may raise here.
        keeping = self.engine.activations if torch.is_grad_enabled() and not self.frames and not in_backward else None
        foreign = self._foreign_storages(module) if keeping is not None else set()
        held: list[ParamUnit] = []
        try:
            with self.engine.store.guarding():
                for unit in units:
                    least = self._hold(unit, backward=in_backward)
                    held.append(unit)
                    if in_backward and self.engine.reducer is not None:
                        self.engine.reducer.start_offered(least)
        except BaseException:
            for unit in held:
                self.engine.prefetcher.unhold(unit)
            raise
        self.frames.append(Frame(module, held, self.is_recomputed, self.scopes.hooks))
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if keeping is not None and not is_checkpoint(outer):  # what is computed again is not kept anywhere
            keeping.begin(foreign)
            self.scopes.push_hooks(*keeping.hooks(outer))
        if units and torch.is_grad_enabled():
            self.scopes.push_hooks(*self._saving_hooks())

    @staticmethod
    def _foreign_storages(module: torch.nn.Module) -> set[int]:
        """Storages of what the module keeps itself: buffers, and parameters that the engine does not move."""
        own = [*module.buffers(), *(param for param in module.parameters() if handle_of(param) is None)]
        return {local_of(tensor).untyped_storage()._cdata for tensor in own if tensor.layout is torch.strided}

    def leave(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Ends the forward of ``module``, with an output or with an exception (then the output is None).

        Returns the output, with copies of what in it was a view of a weight: the weight may be gone before it is used.
        """
        if all(frame.module is not module for frame in self.frames):
            return output  # its pre-hook failed before it entered
        if self.frames[0].module is module and any(handle_of(tensor) is not None for tensor in _tensors(output)):
            # A parameter itself: what comes home after this frame could not be used in a loss.
            output = tree_map_only(torch.Tensor, lambda t: t.clone() if handle_of(t) is not None else t, output)
        while (frame := self.frames.pop()).module is not module:  # one that an exception ended, of which torch told no hook
            self._unhold(frame)
        for unit in frame.units:
            self.engine.traffic.mark("forward", unit.name, frame.start)
        if frame.units and any(self._is_weight_view(tensor) for tensor in _tensors(output)):
            output = tree_map_only(torch.Tensor, lambda t: t.clone() if self._is_weight_view(t) else t, output)
        self.scopes.pop_hooks(frame.hooks)
        if torch.is_grad_enabled() and output is not None:
            self._watch_backward(frame, args, kwargs, output)
        self._unhold(frame)
        if not self.frames:
            for hook in self.landing_hooks:
                hook.come_last()
            if not torch.is_grad_enabled():
                self.engine.release_idle()
        return output

    def _hold(self, unit: ParamUnit, *, backward: bool) -> int | None:
        """Holds ``unit``. Returns how many reductions all ranks could start, where they met for its gather."""
        reducer = self.engine.reducer if backward else None
        return self.engine.prefetcher.hold(unit, backward=backward, offered=reducer.offered if reducer is not None else 0)

    def _unhold(self, frame: Frame) -> None:
        for unit in frame.units:
            self.engine.prefetcher.unhold(unit)

    def _is_weight_view(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or type(tensor) in OPAQUE or handle_of(tensor) is not None:
            return False
        return local_of(tensor).untyped_storage()._cdata in self.engine.storages

    def hold_for_frame(self, unit: ParamUnit) -> None:
        """Holds a unit that is used outside its owners, until the outermost forward (or the backward) ends."""
        if torch._C._current_graph_task_id() != -1:
            self.hold_for_backward(unit)
        elif unit not in self.frames[0].units:
            self.engine.prefetcher.hold(unit)
            self.frames[0].units.append(unit)

    def _watch_backward(self, frame: Frame, args: tuple, kwargs: dict, output: Any) -> None:
        """Has the backward tell when it reaches ``frame``'s units, and for frozen ones when it leaves them."""
        me = weakref.ref(self)
        units = frame.units
        if not self.frames and any(tensor.grad_fn is not None for tensor in _tensors((args, kwargs))):

            def come_from_another(_grad: torch.Tensor) -> None:
                if passes := me():
                    passes.join_task()  # whose end takes the mark back, whether any gradient lands or not
                    passes.engine.gradients.add_to_consumed()

            for tensor in _tensors(output):
                if type(tensor) is not Logits and tensor.requires_grad:
                    tensor.register_hook(come_from_another)
        if units and next(frame.module.children(), None) is not None:
            # Only for modules with children: a checkpoint inside this forward saves weights out of our sight. What
            # autograd saves of a leaf's own weights says itself when it is needed (an embedding's never is).
            def arrive(_grad: torch.Tensor) -> None:
                if passes := me():
                    for unit in units:
                        passes.hold_for_backward(unit)

            for tensor in _tensors(output):
                # The gradient of logits that nobody asked for reaches the hidden states they are made of.
                if type(tensor) is not Logits and tensor.requires_grad:
                    tensor.register_hook(arrive)
        frozen = [unit for unit in units if not any(p.requires_grad for shard in unit.shards for p in shard.params)]
        inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad and handle_of(t) is None] if frozen else []
        if inputs:

            def depart(_grads: Any) -> None:
                if passes := me():
                    for unit in frozen:
                        passes.let_go(unit)

            register_multi_grad_hook(inputs, depart, mode="all")

    # --- what autograd saves ---

    def saving(self) -> AbstractContextManager:
        """Has weights saved inside the block saved as references to their units."""
        return self.scopes.scope(*self._saving_hooks())

    def _saving_hooks(self) -> tuple[Callable, Callable]:
        me = weakref.ref(self)

        def hold(unit: ParamUnit) -> None:
            if passes := me():
                passes.hold_for_backward(unit)

        return saving_hooks(self.engine.storages, hold)

    # --- backward ---

    def hold_for_backward(self, unit: ParamUnit) -> None:
        """Holds ``unit``, which the running backward needs."""
        self.engine.check_open()
        self.join_task()
        if unit in self.awaited:
            self.awaited[unit] = self.awaited.pop(unit)  # the last one used
            return
        if self.in_lockstep:
            for other in list(self.awaited)[:-1]:
                self.let_go(other)
        trained = zip(unit.handles, (param for shard in unit.shards for param in shard.params))
        expected = {h for h, p in trained if h.grad is not None and p.requires_grad} - self.engine.without_grad.get(unit, set())
        with self.engine.store.guarding():
            least = self._hold(unit, backward=True)
            if self.engine.reducer is not None:
                self.engine.reducer.come_to_unit(least)
        self.awaited[unit] = expected
        if self.in_lockstep:
            self.expected.setdefault(unit, expected)
        self._since[unit] = time.perf_counter()

    def landed(self, param: torch.Tensor) -> None:
        """Sends home a gradient that autograd accumulated in ``param``."""
        handle = handle_of(param)
        grad = raw_grad(param)  # before anything is put right: this one is of the backward that runs
        self.join_task()
        if grad is None:
            return  # of a weight that runs in tiles: it has landed
        self.engine.gradients.changes.begin(handle)
        if is_distributed(grad):
            grad = part_of(param, grad, f"the gradient of {handle.name}")  # partial sums over the mesh are added
        set_raw_grad(param, None)
        with self.engine.store.guarding():
            self.engine.gradients.land(handle, grad)
        self.reached.add(handle.unit)
        self.engine.without_grad.get(handle.unit, set()).discard(handle)
        awaited = (self.expected if self.in_lockstep else self.awaited).get(handle.unit)
        if awaited is not None:
            awaited.discard(handle)
            if not awaited:
                if not self.in_lockstep:
                    self.let_go(handle.unit)
                if self.engine.reducer is not None:
                    self.engine.reducer.ready(handle.unit)
                elif not self.engine.joined.is_open:
                    self.engine.tell_landed(handle.unit)

    def land_by_hand(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Sends home a gradient that was computed without being accumulated, between the backwards of a joined pass."""
        handle = handle_of(param)
        self.engine.gradients.changes.begin(handle)
        with self.engine.store.guarding():
            self.engine.gradients.land(handle, part_of(param, grad, f"the gradient of {handle.name}"))
        self.engine.without_grad.get(handle.unit, set()).discard(handle)
        self.engine.joined.note_backward()

    def landed_at_home(self, unit: ParamUnit) -> None:
        """Tells the listeners that ``unit``'s gradients have landed for good: averages over all ranks, or sums of a joined pass."""
        landed = any(handle.grad.state is GradState.LANDED for handle in unit.handles if handle.grad)
        if landed and not self.engine.prefetcher.is_held(unit):
            self.engine.tell_landed(unit)

    def let_go(self, unit: ParamUnit) -> None:
        """Lets ``unit`` go, with which the backward is done."""
        if unit in self.awaited:
            del self.awaited[unit]
            self.engine.traffic.mark("backward", unit.name, self._since.pop(unit))
            self.engine.prefetcher.unhold(unit)
            self.engine.gradients.homes.close_all(unit.shards)

    def give_way(self) -> bool:
        """Lets the unit go that the backward has not used for longest: the device window is full.

        It comes back when it is needed after all. What waits that long is mostly a unit with a parameter that gets no
        gradient, or a tied one whose other use is yet to come. False when there is none.
        """
        for unit in self.awaited:
            if not any(unit in frame.units for frame in self.frames):
                self.let_go(unit)
                return True
        return False

    def join_task(self) -> None:
        """Asks autograd to call when the task that is running ends."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self.tasks:
            return
        if not self.scopes.running and all(token() is None for token in self.tasks.values()):
            self.engine.recover()  # from what came before: this is the outermost task
        me = weakref.ref(self)

        def end() -> None:
            if passes := me():
                passes._leave_task(task)

        token = partial(int)  # of C, so that no frame of a traceback refers to it
        self.tasks[task] = weakref.ref(token)
        for callback in (token, end):
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _leave_task(self, task: int) -> None:
        for nested in [other for other, token in self.tasks.items() if other != task and token() is None]:
            del self.tasks[nested]  # it failed inside this one, which went on all the same
        if len(self.tasks) == 1:
            self.sweep()
            # Everything is as it should be. A checkpoint ends its recomputations by an exception, say.
            self.scopes.interrupted = False
        del self.tasks[task]

    @property
    def is_cut_short(self) -> bool:
        """Whether a backward or forward was left by an exception. Asked where none is running."""
        return bool(self.tasks or self.frames)

    def sweep(self) -> None:
        """Lets go of what is still held as the outermost backward ends: it got no gradient for some of its parameters."""
        for unit, missing in (self.awaited | self.expected).items():
            if unit in self.reached:  # else this was torch.autograd.grad, which accumulates nothing
                self.engine.without_grad[unit] = self.engine.without_grad.get(unit, set()) | missing
        for unit in list(self.awaited):
            self.let_go(unit)
        self.expected.clear()
        self.reached.clear()
        self.engine.end_backward()

    def rebuild(self) -> None:
        """Forgets whatever an exception left of what was running. Only while nothing is running."""
        self.frames, self.awaited, self.expected, self._since = [], {}, {}, {}
        self.tasks, self.reached = {}, set()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors inside nested containers, dataclasses and simple objects (caches, model outputs)."""
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
