"""ClassStep: steps parameters by the code of their optimizer's class, one at a time.

class step   the class's own step() on one parameter: for rules that have no kernel
elements     this rank's elements of a parameter, in fp32: its master, or its weight
own state    the values of a parameter's state that have no array at home: step counts, sums of rows
             and columns. They are small, and every rank has all of them

The values come from home as copies, and the results replace them there. So an interrupted step can
be repeated: nothing at home has changed before a parameter's results are complete.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import native
from ..distributed.collectives import Collectives
from ..gradients.changes import multiply
from ..gradients.record import GradState, has_landed
from ..state.flat_layout import Placement
from ..state.flat_param import FlatParam
from ..state.handle import ParamHandle
from ..state.unit import ParamUnit
from ..storage.store import ArrayStore
from .books import OptimizerBooks, same_form
from .class_owners import ClassOwners, Inputs, Result
from .context import StepContext
from .known import Known

Group = Mapping[str, Any]


def step_as(
    optimizer: torch.optim.Optimizer,
    group: Group,
    params: Sequence[torch.nn.Parameter],
    states: Sequence[Mapping[str, Any]],
    method: str = "step",
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Steps ``params`` by their gradients as the class of ``optimizer`` does with ``group``'s
    settings. Returns their states after that, and the settings that the class has changed. Changes
    none of the user's objects. ``method``: of the class, in place of ``step``."""
    kind = type(optimizer)
    other = kind.__new__(kind)
    for name, value in vars(optimizer).items():
        if name not in ("step", "state", "param_groups"):
            is_kept = not isinstance(value, (list, dict, set))
            other.__dict__[name] = value if is_kept else copy.copy(value)
    other._optimizer_step_pre_hooks = OrderedDict()
    other._optimizer_step_post_hooks = OrderedDict()
    other.state = defaultdict(dict)
    other.state.update({param: dict(state) for param, state in zip(params, states) if state})
    settings = {key: value for key, value in group.items() if key != "params"}
    other.param_groups = [copy.deepcopy(settings) | {"params": list(params)}]
    getattr(other, method)()
    changed = {
        key: value
        for key, value in other.param_groups[0].items()
        if key != "params" and not (key in settings and _equal(value, settings[key]))
    }
    return [dict(other.state.get(param, {})) for param in params], changed


def class_step(
    optimizer: torch.optim.Optimizer,
    group: Group,
    param: torch.nn.Parameter,
    state: Mapping[str, Any],
    method: str = "step",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps one parameter as :func:`step_as` does. Returns its state, and the changed settings."""
    (found,), changed = step_as(optimizer, group, [param], [state], method)
    return found, changed


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return same_form(one, other) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


@dataclass(eq=False)
class ClassStep:
    """The step of one flat param, a parameter at a time."""

    flat_param: FlatParam
    version: int  # of the weights after it
    landed: list[tuple[ParamHandle, int]]  # whose gradients are applied, and the new step counts
    after: list[native.Ticket]  # the gradients' ways home
    clip: float
    shadow = None  # none is made
    results: list[Result] = field(default_factory=list)  # of the next parameters of `landed`
    done: int = 0


class ClassStepper:
    """Steps units by the class of the optimizer that was ``given``. Has the interface of
    :class:`.stepper.Stepper`, and is used from the same thread.

    ``group_of``: the parameters to step, each with the index of its group.
    """

    def __init__(
        self,
        context: StepContext,
        known: Known,
        groups: list[dict[str, Any]],
        group_of: Mapping[ParamHandle, int],
        given: torch.optim.Optimizer,
        books: OptimizerBooks,
        changed: dict[int, dict[str, Any]],
        method: str = "step",
    ):
        """``changed``: filled with the settings that the class changes, by group. They are set when
        all parameters are stepped. ``method``: of the class."""
        self._context, self._known, self._groups = context, known, groups
        self._group_of, self._given, self._books = group_of, given, books
        self._changed, self._method = changed, method
        self._moments = books.homes.moments
        self._owners: dict[Collectives, ClassOwners] = {}

    def plan(self, unit: ParamUnit, version: int, clip: float = 1.0) -> list[ClassStep]:
        """Plans the step of ``unit``. Sends landed gradients home, and changes nothing else."""
        context, steps = self._context, []
        planned = [flat for flat in unit.flat_params if context.steps_flat_param(flat)]
        landed = {flat: [h for h in flat.handles if self._is_stepped(h)] for flat in planned}
        if not any(landed.values()):
            return []
        context.release([unit])
        if context.steps.streaming:
            context.gradients.assigned.settle_early(unit.handles)
        for flat_param, handles in landed.items():
            if handles:
                flat_param.homes.wait_running()
                after = context.gradients.homes.close_flat_param(flat_param)
                numbers = [(handle, handle.step + 1) for handle in handles]
                steps.append(ClassStep(flat_param, version, numbers, after, clip))
        return steps

    def plan_switch(self, unit: ParamUnit) -> list[ClassStep]:
        """Plans a method that needs no gradient, of all parameters of ``unit``."""
        context = self._context
        context.release([unit])
        of_flat_params = {
            flat: [handle for handle in flat.handles if handle in self._group_of]
            for flat in unit.flat_params
        }
        return [
            ClassStep(flat, context.steps.index, [(each, each.step) for each in handles], [], 1.0)
            for flat, handles in of_flat_params.items()
        ]

    def shadow(self, unit: ParamUnit) -> int:
        """Makes no update ahead."""
        return 0

    @torch.no_grad()
    def carry_out(self, steps: list[ClassStep]) -> None:
        """Runs the planned ``steps``. After an interrupt it can be called again, and does the
        rest."""
        for step in steps:
            for ticket in step.after:
                ticket.wait()
            while step.done < len(step.landed):
                step.results = step.results or self._next(step)
                for (handle, number), result in zip(step.landed[step.done :], step.results):
                    self._write(step, handle, result)
                    handle.step = number
                    handle.changed()
                    if self._method == "step":
                        handle.grad.move(GradState.CONSUMED)
                step.done, step.results = step.done + len(step.results), []

    def finish(self) -> None:
        """Sets what the class has changed in the groups. It changes them, too, if no parameter of
        theirs has a gradient. Idempotent."""
        for index, group in enumerate(self._groups):
            if index not in self._changed:
                idle = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
                _, self._changed[index] = class_step(self._given, group, idle, {}, self._method)
        for index, changed in self._changed.items():
            self._groups[index].update(changed)

    def _is_stepped(self, handle: ParamHandle) -> bool:
        return has_landed(handle) and handle in self._group_of

    def _next(self, step: ClassStep) -> list[Result]:
        """Computes the values of the next parameters after their step: of one, or of a round of
        their owners."""
        ranks = step.flat_param.ranks
        shared = self._known.needs_whole and ranks.size > 1
        following = step.landed[step.done : step.done + (ranks.size if shared else 1)]
        handles = [handle for handle, _ in following]
        inputs = [self._inputs(step, handle) for handle in handles]
        if shared:
            owners = self._owners.setdefault(
                step.flat_param.collectives, ClassOwners(step.flat_param.collectives)
            )
            return owners.step(handles, inputs, self._step)
        return [self._step(handle, inputs[0]) for handle in handles]

    def _inputs(self, step: ClassStep, handle: ParamHandle) -> Inputs:
        """Reads this rank's elements of a parameter, its gradient if it is stepped, and its
        moments."""
        flat_param, index, store = handle.flat_param, handle.index, self._context.store
        with store.guarding():
            flat_param.homes.wait_running()
            begin, end = flat_param.layout.shard_part(index)
            first, _ = flat_param.layout.own("grad")
            grad = torch.zeros(end - begin, device="cpu")
            if self._method == "step":
                grad = store.read(flat_param.arrays["grad"], begin - first, end - first)
            factors = (*handle.grad.factors, *(() if step.clip == 1.0 else (step.clip,)))
            arrays = self._moments.values() if handle.has_state else ()
            return [
                _elements(flat_param, store, index),
                multiply(grad, factors).float(),
                *(flat_param.parts.read_own(store, array, index).float() for array in arrays),
            ]

    def _step(self, handle: ParamHandle, inputs: Inputs) -> Result:
        """Computes the values of a parameter, or of this rank's elements of it, after its step."""
        place = handle.flat_param.layout.placements[handle.index]
        device = self._context.device.where

        def there(flat: torch.Tensor) -> torch.Tensor:
            """Brings elements to the device, in the parameter's shape if they are all of it."""
            value, is_whole = flat.to(device), len(flat) == place.numel
            return value.as_strided(place.shape, place.stride) if is_whole else value

        param = torch.nn.Parameter(there(inputs[0]))
        param.grad = there(inputs[1])
        state: dict[str, Any] = dict(zip(self._moments, map(there, inputs[2:])))
        if handle.has_state or not self._moments:
            own = self._books.own_of(handle.param).items()
            state |= {name: _moved(copy.deepcopy(value), device) for name, value in own}
        group = self._groups[self._group_of[handle]]
        found, changed = class_step(self._given, group, param, state, self._method)
        moments = {
            array: _flat(found.pop(name), place)
            for name, array in self._moments.items()
            if name in found
        }
        rest = {name: _moved(value, torch.device("cpu")) for name, value in found.items()}
        return Result(_flat(param, place), moments, rest, changed)

    def _write(self, step: ClassStep, handle: ParamHandle, result: Result) -> None:
        """Sends the values of a parameter home. Idempotent."""
        flat_param, store = handle.flat_param, self._context.store
        with store.guarding():
            first, _ = flat_param.layout.own_part("weight", handle.index)
            flat_param.homes.wait_idle()
            flat_param.write_elements(store, first, result.elements, version=step.version)
            for array, values in result.moments.items():
                begin, end = flat_param.layout.part_at_home(array, handle.index)
                if begin < end:
                    home = flat_param.arrays[array]
                    store.write(home, begin, values.to(home.dtype), version=step.version)
        self._books.put_own(handle.param, result.own)
        self._changed[self._group_of[handle]] = result.changed


def _elements(flat_param: FlatParam, store: ArrayStore, index: int) -> torch.Tensor:
    """Reads this rank's elements of a parameter, from the master if there is one."""
    weight = flat_param.parts.read_own(store, "weight", index)
    if flat_param.spec.master == native.Master.OWN:
        return weight.float()
    master = flat_param.parts.read_own(store, "master", index)
    is_split = flat_param.spec.master == native.Master.SPLIT
    return native.join_master(weight, master) if is_split else master


def _moved(value: Any, device: torch.device) -> Any:
    """Moves a value of the own state. Counts stay: classes keep them on the CPU."""
    is_sum = isinstance(value, torch.Tensor) and value.dim() > 0
    return value.to(device) if is_sum else value


def _flat(value: torch.Tensor, place: Placement) -> torch.Tensor:
    """Returns elements, flat, on the CPU, in the order in which they are at home."""
    value = value.detach().cpu()
    if value.shape != place.shape:
        return value  # a part of them
    flat = torch.empty(place.numel, dtype=value.dtype, device="cpu")
    flat.as_strided(place.shape, place.stride).copy_(value)
    return flat
