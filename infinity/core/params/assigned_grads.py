"""AssignedGrads: keeps gradients at home equal to the tensors that were assigned to ``p.grad``.

settle     copies home what was written to an assigned tensor since the last time

In torch ``p.grad = tensor`` makes that tensor the gradient: later writes to it count, and autograd
adds to it. So ``p.grad`` is that tensor here, too, while it is held. It is settled before a step,
and landing gradients are added to it. Parameters without an assignment are not checked. With
several ranks ``p.grad`` is a proxy, and an outdated tensor must not be changed any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ...errors import UsageError
from ..grads.at_home import AtHome
from ..grads.record import GradState, writable
from ..grads.values import GradValues
from ..homes.store import ArrayStore
from ..machine import storage_guard
from ..units.forms import local_of
from ..units.handle import ParamHandle
from .assigned import Assigned
from .lent import Lent, Limit, memory_of
from .outside_modes import has_bytes


class AssignedGrads:
    """Gradients of which some were assigned. Used from the thread that runs backward or the
    step."""

    def __init__(self, values: GradValues, store: ArrayStore) -> None:
        self.values, self.ranks, self._store = values, values.ranks, store
        self._assigned: set[ParamHandle] = set()  # with an assigned gradient; it may be gone since
        self._limit = Limit()

    # --- assigning ---

    def plain_of(self, handle: ParamHandle, value: Any) -> Any:
        """Returns the tensor to assign to ``handle``: ``value``, or for another gradient's proxy
        a tensor that is both gradients from then on. Raises UsageError if the two cannot share one
        tensor."""
        local = local_of(value) if isinstance(value, torch.Tensor) else value
        if isinstance(local, AtHome) and local.plain is not None:
            return local.plain
        is_of_another = isinstance(local, AtHome) and local._infinity_grad is not handle
        if not is_of_another and (
            self.ranks.alone or not self._is_assigned_to_another(handle, local)
        ):
            return value
        other = local._infinity_grad if isinstance(local, AtHome) else None
        if other is None or other.grad.proxy is not local or not self.ranks.alone:
            raise UsageError(
                f"{handle.name}.grad = another parameter's gradient, or a view of it, with several"
                " ranks: a write to one would have to change both. Assign a copy: param.grad ="
                " gradient.clone()."
            )
        was_consumed = other.grad.state is GradState.CONSUMED
        local.plain = local.clone()
        other.engine.gradients.set(other, local.plain)
        if was_consumed:
            other.grad.move(GradState.CONSUMED)
        return local.plain

    def _is_assigned_to_another(self, handle: ParamHandle, value: Any) -> bool:
        """Whether ``value`` is the assigned gradient of another parameter."""
        if (
            not isinstance(value, torch.Tensor)
            or not has_bytes(value)
            or value.layout is not torch.strided
        ):
            return False
        others = (other.grad.assigned for other in self._assigned if other is not handle)
        return any(
            assigned is not None and memory_of(value)[:2] == memory_of(assigned.bytes)[:2]
            for assigned in others
        )

    def part_from(self, handle: ParamHandle) -> None:
        """Gives a proxy that users hold its own copy of the values, before its parameter gets
        another gradient."""
        if (
            not self.ranks.alone
            or (proxy := handle.grad.proxy) is None
            or handle.grad.state is GradState.TORN
        ):
            return
        held = weakref.ref(proxy)
        proxy = handle.grad.proxy = handle.grad.shown = None
        if (proxy := held()) is not None and proxy.plain is None:
            proxy.plain = self.values.value(handle, write=False).clone()

    def lend(self, handle: ParamHandle) -> torch.Tensor:
        """Returns the gradient as a tensor in its own memory, whose views and arrays may be kept.
        On one rank it is ``p.grad`` while they are, as an assigned tensor is: writes to them
        count."""
        if (shown := self.shown(handle)) is not None:
            return local_of(shown)
        value = self.values.value(handle, write=False)
        value = value if self.values.lends_copies(handle) else value.clone()
        if self.ranks.alone:
            self.watch(handle, value, value, is_ours=True)
        return value

    def watch(
        self,
        handle: ParamHandle,
        tensor: torch.Tensor,
        part: torch.Tensor,
        *,
        is_ours: bool = False,
    ) -> None:
        """Watches ``tensor``, which was assigned. ``part``: the values of the gradient at home, a
        copy or a view of ``tensor``. ``is_ours``: the engine allocated it."""
        local = local_of(tensor)
        if isinstance(local, AtHome) or not has_bytes(local) or local.layout is not torch.strided:
            return
        self._limit.take(local.nbytes, self._trim)
        is_copied = storage_guard.identity(local) != storage_guard.identity(part)
        handle.grad.assigned = Assigned(handle, tensor, is_copied=is_copied, is_ours=is_ours)
        self._assigned.add(handle)

    def is_assigned(self, handle: ParamHandle, value: Any) -> bool:
        """Returns whether ``p.grad = value`` assigns the tensor that ``p.grad`` already is. As in
        torch, a consumed gradient then counts for the next step again."""
        record = handle.grad
        if record.assigned is None or not self.ranks.alone or record.assigned.tensor() is not value:
            return False
        if record.state is GradState.CONSUMED:
            record.move(GradState.LANDED)
            record.norm = None
        return True

    def shown(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns the assigned tensor while it is held; None if ``p.grad`` is a proxy."""
        assigned = handle.grad.assigned
        if assigned is None or not self.ranks.alone:
            return None
        if not assigned.is_held():
            self._let_go(handle)
            return None
        tensor = assigned.user_tensor()
        assigned.let_go()
        return tensor

    def zero(self, handle: ParamHandle) -> None:
        """Zeroes the gradient at home and the assigned tensor. The next step applies the zeros."""
        self.values.zero(handle)
        if (assigned := self._followed(handle)) is None:
            return
        if not assigned.is_writable:
            handle.grad.assigned = None
            return
        assigned.change(torch.Tensor.zero_)
        assigned.is_outdated = assigned.is_early = False
        assigned.note()

    def scale_as_user(self, handle: ParamHandle, factor: float) -> None:
        """Multiplies the gradient as ``p.grad.mul_(factor)`` does. Raises UsageError if a step has
        consumed it."""
        with handle.engine.uses.begin():
            if (assigned := self._written(handle)) is None:
                self.values.scale(writable(handle), factor)
        if assigned is not None:
            assigned.change(lambda tensor: tensor.mul_(factor))

    # --- landing ---

    def sum_with_graph(self, handle: ParamHandle, grad: torch.Tensor) -> torch.Tensor:
        """Adds ``grad``, with its graph, to a gradient that is there."""
        if handle.grad.state is GradState.ABSENT:
            return grad
        if (before := self.shown(handle)) is None:
            before = self.values.value(handle, write=False).clone()
        with torch.enable_grad():
            return before + grad

    def lands_on(self, handle: ParamHandle) -> Assigned | None:
        """Returns the tensor to which a landing gradient is added; None for the home. A consumed
        gradient is added to if its tensor changed since, for example by ``flat.zero_()``."""
        record, assigned = handle.grad, handle.grad.assigned
        if assigned is None or record.state is GradState.TORN:
            return None
        if not self.ranks.alone:
            self.settle(handle)
            assigned.outdate()
            return None
        if record.state is GradState.CONSUMED and not assigned.is_early:
            if not assigned.bytes.any() or self._is_changed(handle, assigned):
                record.move(GradState.LANDED)
        return self._written(handle)

    def add_to(self, handle: ParamHandle, assigned: Assigned, grad: torch.Tensor) -> None:
        """Adds ``grad`` to the assigned tensor, as autograd does. A later :meth:`settle` copies it
        home."""
        grad = grad.detach()
        assigned.change(lambda tensor: tensor.add_(grad.to(tensor.device)))
        handle.grad.norm = None
        handle.grad.move(GradState.LANDED)

    def _written(self, handle: ParamHandle) -> Assigned | None:
        """Returns the assigned tensor if torch would change it in place. If not, stops watching
        it."""
        if not self.ranks.alone or (assigned := self._followed(handle)) is None:
            return None
        # With grad mode on, torch leaves the tensor unchanged and makes another one.
        if assigned.is_held() and assigned.is_writable and not torch.is_grad_enabled():
            return assigned
        self._let_go(handle)
        return None

    # --- settling ---

    def settle_all(self) -> None:
        """Settles all assigned tensors."""
        if self._assigned:
            self.let_go_unheld()
        for handle in list(self._assigned):
            assigned = handle.grad.assigned
            is_early, assigned.is_early = assigned.is_early, False
            if not is_early or handle.grad.state is not GradState.CONSUMED:
                self.settle(handle)
            elif not assigned.has_other_bits:
                assigned.note()  # the step that applied it ends

    def settle_early(self, handles: Iterable[ParamHandle]) -> None:
        """Settles ``handles``, which are stepped while the backward runs."""
        for handle in handles:
            if (
                handle.grad is not None
                and handle.grad.assigned is not None
                and handle.grad.state is GradState.LANDED
            ):
                self.settle(handle)
                handle.grad.assigned.is_early = True

    def settle(self, handle: ParamHandle) -> None:
        """Settles the gradient of ``handle``. Raises UsageError if several ranks cannot apply the
        change."""
        record, assigned = handle.grad, handle.grad.assigned
        if (
            assigned is None
            or record.state is GradState.TORN
            or (assigned.is_early and record.state is GradState.CONSUMED)
        ):
            return
        if not self._is_changed(handle, assigned):
            return
        assigned = self._followed(handle)
        if not self.ranks.alone and (
            assigned.is_outdated or assigned.is_copied or record.state is GradState.CONSUMED
        ):
            raise UsageError(
                f"the tensor that was assigned to {handle.name}.grad was changed after the gradient"
                " had parted from it (by a backward, a step or another change). With several ranks"
                " change param.grad itself, or assign the tensor anew."
            )
        if record.state is GradState.CONSUMED:
            record.move(GradState.LANDED)
        with self._store.guard:
            handle.flat_param.homes.wait_running()
            self.values.put(handle, assigned.bytes)
        assigned.note()

    def _is_changed(self, handle: ParamHandle, assigned: Assigned) -> bool:
        if assigned.is_elsewhere:
            return True
        counts = self.ranks.alone or assigned.is_outdated
        return (counts and assigned.is_counted) or assigned.has_other_bits

    def _followed(self, handle: ParamHandle) -> Assigned | None:
        """Returns the assigned tensor, watched at the memory that it has now."""
        assigned = handle.grad.assigned
        if assigned is None or not assigned.is_elsewhere:
            return assigned
        tensor = assigned.tensor()
        if local_of(tensor).shape != local_of(handle.param).shape:
            raise UsageError(
                f"{handle.name}.grad was given another shape, {tuple(tensor.shape)}: assign a"
                " gradient of the parameter's"
            )
        assigned.move()
        return assigned

    def _let_go(self, handle: ParamHandle) -> None:
        self.settle(handle)
        handle.grad.assigned = None
        self._assigned.discard(handle)

    def let_go_unheld(self) -> None:
        """Releases assigned tensors that only the engine holds."""
        for handle in list(self._assigned):
            assigned = handle.grad.assigned
            if assigned is None:
                self._assigned.discard(handle)
            elif not assigned.is_held():
                self._let_go(handle)

    def _trim(self) -> list[Lent]:
        self.let_go_unheld()
        return [handle.grad.assigned for handle in self._assigned]
