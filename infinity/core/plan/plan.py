"""make_plan: chooses the tier of every array and the size of every buffer, before anything moves.

A plan is made from sizes alone; the ledger enforces it later. If a budget is too small for the most
generous plan, smaller ones are tried in order. If none fits, the error gives the least workable
budget.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from ...choices import AUTO
from ...config import Config
from ...errors import ConfigError, InternalError
from ..homes.staging import ThroughHost, backend_for
from ..machine.device import Device
from ..machine.tiers import Tier
from ..machine.traffic import Traffic
from .budgets import Budgets, budget_too_small
from .memory_plan import LADDER, MemoryPlan, Rung
from .memory_terms import MemoryTerms
from .placement import use_what_is_left
from .step_traffic import step_cost
from .unit_sizes import UnitSize


def make_plan(
    units: Sequence[UnitSize],
    config: Config,
    *,
    held_nbytes: int,
    free: Mapping[Tier, int] | None = None,
    device: Device | None = None,
    reuses: bool = False,
    buffers_nbytes: int = 0,
) -> MemoryPlan:
    """Makes the fastest plan within the budgets. ``held_nbytes``: the most weight bytes held at
    once. ``free``: bytes of a tier without a budget (None: measured now). ``device``: the compute
    device (None: the CPU). ``reuses``: a pass uses the same weights for several micro-batches, as
    pipeline stages do. ``buffers_nbytes``: of the model's buffers, which stay on the device.

    Raises CapacityError with the least workable budget, ConfigError if a home has no folder.
    """
    check_folders(config)
    device = device or Device(torch.device("cpu"), Traffic())
    budgets = Budgets(config, free, device)
    choices = _Choices(units, config, device, budgets, held_nbytes, buffers_nbytes, reuses)
    fitting, least, budgets = choices.plans()
    if fitting:
        return min(fitting, key=lambda plan: step_cost(plan, units))
    if least is None:
        raise InternalError("no plan was tried")
    if least.planned_nbytes(Tier.NVME) and not config.nvme_paths:
        raise ConfigError(
            "something has its home on NVMe, but nvme_paths is empty: name a folder on the disk"
            " to use"
        )
    over = budgets.over(least)
    tight = max(over, key=over.__getitem__)
    raise budget_too_small(least, tight, budgets, config, reuses=reuses)


@dataclass(frozen=True)
class _Choices:
    """The choices of homes and rungs for ``units``, and what they have to fit."""

    units: Sequence[UnitSize]
    config: Config
    device: Device
    budgets: Budgets
    held_nbytes: int
    buffers_nbytes: int
    reuses: bool

    def plans(self) -> tuple[list[MemoryPlan], MemoryPlan | None, Budgets]:
        """Makes the plans that fit, at most one for each choice of homes. Also returns the one that
        exceeds its budgets least, None if none does, and those budgets."""
        fitting: list[MemoryPlan] = []
        least: MemoryPlan | None = None
        least_budgets = self.budgets
        for home_tiers in self._home_tiers():
            budgets, asked = self.budgets, (self.config.params, self.config.optimizer)
            if any(
                home is Tier.DEVICE and choice == AUTO for home, choice in zip(home_tiers, asked)
            ):
                budgets = budgets.of_one_memory()
            for rung in LADDER:
                plan = self._plan_of(home_tiers, rung)
                if not budgets.over(plan):
                    of_all = self.units, self.config, budgets, self.device
                    fitting.append(use_what_is_left(plan, *of_all, reuses=self.reuses))
                    break  # a less generous rung would cache little more, with less look-ahead
                if least is None or budgets.excess(plan) < least_budgets.excess(least):
                    least, least_budgets = plan, budgets
        return fitting, least, least_budgets

    def _home_tiers(self) -> Iterator[tuple[Tier, Tier, Tier]]:
        config, device = self.config, self.device
        stepped = any(flat.spec.stepped for unit in self.units for flat in unit.flat_params)
        for params, optimizer in _home_tiers(config, device, stepped=stepped):
            for grad in _grad_tiers(params, optimizer, self.units, config, device):
                yield params, optimizer, grad

    def _plan_of(self, home_tiers: tuple[Tier, Tier, Tier], rung: Rung) -> MemoryPlan:
        """Adds up one choice of homes and rung. Includes device memory for the road from disk, if
        the device has one and it fits."""
        config, device = self.config, self.device
        add_up = partial(
            MemoryTerms,
            self.units,
            config,
            home_tiers,
            rung,
            self.held_nbytes,
            device,
            buffers_nbytes=self.buffers_nbytes,
            reuses=self.reuses,
        )
        backend = self._backend if home_tiers[0] is Tier.NVME else ThroughHost
        plan = add_up(backend=backend).plan()
        return add_up().plan() if backend is not ThroughHost and self.budgets.over(plan) else plan

    @cached_property
    def _backend(self) -> type[ThroughHost]:
        """The way of weights from disk to the device."""
        return backend_for(self.config, self.device)


def check_folders(config: Config) -> None:
    """Raises ConfigError if a folder of ``nvme_paths`` does not exist."""
    for path in config.nvme_paths:
        if not os.path.isdir(path):
            raise ConfigError(f"nvme_paths: there is no folder {path}. Create it, or name another.")


def _home_tiers(config: Config, device: Device, *, stepped: bool) -> list[tuple[Tier, Tier]]:
    """Returns the homes of (weights, optimizer state) that the configuration allows, fastest first.
    Raises ConfigError if the device allows none of them."""
    everywhere = [tier for tier in Tier if tier is not Tier.NVME or config.nvme_paths]
    params, optimizer = (
        everywhere if choice == AUTO else [Tier(choice)]
        for choice in (config.params, config.optimizer)
    )
    home_tiers = list(itertools.product(params, optimizer))
    if not device.is_host and stepped:
        home_tiers = [pair for pair in home_tiers if _is_steppable(pair, config, device)]
        if device.memory is not None and device.memory.is_unified:
            in_place = [_in_place(pair, config, device) for pair in home_tiers]
            home_tiers = list(dict.fromkeys([*in_place, *home_tiers]))
        if not home_tiers:
            raise ConfigError(
                f"params={config.params!r} with optimizer={config.optimizer!r}: what is at home on"
                f" {device.where} is stepped there, which needs kernels"
                f" ({device.kernels_refusal or 'which are there'}) and all other state in memory."
                " Use params='host' and optimizer='host', or 'auto'."
            )
    # Weights move twice a step and state once each way, but state is several times as large.
    speed = list(Tier).index
    return sorted(home_tiers, key=lambda pair: (sum(map(speed, pair)), pair))


def _grad_tiers(
    params: Tier, optimizer: Tier, units: Sequence[UnitSize], config: Config, device: Device
) -> list[Tier]:
    """Returns the homes of gradients for given homes of weights and state, fastest first."""
    # If only the device can access the weights, the device steps, wherever the state is.
    on_device = optimizer is Tier.DEVICE or (params is Tier.DEVICE and not device.is_host)
    # Whole gradients (ZeRO-1) are averaged in memory.
    whole_grads = any(flat.whole_grad for unit in units for flat in unit.flat_params)
    return list(Tier)[not on_device : 3 if config.nvme_paths and not whole_grads else 2]


def _in_place(home_tiers: tuple[Tier, Tier], config: Config, device: Device) -> tuple[Tier, Tier]:
    """Returns the homes with the device's for the host's, where both are one memory and the device
    can step them: nothing is copied then."""
    params, optimizer = (Tier.DEVICE if home is Tier.HOST else home for home in home_tiers)
    there = (params, optimizer)
    return there if _is_steppable(there, config, device) else home_tiers


def _is_steppable(home_tiers: tuple[Tier, Tier], config: Config, device: Device) -> bool:
    """Whether weights and state at these homes can be stepped, by the CPU or by the device.

    One of them on the device and one off it is allowed only if both were chosen by name: the CPU
    steps state on the host with less traffic.
    """
    if Tier.DEVICE not in home_tiers:
        return True
    mixed = len(set(home_tiers)) > 1
    return (
        device.kernels is not None
        and Tier.NVME not in home_tiers
        and not (mixed and "auto" in (config.params, config.optimizer))
    )
