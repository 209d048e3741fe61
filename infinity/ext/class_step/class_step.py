"""ClassStep: steps parameters by the code of their optimizer's class, one at a time.

class step   the class's own step() on one parameter: for rules that have no kernel
piece        consecutive elements of a parameter, if the class may step any part of it
elements     this rank's elements of a parameter, in fp32: its master, or its weight
own state    the values of a parameter's state that have no array at home: step counts, sums of rows
             and columns. They are small, and every rank has all of them

The values come from home as copies, and the results replace them there. So an interrupted step can
be repeated: nothing at home has changed before a parameter's results are complete.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from ... import native
from ...core.grads.changes import multiply
from ...core.grads.record import GradState, has_landed
from ...core.params.books import OptimizerBooks
from ...core.step.context import StepContext
from ...core.step.known import Known
from ...core.units.flat_layout import Placement
from ...core.units.handle import ParamHandle
from ...core.units.unit import ParamUnit
from ...errors import UsageError
from .class_code import Group, class_step
from .class_ranks import ClassRanks, Inputs, Result, stepping_ranks
from .matrices import FLAT, SPLIT, matrix_step, multiplications
from .measured import Sums
from .segments import Buffers, Segment, segments_of


@dataclass(eq=False)
class ClassStep:
    """The step of one flat param. ``clip``: the factor of all gradients; ``after``: their ways
    home; ``version``: of the weights after it."""

    segments: list[Segment]
    clip: float
    after: list[native.Ticket]
    version: int

    def __post_init__(self) -> None:
        for segment in self.segments:
            segment.step = self


class ClassStepper:
    """Steps units by the class of the optimizer that was ``given``. Has the interface of
    :class:`.stepper.Stepper`, and is used from the same thread.

    ``group_index_of``: the parameters to step, each with the index of its group.
    """

    def __init__(
        self,
        context: StepContext,
        known: Known,
        groups: list[dict[str, Any]],
        group_index_of: Mapping[ParamHandle, int],
        given: torch.optim.Optimizer,
        books: OptimizerBooks,
        changed: dict[int, dict[str, Any]],
        method: str = "step",
    ):
        """``changed``: filled with the settings that the class changes, by group. They are set when
        all parameters are stepped. ``method``: of the class."""
        self._context, self._known, self._groups = context, known, groups
        self._group_index_of, self._given, self._books = group_index_of, given, books
        self._changed, self._method = changed, method
        self._moments = books.at_home.moments
        measures = known.measured is not None and method == "step"
        self._measured = known.measured(groups) if measures else None
        self._under_way: list[Future] = []
        self._buffers, self._writes = Buffers(), False

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
                numbers = [handle.step + 1 for handle in handles]
                segments = segments_of(handles, numbers, self._known.needs.numel)
                steps.append(ClassStep(list(segments), clip, after, version))
        return steps

    def plan_switch(self, unit: ParamUnit) -> list[ClassStep]:
        """Plans a method that needs no gradient, of all parameters of ``unit``."""
        self._context.release([unit])
        steps, index = [], self._context.steps.index
        for flat_param in unit.flat_params:
            handles = [handle for handle in flat_param.handles if handle in self._group_index_of]
            segments = segments_of(
                handles, [each.step for each in handles], self._known.needs.numel
            )
            steps.append(ClassStep(list(segments), 1.0, [], index))
        return steps

    @torch.no_grad()
    def carry_out(self, steps: list[ClassStep]) -> None:
        """Runs the planned ``steps``. After an interrupt it can be called again, and does the
        rest. While one segment is stepped, a thread reads the next and writes the last one."""
        wait(self._under_way)  # of an interrupted call
        self._choose_ranks([segment for step in steps for segment in step.segments])
        if self._measured is not None and not self._measured.is_settled:
            self._measure([segment for step in steps for segment in step.segments])
        left = [segment for step in steps for segment in step.segments if not segment.is_done]
        with ThreadPoolExecutor(1, "infinity class step") as thread:

            def start(task: Callable[[Segment], Any], segment: Segment) -> Future:
                self._under_way.append(future := thread.submit(task, segment))
                return future

            coming = [start(self._read, segment) for segment in left[:1]]
            leaving: tuple[Segment, Future] | None = None
            for number, segment in enumerate(left):
                inputs = coming.pop().result()
                coming += [start(self._read, each) for each in left[number + 1 : number + 2]]
                if segment.results is None:
                    segment.results = self._results(segment, inputs)
                self._end(leaving)
                leaving = segment, start(self._write, segment)
            self._end(leaving)
        self._under_way.clear()
        self._buffers.clear()

    def _choose_ranks(self, segments: Sequence[Segment]) -> None:
        """Chooses the stepping ranks of ``segments``, if ranks share whole parameters. Idempotent,
        so that an interrupted rank chooses as the others."""
        by_size: dict[int, list[Segment]] = {}
        for segment in segments if self._known.whole else ():
            by_size.setdefault(segment.handles[0].flat_param.ranks.size, []).append(segment)
        for size, shared in by_size.items():
            chosen = stepping_ranks([segment.handles for segment in shared], size, self._cost)
            for segment, ranks in zip(shared, chosen):
                segment.ranks = ranks

    def _cost(self, handle: ParamHandle) -> int:
        """Estimates the cost of a parameter's step."""
        shape = handle.flat_param.layout.placements[handle.index].shape
        group = self._groups[self._group_index_of[handle]]
        if self._known.splits:
            return multiplications(shape, group.get(SPLIT))
        is_flat = group.get("use_muon") and len(shape) > 1  # of another library
        return multiplications(shape, FLAT) if is_flat else shape.numel()

    def _measure(self, segments: Sequence[Segment]) -> None:
        """Takes the sums of all parameters. Changes nothing at home. Raises UsageError on pipeline
        stages, each of which has only a part of them."""
        if self._context.collectives.ranks.pp_group is not None:
            raise UsageError(
                f"{self._known.name} on pipeline stages: its step needs sums over all parameters,"
                " and a stage has its own. Choose another optimizer."
            )
        params = [param for group in self._groups for param in group["params"]]
        places = {param: place for place, param in enumerate(params)}
        sums: dict[int, Sums] = {}
        for segment in segments:
            for handle, result in zip(segment.handles, self._results(segment, self._read(segment))):
                sums[places[handle.param]] = self._measured.sums_of(result.changed)
            self._buffers.give(segment.buffers)
        self._measured.settle(sums[place] for place in sorted(sums))

    def _settings(self, index: int) -> Group:
        """Returns the settings by which a parameter of a group is stepped."""
        if self._measured is None:
            return self._groups[index]
        if self._measured.is_settled:
            return self._measured.stepping(index)
        return self._measured.measuring(index)

    def _end(self, leaving: tuple[Segment, Future] | None) -> None:
        """Enters a segment into the books when it is written. Idempotent."""
        if leaving is None:
            return
        segment, written = leaving
        written.result()
        stepped = zip(segment.handles, segment.numbers, segment.results) if segment.is_last else ()
        for handle, number, result in stepped:
            self._books.put_own(handle.param, result.own)
            self._changed[self._group_index_of[handle]] = result.changed
            handle.step = number
            handle.changed()
            if self._method == "step":
                handle.grad.move(GradState.CONSUMED)
        segment.is_done, segment.results = True, None
        self._buffers.give(segment.buffers)  # not before: its results may be in them

    @property
    def _first(self) -> Group | None:
        """The first group, which some classes look at; None if the measured settings have it."""
        return self._groups[0] if self._measured is None else None

    @property
    def has_changed_nothing(self) -> bool:
        """Whether no write has begun."""
        return not self._writes

    def try_settings(self) -> None:
        """Runs the class on parameters without gradients, so that an error of its settings is
        raised before anything is planned."""
        for group in self._groups:
            self._step_idle(group)

    def _step_idle(self, group: Group) -> dict[str, Any]:
        """Steps a parameter without a gradient. Returns the settings that the class changes."""
        return class_step(self._given, group, _idle(), {}, self._method, self._first)[1]

    def finish(self) -> None:
        """Sets what the class has changed in the groups. It may also change a group without
        gradients: then it steps an idle parameter. Idempotent."""
        for index, group in enumerate(self._groups):
            if self._measured is not None:
                self._changed[index] = self._measured.changes(index)
            elif index not in self._changed:
                self._changed[index] = self._step_idle(group)
        for index, changed in self._changed.items():
            self._groups[index].update(changed)

    def _is_stepped(self, handle: ParamHandle) -> bool:
        return has_landed(handle) and handle in self._group_index_of

    def _read(self, segment: Segment) -> list[Inputs]:
        """Reads what a segment is stepped from, when its gradients are at home."""
        if segment.results is not None:
            return []
        for ticket in segment.step.after:
            ticket.wait()
        segment.buffers.clear()  # of an interrupted call
        return [self._inputs(segment, *each) for each in zip(segment.handles, segment.spans)]

    def _results(self, segment: Segment, inputs: list[Inputs]) -> list[Result]:
        """Computes the values of a segment after its step."""
        collectives = segment.handles[0].flat_param.collectives
        if self._known.whole and collectives.ranks.size > 1:
            return ClassRanks(collectives).step(segment.handles, segment.ranks, inputs, self._step)
        return [self._step(*each) for each in zip(segment.handles, inputs)]

    def _inputs(self, segment: Segment, handle: ParamHandle, span: tuple[int, int]) -> Inputs:
        """Reads a piece of a parameter, its gradient if it is stepped, and its moments."""
        flat_param, index, store = handle.flat_param, handle.index, self._context.store
        layout, numel = flat_param.layout, span[1] - span[0]

        def take() -> torch.Tensor:
            segment.buffers.append(self._buffers.take(numel))
            return segment.buffers[-1]

        def read(name: str, first: int) -> torch.Tensor:
            """Reads elements of an array from ``first`` of the parameter's on, in fp32."""
            array, begin, out = flat_param.arrays[name], first + span[0], take()
            if array.dtype == out.dtype:
                return store.read(array, begin, begin + numel, out=out)
            return out.copy_(store.read(array, begin, begin + numel))

        def elements(begin: int) -> torch.Tensor:
            """Reads elements of the parameter, from the master if there is one."""
            if flat_param.spec.master != native.Master.SPLIT:
                return read(
                    "weight" if flat_param.spec.master == native.Master.OWN else "master", begin
                )
            first, last = begin + span[0], begin + span[1]
            halves = (store.read(flat_param.arrays[n], first, last) for n in ("weight", "master"))
            return native.join_master(*halves, take())

        with store.guard:
            flat_param.homes.wait_running()
            begin, _ = layout.part_at_home("weight", index)
            inputs = [elements(begin)]
            if self._method == "step":
                grad = read("grad", layout.shard_part(index)[0] - layout.home_range("grad")[0])
                inputs.append(
                    _multiplied(grad, flat_param.spec.grad_dtype, handle, segment.step.clip)
                )
            else:
                inputs.append(take().zero_())
            arrays = self._moments_of(handle).values() if handle.has_state else ()
            return [*inputs, *(read(name, begin) for name in arrays)]

    def _moments_of(self, handle: ParamHandle) -> dict[str, str]:
        arrays = handle.flat_param.arrays
        return {name: array for name, array in self._moments.items() if array in arrays}

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
        state: dict[str, Any] = {
            name: there(value).to(self._known.kept.get(name, value.dtype))
            for name, value in zip(self._moments_of(handle), inputs[2:])
        }
        if handle.has_state or not self._moments_of(handle):
            own = self._books.own_of(handle.param).items()
            state |= {name: _moved(copy.deepcopy(value), device) for name, value in own}
        index = self._group_index_of[handle]
        if self._known.splits:
            stepped, changed = matrix_step(self._given, self._settings(index), param, state)
        else:
            stepped, changed = class_step(
                self._given, self._settings(index), param, state, self._method, self._first
            )
        if self._measured is not None and self._measured.is_settled and "k" not in changed:
            self._measured.complete(index, param, stepped)
        moments = {
            array: _flat(stepped.pop(name), place)
            for name, array in self._moments_of(handle).items()
            if name in stepped
        }
        rest = {name: _moved(value, torch.device("cpu")) for name, value in stepped.items()}
        return Result(_flat(param, place), moments, rest, changed)

    def _write(self, segment: Segment) -> None:
        """Sends the values of a segment home. Idempotent."""
        self._writes, store = True, self._context.store
        with store.guard:
            for handle, (at, end), result in zip(segment.handles, segment.spans, segment.results):
                if at == end:
                    continue
                flat_param = handle.flat_param
                flat_param.homes.wait_idle()
                first, _ = flat_param.layout.own_part("weight", handle.index)
                flat_param.write_elements(
                    store, first + at, result.elements, version=segment.step.version
                )
                begin, _ = flat_param.layout.part_at_home("weight", handle.index)
                for array, values in result.moments.items():
                    home = flat_param.arrays[array]
                    store.write(
                        home, begin + at, values.to(home.dtype), version=segment.step.version
                    )


def _idle() -> torch.nn.Parameter:
    """Makes a parameter without a gradient."""
    return torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))


def _multiplied(
    grad: torch.Tensor, dtype: torch.dtype, handle: ParamHandle, clip: float
) -> torch.Tensor:
    """Multiplies a gradient by its pending factors, each product rounded to its dtype at home."""
    factors = (*handle.grad.factors, *(() if clip == 1.0 else (clip,)))
    if not factors or dtype == torch.float32:
        return multiply(grad, factors)
    return grad.copy_(multiply(grad.to(dtype), factors))


def _moved(value: Any, device: torch.device) -> Any:
    """Copies a value of the own state to ``device``. Counts stay: classes keep them on the CPU."""
    is_sum = isinstance(value, torch.Tensor) and value.dim() > 0
    return value.to(device, copy=True) if is_sum else value


def _flat(value: torch.Tensor, place: Placement) -> torch.Tensor:
    """Returns elements, flat, on the CPU, in the order in which they are at home."""
    value = value.detach().cpu()
    if value.shape != place.shape:
        return value  # a part of them
    if value.stride() == place.stride:
        return value.as_strided((place.numel,), (1,))
    flat = torch.empty(place.numel, dtype=value.dtype, device="cpu")
    flat.as_strided(place.shape, place.stride).copy_(value)
    return flat
