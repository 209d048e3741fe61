"""Budgets: compares a plan with the bytes each tier may hold, and explains what to change."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from ...config import Config
from ...errors import CapacityError
from ..machine import disk_profile, limits
from ..machine.device import Device
from ..machine.sizes import format_nbytes
from ..machine.tiers import BUDGETS, Tier
from .memory_plan import BUFFERS, MemoryPlan

ONE_MEMORY = (Tier.DEVICE, Tier.HOST)  # one memory, if the CPU computes


class Budgets:
    """Bytes that each tier may be charged: the given budget, or else what is free.

    If the CPU computes, or a GPU that is integrated, device and host are one memory. Without a
    ``host_memory`` they share what is free there, of which the device has its budget at most. If
    only ``host_memory`` is given, it is the budget of what the engine itself puts on the device
    (:meth:`of_one_memory`).
    """

    def __init__(self, config: Config, free: Mapping[Tier, int] | None, device: Device):
        self._of = {tier: getattr(config, BUDGETS[tier]) for tier in Tier}
        open_tiers = [tier for tier, budget in self._of.items() if budget is None]
        for tier in open_tiers:
            self._of[tier] = free[tier] if free is not None else measured_free(tier, config, device)
        self.both_nbytes: int | None = None  # bytes of device and host together
        is_one_memory = device.is_host or (device.memory is not None and device.memory.is_unified)
        self._host_counts_both = is_one_memory and Tier.DEVICE in open_tiers
        if is_one_memory and Tier.HOST in open_tiers:
            self._count_together()

    def _count_together(self) -> None:
        self.both_nbytes = self._of[Tier.HOST]
        if self._host_counts_both:
            self._of[Tier.DEVICE] = self.both_nbytes

    def of_one_memory(self) -> Budgets:
        """Returns the budgets of a plan for which the engine chooses homes on the device: if that
        is the host's memory, and has no budget of its own, all of it counts in the host's."""
        budgets = copy.copy(self)
        if self._host_counts_both:
            budgets._of = dict(self._of)
            budgets._count_together()
        return budgets

    def __getitem__(self, tier: Tier) -> int:
        return self._of[tier]

    def over(self, plan: MemoryPlan) -> dict[Tier, int]:
        """Counts the bytes by which ``plan`` is too large, for each tier; empty if it fits."""
        excess = {
            tier: more for tier in Tier if (more := plan.planned_nbytes(tier) - self._of[tier]) > 0
        }
        if self.both_nbytes is not None:
            more = sum(map(plan.planned_nbytes, ONE_MEMORY)) - self.both_nbytes
            if more > max(excess.get(Tier.DEVICE, 0), excess.get(Tier.HOST, 0)):
                excess[Tier.HOST] = more
        return excess

    def excess(self, plan: MemoryPlan) -> tuple[int, int]:
        """Returns how far a plan is from fitting: (number of budgets too small, excess bytes). The
        error describes the plan with the least."""
        over = self.over(plan)
        return len(over), sum(over.values())

    def left(self, plan: MemoryPlan) -> dict[Tier, int]:
        """Returns the bytes that ``plan`` leaves on every tier. Tiers that share a memory each
        report all of it."""
        left = {tier: self._of[tier] - plan.planned_nbytes(tier) for tier in Tier}
        if self.both_nbytes is not None:
            of_both = self.both_nbytes - sum(map(plan.planned_nbytes, ONE_MEMORY))
            left |= {tier: min(left[tier], of_both) for tier in ONE_MEMORY}
        return left


def measured_free(tier: Tier, config: Config, device: Device | None = None) -> int:
    """Measures the free bytes of ``tier`` that a plan may use now. Without a GPU the device is the
    machine's memory.

    Leaves part of the memory to allocations outside the engine, and part of a GPU's to activations
    (:mod:`infinity.core.machine.limits`).
    """
    if tier is Tier.DEVICE and device is not None and device.memory is not None:
        if (nbytes := device.memory.engine_nbytes()) is not None:
            return nbytes
    if tier is not Tier.NVME:
        return limits.for_the_engine(limits.memory_left())
    return disk_profile.free_nbytes(config.nvme_paths)


def budget_too_small(
    plan: MemoryPlan, tier: Tier, budgets: Budgets, config: Config, *, reuses: bool = False
) -> CapacityError:
    """Makes the error for a plan that exceeds the budget of ``tier``, with its terms.
    ``reuses``: backwards come in another order than forwards, as those of pipeline stages do, which
    send buffers of a batch's size."""
    budget, parts = budgets[tier], dict(plan.terms[tier])
    if tier is Tier.HOST and budgets.both_nbytes is not None:  # the CPU computes in the same memory
        budget = budgets.both_nbytes
        parts |= {
            f"{term} (to compute with)": nbytes for term, nbytes in plan.terms[Tier.DEVICE].items()
        }
    needed = sum(parts.values())
    terms = ", ".join(f"{term} {format_nbytes(nbytes)}" for term, nbytes in parts.items())
    name = BUDGETS[tier]
    subject = (
        f"{name} is"
        if getattr(config, name) is not None
        else f"{name} was not given and what may be used of what is free is"
    )
    meant = f" Did you mean {budget}GiB?" if 1 < budget < 1024 else ""
    is_measured = tier is Tier.NVME and config.nvme_capacity is None
    where = f" at {', '.join(config.nvme_paths)}" if is_measured else ""
    buffers = parts.get(BUFFERS, 0)
    advice = (
        f" Of that {format_nbytes(buffers)} are the model's buffers, which stay with their modules:"
        " give it smaller ones."
        if buffers > budget
        else ""
    )
    if reuses and tier is Tier.DEVICE:
        advice += " What passes between stages comes on top: the first step tells how much."
    error = CapacityError(
        f"{subject} {format_nbytes(budget)} ({budget} bytes){where}, but the least that works"
        " here is"
        f" {format_nbytes(needed)} ({needed} bytes): {terms}.{advice}{meant}"
    )
    error.needed = {name: needed}
    return error
