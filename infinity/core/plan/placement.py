"""Placement: spends the leftover budget on promoting units to a faster tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...config import Config
from ..machine.device import Device
from ..machine.tiers import Tier
from ..step.device_slots import DEVICE_SLOTS
from ..step.slots import needed_device_slot_nbytes
from ..units.flat_param_spec import ARRAYS, EVERY_MOMENT
from .budgets import ONE_MEMORY, Budgets
from .memory_plan import MemoryPlan, term_of
from .memory_terms import SAVE, SAVE_NBYTES
from .unit_sizes import UnitSize

# Arrays that move together. A step moves each byte of the weights four times, of the state twice,
# so weights are placed first.
TOGETHER = {"weights": ("weight",), "optimizer state": ("master", *EVERY_MOMENT)}


def use_what_is_left(
    plan: MemoryPlan,
    units: Sequence[UnitSize],
    config: Config,
    budgets: Budgets,
    device: Device,
    *,
    reuses: bool = False,
) -> MemoryPlan:
    """Spends the leftover budget, in this order: gradients shared by a pass's micro-batches (if
    ``reuses``), then units promoted to a faster tier.

    A unit's home changes if it was "auto". NVMe homes chosen by name are cached on the host, if
    ``weights_on_host`` or ``host_memory`` is given. The same units are promoted for every step.
    """
    filling = Placement(plan, units, budgets)
    if reuses:
        filling.add_waiting(device)
    if not device.is_host:
        # A unit is on the device with all of its state, and needs no transfer. Or its weights are
        # gathered for each use, and its state stays where the CPU steps it.
        if device.kernels is not None:
            if config.params == config.optimizer == "auto":
                filling.place_whole(Tier.DEVICE)
            filling.add_device_slots()
        filling.widen_window()
    elif reuses:
        filling.widen_window()
    elif config.params == "auto" and config.device_memory is not None:
        filling.place("weights", Tier.DEVICE)
    if config.host_memory is not None and Tier.NVME in (
        plan.tiers["weight"],
        plan.tiers["exp_avg"],
    ):
        filling.add_save()  # before what takes all the rest
    for term, home in (("weights", config.params), ("optimizer state", config.optimizer)):
        if plan.tiers[TOGETHER[term][0]] is not Tier.NVME:
            continue
        if home == "auto":
            filling.place(term, Tier.HOST)
        elif term == "weights" and config.weights_on_host is not None:
            filling.cache(term, numel=config.weights_on_host)
        elif config.host_memory is not None and config.activations != "host":
            filling.cache(term)
    return filling.result()


class Placement:
    """A plan that is changed to use more of the faster tiers."""

    def __init__(self, plan: MemoryPlan, units: Sequence[UnitSize], budgets: Budgets):
        self._plan, self._units = plan, units
        self._spare, self._is_one_memory = budgets.left(plan), budgets.both_nbytes is not None
        self._terms = {tier: dict(of_tier) for tier, of_tier in plan.terms.items()}
        self._placed: dict[str, dict[int, Tier]] = {}
        self._cached: dict[str, frozenset[int]] = {}

    def add_save(self) -> None:
        """Adds the memory of a save beside the training, if it fits."""
        if SAVE_NBYTES <= self._spare[Tier.HOST]:
            self._terms[Tier.HOST][SAVE] = SAVE_NBYTES
            self._take(Tier.HOST, SAVE_NBYTES)

    def place(self, term: str, tier: Tier) -> None:
        """Moves the home of one kind of array (``term``) to ``tier``, for the units that fit."""
        names = TOGETHER[term]
        home = self._plan.tiers[names[0]]
        if home is tier:
            return
        chosen, nbytes = self._choose(names, tier, all_of_them=True)
        if chosen:
            self._terms[tier][term] = self._terms[tier].get(term, 0) + nbytes
            self._terms[home][term] -= nbytes
            self._take(home, -nbytes)
            for name in names:
                self._placed.setdefault(name, {}).update(dict.fromkeys(chosen, tier))

    def place_whole(self, tier: Tier) -> None:
        """Moves the home of all arrays, gradients too, to ``tier``, for the units that fit. In the
        order of the model: the first are needed first and land last, so that nothing hides their
        updates."""
        for index in sorted(range(len(self._units)), key=lambda index: self._units[index].position):
            unit, tiers = self._units[index], self._plan.tiers_of(index)
            sizes = {name: sum(flat.nbytes(name) for flat in unit.flat_params) for name in ARRAYS}
            moved = {
                name: nbytes for name, nbytes in sizes.items() if nbytes and tiers[name] is not tier
            }
            nbytes = sum(moved.values())
            if not moved or nbytes > self._spare[tier] or unit.at_once_nbytes or unit.is_sharded:
                continue
            for name, size in moved.items():
                self._terms[tiers[name]][term_of(name)] -= size
                self._spare[tiers[name]] += size
                self._terms[tier][term_of(name)] = self._terms[tier].get(term_of(name), 0) + size
                self._spare[tier] -= size
                self._placed.setdefault(name, {})[index] = tier

    def add_device_slots(self) -> None:
        """Adds slots, if they fit, with which the device steps a part of the state on the host."""
        slot = needed_device_slot_nbytes(self._units)
        if (
            not self._plan.device_slot_nbytes
            and slot
            and DEVICE_SLOTS * slot <= self._spare[Tier.DEVICE]
        ):
            self._terms[Tier.DEVICE]["optimizer slots"] = DEVICE_SLOTS * slot
            self._spare[Tier.DEVICE] -= DEVICE_SLOTS * slot
            self._plan = replace(self._plan, device_slot_nbytes=slot)

    def add_waiting(self, device: Device) -> None:
        """Keeps whole gradients on the device until a pass of several micro-batches ends, if all
        fit."""
        away = list(Tier)[1 + device.is_host :]  # what the device cannot add to
        nbytes = sum(
            flat.whole_nbytes("grad")
            for index, unit in enumerate(self._units)
            if self._plan.tiers_of(index)["grad"] in away
            for flat in unit.flat_params
            if flat.spec.stepped and not flat.is_averaged
        )
        if 0 < nbytes <= self._spare[Tier.DEVICE]:
            self._terms[Tier.DEVICE]["gradients of several micro-batches"] = nbytes
            self._take(Tier.DEVICE, nbytes)

    def widen_window(self) -> None:
        """Enlarges the window by the device's leftover budget, so that fewer weights are copied
        again for the backward."""
        passing = sum(
            unit.weight_nbytes
            for index, unit in enumerate(self._units)
            if not unit.at_once_nbytes and index not in self._placed.get("weight", ())
        )
        window = self._plan.device_window_nbytes
        wider = min(passing, window + self._spare[Tier.DEVICE])
        if 0 < window != wider:
            self._terms[Tier.DEVICE]["gathered weights"] += wider - window
            self._take(Tier.DEVICE, wider - window)
            self._plan = replace(self._plan, device_window_nbytes=wider)

    def cache(self, term: str, numel: int | None = None) -> None:
        """Caches units' NVMe homes on the host, up to ``numel`` elements together. Their extents on
        disk stay reserved. The largest unit is not cached."""
        names = TOGETHER[term]
        chosen, nbytes = self._choose(names, Tier.HOST, all_of_them=False, numel=numel)
        if chosen:
            self._terms[Tier.HOST][f"{term} kept from NVMe"] = nbytes
            self._cached |= dict.fromkeys(names, frozenset(chosen))

    def _take(self, tier: Tier, nbytes: int) -> None:
        for memory in ONE_MEMORY if self._is_one_memory and tier in ONE_MEMORY else (tier,):
            self._spare[memory] -= nbytes

    def _choose(
        self, names: Sequence[str], tier: Tier, *, all_of_them: bool, numel: int | None = None
    ) -> tuple[list[int], int]:
        """Takes the units that fit the leftover of ``tier``, smallest first, up to ``numel``
        elements together. Returns their indices and their bytes."""
        sizes = [
            sum(flat.nbytes(name) for flat in unit.flat_params for name in names)
            for unit in self._units
        ]
        by_size = sorted(range(len(sizes)), key=sizes.__getitem__)
        chosen = []
        for index in by_size if all_of_them else by_size[:-1]:
            placed = index in self._placed.get(names[0], ())
            in_rows = tier is Tier.DEVICE and self._units[index].at_once_nbytes
            count = sum(flat.numel // flat.shards for flat in self._units[index].flat_params)
            if (
                0 < sizes[index] <= self._spare[tier]
                and not placed
                and not in_rows
                and (numel is None or count <= numel)
            ):
                self._take(tier, sizes[index])
                numel = None if numel is None else numel - count
                chosen.append(index)
        return chosen, sum(sizes[index] for index in chosen)

    def result(self) -> MemoryPlan:
        return replace(self._plan, terms=self._terms, placed=self._placed, cached=self._cached)
