"""GradientBank: lands gradients at home, serves ``p.grad``, and hands gradients to the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ... import native
from ...errors import UsageError
from ...ranks.collectives import Collectives
from ...torch_private import current_task
from ..homes.store import ArrayStore
from ..machine.tiers import Tier
from ..params import mistakes
from ..params.assigned_grads import AssignedGrads
from ..run.operations import Operation
from ..units.flat_param import FlatParam
from ..units.forms import is_common, like, part_of
from ..units.handle import ParamHandle, drop_raw_grads, handle_of
from ..units.unit import ParamUnit
from .homes import GradHomes
from .lander import Lander
from .meeting import Meeting
from .record import GradRecord, GradState
from .tensor import GradProxy
from .values import GradValues
from .whole import WholeGradients


class GradientBank:
    """Lands, lends and consumes gradients. Used from the thread that runs backward or the step."""

    def __init__(
        self,
        store: ArrayStore,
        staging: native.PinnedPool | None,
        collectives: Collectives,
        *,
        in_flight_nbytes: int = 0,
    ):
        homes = GradHomes(store, staging, in_flight_nbytes=in_flight_nbytes)
        self.values = GradValues(homes, store, collectives)
        self.ranks, self.store = collectives.ranks, store
        self.assigned = AssignedGrads(self.values, store)
        self.homes, self.changes = homes, self.values.changes
        self.lander = Lander(homes, store, self.changes, self.values.norms)
        self.clips: list[float] = []  # factors of users' clips of all gradients since the last step
        # With several ranks: see `reduce_with`.
        self._add_whole: Callable[[ParamHandle, torch.Tensor], None] | None = None
        self._sums: WholeGradients | None = None
        self._average: Callable[..., None] = lambda **_: None
        # In a pass of several backwards: sums that land after the last one
        self._waiting: WholeGradients | None = None
        # Of the running backward, by parameter and task of autograd. None: autograd adds its uses.
        self._meetings: dict[tuple[ParamHandle, int], Meeting | None] = {}
        self.takes_samples = False  # of gradients that ranks with other local parts share

    # --- what autograd and torch.nn.utils see ---

    def get(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns ``p.grad``: an assigned tensor, or a :class:`GradProxy`, for a distributed
        parameter as the local part of that.

        Gradients that wait for it are averaged first. A gradient that this rank lacks may exist on
        another rank. Raises UsageError between the backwards of one pass, whose gradients land
        together.
        """
        handle.engine.uses.check(Operation.USE_GRAD, f"{handle.name}.grad")
        with handle.engine.uses.begin():
            if self._meetings and (began := self._began_to_land(handle)) is not None:
                if began.is_first:
                    return None  # autograd sets it after the last use's
                raise UsageError(
                    f"{handle.name}.grad in the middle of a backward: a part of this backward's"
                    " gradient is in it already. Read it after the backward, or in a hook on that"
                    " parameter."
                )
            if handle.grad.state is GradState.ABSENT and not mistakes.is_called_from(
                "torch/nn/modules/module.py", "zero_grad"
            ):
                self._average_with(handle)
            if (
                handle.grad.assigned is not None
                and (assigned := self.assigned.shown(handle)) is not None
            ):
                return assigned
        record = handle.grad
        if record.state is GradState.ABSENT:
            return None
        if record.shown is None:
            record.proxy = GradProxy(handle)
            record.shown = like(handle.param, record.proxy)
        return record.shown

    def set(self, handle: ParamHandle, value: torch.Tensor | None) -> None:
        """Sets ``p.grad = value``. With several ranks every rank calls this. Raises UsageError for
        a value of another dtype, shape or layout."""
        handle.engine.uses.check(Operation.SET_GRAD, f"{handle.name}.grad")
        with handle.engine.uses.begin():
            self._set(handle, value)

    def _set(self, handle: ParamHandle, value: torch.Tensor | None) -> None:
        record = handle.grad
        if value is None:
            self.clear(handle)
            return
        _check_value(handle, value)
        if handle_of(value) is not None:
            value = value.detach().clone()  # a parameter at rest, or a view of one: no memory
        value = self.assigned.plain_of(handle, value)
        if value is record.shown or self.assigned.is_assigned(handle, value):
            return
        assigned, part = value, part_of(handle.param, value.detach(), f"{handle.name}.grad")
        value = part.clone()
        # Compared over the ranks that share it: with an ep axis each rank has other experts.
        handle.flat_param.collectives.meet(
            f"setting the gradient of {handle.name}", value, over_tensors=is_common(handle.param)
        )
        self.assigned.part_from(handle)
        self.clear(handle)
        self._average_with(handle)
        handle.grad.averaged = self.ranks.data_size > 1
        handle.grad.move(GradState.LANDED)
        with self.store.guard:
            handle.flat_param.homes.wait_running()
            self.values.put(handle, value)
        self.assigned.watch(handle, assigned, part)

    def average(self, of: Callable[[FlatParam], bool] = lambda flat: True) -> None:
        """Settles assigned tensors, then averages gradients that wait for it, of the flat params
        ``of``. Every rank calls this."""
        self.assigned.settle_all()
        self._average(of=of)

    def refresh(self, handle: ParamHandle) -> None:
        """Settles and averages before the values of the gradient of ``handle`` are read."""
        if handle.grad.assigned is not None:
            self.assigned.settle(handle)
        self._average_with(handle)

    def _average_with(self, handle: ParamHandle) -> None:
        """Averages the gradients of the optimizer that steps ``handle``."""
        optimizer = handle.flat_param.spec.optimizer
        self._average(of=lambda flat: flat.spec.optimizer == optimizer)

    def clear(self, *handles: ParamHandle) -> None:
        """Sets ``p.grad = None``. Clearing the last gradient also forgets the backwards since the
        last step, of which ranks may have had different ones."""
        were_there = [h for h in handles if h.grad.state is not GradState.ABSENT]
        for handle in handles:
            handle.grad = GradRecord()
        # Also drop what autograd accumulated when an exception kept it from landing.
        drop_raw_grads([handle.param for handle in handles])
        if were_there and not (engine := were_there[0].engine).computing:
            # Reversed, because gradients are cleared from the front.
            for other in reversed(self.values.handles):
                if other.grad.state is not GradState.ABSENT:
                    return
            self._average(are_gone=True)
            self.clips.clear()
            engine.steps.forget_backwards()

    def zero_here(self, handle: ParamHandle) -> None:
        """Zeroes the gradient if there is one, without asking other ranks."""
        if handle.grad.state is not GradState.ABSENT:
            self.assigned.zero(handle)

    def reduce_with(
        self,
        add: Callable[[ParamHandle, torch.Tensor], None],
        average: Callable[..., None],
        sums: WholeGradients | None = None,
    ) -> None:
        """Sets what adds to this rank's whole gradient, and what averages gradients over the ranks.
        ``average`` takes ``are_gone``: there is no gradient any more, and no rank to meet.
        ``sums``: what ``add`` adds to."""
        self._add_whole, self._average, self._sums = add, average, sums

    # --- backwards that fail ---

    def end_backward(self) -> None:
        """Ends the backward: the gradients that it changed are complete."""
        self.homes.queue.begin()
        self.changes.end()

    # --- several backwards in one pass ---

    def join_backwards(self, waiting: WholeGradients | None) -> None:
        """Makes gradients land together, in :meth:`land_together`.

        ``waiting``: sums the gradients whose home the device cannot add to directly. None if the
        reducer does.
        """
        self._waiting = waiting

    def land_together(self, units: Iterable[ParamUnit]) -> None:
        """Lands the sums of the pass's backwards."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        for unit in units:
            for flat_param in unit.flat_params:
                got = waiting.pop_got(flat_param)
                if not got:
                    continue
                whole, charge = waiting.pop(flat_param)
                for index in sorted(got):
                    handle = flat_param.handles[index]
                    self._land(handle, flat_param.layout.placements[index].view(whole))
                charge.release()
                self.homes.close_all([flat_param])

    def _waits(self, handle: ParamHandle, grad: torch.Tensor, sums: WholeGradients) -> bool:
        """Adds ``grad`` to the ``sums`` that land at the end of the pass. Returns False if it can
        be added at home, or the device has no room, or there is a sum at home: this goes on."""
        begins = handle.grad.state is GradState.ABSENT and (
            self.homes.is_remote(handle) or handle.flat_param.arrays["grad"].tier is Tier.NVME
        )
        return (begins or sums.has_gradient(handle)) and sums.add_if_room(handle, grad)

    def rebuild(self) -> None:
        """Marks gradients that an exception interrupted as torn, and sends opened gradients home.
        Only while no transfer is running."""
        self.changes.tear()
        self._meetings.clear()
        if self._waiting is not None:
            self._waiting.drop()
        self._waiting = None
        self.homes.rebuild()

    # --- landing ---

    def land(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Adds ``grad`` to the landed gradient. Raises UsageError if ``grad`` is sparse, or the
        landed one cannot be added to any more."""
        if grad.is_sparse:
            raise UsageError(
                f"{handle.name} got a sparse gradient; build the embedding with sparse=False"
            )
        record = handle.grad
        if (
            (grad.requires_grad or record.with_graph is not None)
            and self._waiting is None
            and torch.is_grad_enabled()
            and self.ranks.alone
        ):
            if record.state is not GradState.TORN:
                self.reopen(handle)
                self._set(handle, grad := self.assigned.sum_with_graph(handle, grad))
                self.changes.begin(handle)
                handle.grad.with_graph = grad
            return
        if self._meetings and (meeting := self._meetings.get((handle, current_task()))) is not None:
            meeting.begin(is_first=record.state is GradState.ABSENT)
            grad = meeting.keep_rows(grad)
        assigned = None if record.assigned is None else self.assigned.lands_on(handle)
        if record.state is GradState.CONSUMED:
            self.reopen(handle)
        self.changes.begin(handle)
        if self.takes_samples and is_common(handle.param):
            record.take_sample(grad)
        if self._add_whole is not None and not self.ranks.keeps_gradients:
            self._add_whole(handle, grad)
            return
        if record.state is GradState.TORN:
            return
        if assigned is not None:
            self.assigned.add_to(handle, assigned, grad)
        elif self._waiting is None or not self._waits(handle, grad, self._waiting):
            self._land(handle, grad)

    def _land(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        record = handle.grad
        if record.averaged:
            raise _averaged_early(handle)
        self.lander.land(handle, grad, adds=record.state is not GradState.ABSENT)
        record.move(GradState.LANDED)

    def land_average(self, handle: ParamHandle, average: torch.Tensor, begin: int = 0) -> None:
        """Adds this rank's shard of the average of all ranks' gradients, in fp32, to the landed
        gradient: all of it, or its elements from ``begin``, which the first ones precede."""
        if not self.ranks.keeps_gradients:
            self.reopen(handle)
        record = handle.grad
        if record.state is GradState.TORN:
            return
        if not begin:
            record.adds = record.state is not GradState.ABSENT and not self.ranks.keeps_gradients
        shard = average.to(handle.flat_param.spec.grad_dtype)
        self.lander.land_shard(handle, shard, begin, adds=record.adds)
        record.proxy_norm = None
        record.averaged = True
        record.move(GradState.LANDED)

    def reopen(self, handle: ParamHandle) -> None:
        """Lets a gradient that a step has applied be added to, or stepped again: it is still at
        home, as in torch without ``zero_grad()``. Raises UsageError if ranks have averaged it to
        shards of the optimizer only."""
        if handle.grad.state is not GradState.CONSUMED:
            return
        if self.ranks.keeps_gradients:
            raise UsageError(
                f"the gradient of {handle.name} was averaged over the ranks and consumed by the"
                " last step: with shard='optimizer' it cannot be added to, nor stepped again. Call"
                " optimizer.zero_grad() between step() and the next backward(), or use"
                " shard='gradients'."
            )
        handle.grad.move(GradState.LANDED)
        handle.grad.norm = None

    def take_sum(self, handle: ParamHandle, grad: torch.Tensor) -> torch.Tensor:
        """Returns ``grad`` added to this rank's gradients of earlier backwards, which the next
        landing replaces. Averages of several ranks are gathered: every rank calls this. Raises
        UsageError as :meth:`land` does."""
        record, sums = handle.grad, self._waiting or self._sums
        if record.state in (GradState.LANDED, GradState.CONSUMED):
            is_local = self.ranks.keeps_gradients
            if is_local and record.averaged:
                raise _averaged_early(handle)
            self.reopen(handle)
            self.assigned.part_from(handle)
            before = (
                self.homes.view(handle, write=False)
                if is_local
                else self.values.value(handle, write=False)
            )
            grad = before.to(grad.device, grad.dtype) + grad
            handle.grad = GradRecord(edits=record.edits, own_edits=record.own_edits)
        if sums is not None and (before := sums.give_back(handle)) is not None:
            grad = before.to(grad.dtype) + grad
        return grad

    # --- uses that land apart ---

    def meet(
        self,
        handle: ParamHandle,
        task: int,
        ids: Sequence[torch.Tensor],
        wholes: int,
        others: int,
    ) -> Meeting | None:
        """Returns where the gradients of ``handle``'s uses meet in autograd's ``task``, or None if
        autograd has to add them: always the same in one task.

        ``ids``: of the lookups still to come, the one that asks among them. ``wholes``: uses of
        every row still to come. ``others``: uses at most whose gradients autograd adds up first.
        """
        if (key := (handle, task)) not in self._meetings:
            record = handle.grad
            is_first = record.state is GradState.ABSENT
            spec = handle.flat_param.spec
            meets = (
                self._add_whole is None
                and self._waiting is None
                and record.state is not GradState.TORN
                and record.assigned is None
                and record.with_graph is None
                # Else what is at home would be added to each, and not to their sum.
                and (wholes <= 1 or (is_first and spec.grad_dtype == spec.dtype))
                # Of three addends autograd may add the others' between two that meet.
                and (not others or (others == 1 and not wholes and len(ids) == 1))
            )
            if meets:
                self.changes.begin(handle)
            self._meetings[key] = Meeting(handle, ids) if meets else None
        return self._meetings[key]

    def _began_to_land(self, handle: ParamHandle) -> Meeting | None:
        """Returns the meeting of a running backward of which a part has landed, or None."""
        for (other, _), meeting in self._meetings.copy().items():
            if other is handle and meeting is not None and meeting.is_first is not None:
                return meeting
        return None

    def end_meetings(self) -> list[ParamHandle]:
        """Lands the rows that met. Returns their parameters."""
        meetings, self._meetings = self._meetings, {}
        met = [meeting for meeting in meetings.values() if meeting is not None]
        for meeting in met:
            handle = meeting.handle
            self.reopen(handle)
            self.lander.land_rows(
                handle, *meeting.rows(), adds=handle.grad.state is not GradState.ABSENT
            )
            handle.grad.move(GradState.LANDED)
        return [meeting.handle for meeting in met]


def _averaged_early(handle: ParamHandle) -> UsageError:
    return UsageError(
        f"a backward through {handle.name} after its gradient was read: with shard='optimizer'"
        " reading averages it over the ranks. Read gradients after the last backward of a step, or"
        " use shard='gradients'."
    )


def _check_value(handle: ParamHandle, value: object) -> None:
    """Raises UsageError for what cannot be the gradient of ``handle``. Nothing has changed
    then."""
    wanted = handle.flat_param.spec.grad_dtype
    if not isinstance(value, torch.Tensor) or value.dtype not in (
        wanted,
        handle.flat_param.spec.dtype,
    ):
        actual = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(f"{handle.name}.grad must be None or a tensor of {wanted}, not {actual}")
    if value.shape != handle.param.shape:
        raise UsageError(
            f"{handle.name}.grad: a gradient of shape {tuple(value.shape)} for another shape"
        )
    if value.layout is not torch.strided:
        raise UsageError(
            f"{handle.name}.grad must be a dense tensor, not one of layout {value.layout}"
        )
