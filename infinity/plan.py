"""MemoryPlan: which array lives on which tier, and how much every part of the engine may hold, before anything moves.

A plan is made from sizes alone. It is the sum of its terms, each with a reason; the ledger then holds every part to
it. When a budget is too small for the most generous plan, smaller ones are tried in order, and when none fits the
error says what the least workable budget is.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from . import limits, native
from .config import Config
from .device import Device
from .errors import CapacityError, ConfigError
from .layout import round_up
from .shard import ARRAYS, SCALES, ShardSpec, home_of
from .stepper import SLOTS, slot_nbytes
from .tiers import BUDGETS, Tier, format_nbytes
from .trace import Traffic

MIB = 1024 * 1024
MIN_CHUNK = native.CHECKSUM_NBYTES // 2  # elements: whole checksum blocks at every element size
STATE = ("weight", "master", "exp_avg", "exp_avg_sq")
CHECKSUMMED = 5  # arrays of a shard that can be on disk, each with a last block of its own


@dataclass(frozen=True)
class ShardSize:
    """What a plan needs to know of one shard."""

    spec: ShardSpec
    numel: int
    slices: int = 1  # ranks that have an equal part each
    whole_grad: bool = False  # but every one its whole gradient (ZeRO-1)
    node_size: int = 0  # ranks of one machine, where they share out gathered weights; else 0

    def nbytes(self, name: str) -> int:
        """Bytes of array ``name`` at home on one rank; 0 when the shard has none."""
        if name == "grad" and self.whole_grad:
            return round_up(int(self.numel * self.spec.nbytes_per_element().get(name, 0)), native.BLOCK_NBYTES)
        return self._slice_nbytes.get(name, 0)

    def whole_nbytes(self, name: str) -> int:
        """Bytes of array ``name`` of all ranks."""
        return self.slices * self._slice_nbytes.get(name, 0)

    @cached_property
    def _slice_nbytes(self) -> dict[str, int]:
        """Of every array, an equal part for each rank."""
        sizes = self.spec.nbytes_per_element()
        return {name: round_up(int(self.numel // self.slices * size), native.BLOCK_NBYTES) for name, size in sizes.items()}


@dataclass(frozen=True)
class UnitSize:
    """What a plan needs to know of one unit."""

    name: str
    shards: tuple[ShardSize, ...]
    tile_nbytes: int = 0  # its weight comes to the device in tiles of so many bytes; 0: whole

    @property
    def weight_nbytes(self) -> int:
        """Of the whole weights, as they lie on the device."""
        return sum(shard.whole_nbytes("weight") for shard in self.shards)

    @property
    def slice_nbytes(self) -> int:
        """Of the weights at home on one rank."""
        return sum(shard.nbytes("weight") for shard in self.shards)

    @property
    def is_sliced(self) -> bool:
        return any(shard.slices > 1 for shard in self.shards)


@dataclass(frozen=True)
class Choice:
    """One rung of the ladder from generous to least workable."""

    units_ahead: int  # staged before they are needed
    slot_count: int  # of the optimizer: with one stepping, the others keep loads and saves in flight
    chunk: int  # elements of one optimizer slot
    service_nbytes: int


LADDER = (
    Choice(3, 8, 512 * 1024, 4 * MIB),
    Choice(2, 8, 256 * 1024, 4 * MIB),
    Choice(2, 8, 128 * 1024, 2 * MIB),
    Choice(1, 8, 128 * 1024, MIB),
    Choice(1, 8, 64 * 1024, MIB),
    Choice(1, 8, 32 * 1024, MIB // 2),
    Choice(0, 4, MIN_CHUNK, native.CHECKSUM_NBYTES),
)


@dataclass(frozen=True)
class MemoryPlan:
    """Tiers of the arrays, sizes of the engine's own buffers, and the planned peak of every tier."""

    tiers: dict[str, Tier]
    units_ahead: int
    staging_nbytes: int  # weights on their way from disk; 0 without any
    grad_staging_nbytes: int  # gradients on their way to disk; 0 without any
    activation_staging_nbytes: int  # activations on their way to or from disk; 0 without any
    slot_count: int
    slot_nbytes: int  # one optimizer slot; 0 when all state is in memory
    service_nbytes: int
    device_window_nbytes: int  # weights gathered at once
    borrowed_nbytes: int = 0  # gradients of the device that are still being copied, at most
    device_slot_nbytes: int = 0  # a slot for state that passes through a device which steps it
    terms: dict[Tier, dict[str, int]] = field(default_factory=dict)
    placed: dict[str, dict[int, Tier]] = field(default_factory=dict)  # array -> unit -> its home, where not ``tiers``'
    kept: dict[str, frozenset[int]] = field(default_factory=dict)  # array -> units whose NVMe home is cached on the host
    drafted: frozenset[int] = frozenset()  # units with room for a second copy of their state

    def tiers_of(self, unit: int) -> dict[str, Tier]:
        """The home of every array of the unit with this index."""
        return {name: self.placed.get(name, {}).get(unit, tier) for name, tier in self.tiers.items()}

    def kept_of(self, unit: int) -> set[str]:
        """The arrays of the unit with this index that are cached."""
        return {name for name, units in self.kept.items() if unit in units}

    def planned_nbytes(self, tier: Tier) -> int:
        """The most that ``tier`` will be charged."""
        return sum(self.terms[tier].values())


def make_plan(
    units: Sequence[UnitSize],
    config: Config,
    *,
    held_nbytes: int,
    free: Mapping[Tier, int] | None = None,
    device: Device | None = None,
) -> MemoryPlan:
    """The fastest plan within the budgets. ``held_nbytes``: the most weights one moment holds. ``free``: what a tier
    without a budget has (None: what is measured now). ``device``: what computes (None: the processor).

    Raises CapacityError with the least workable budget, ConfigError when a home has no folder.
    """
    check_folders(config)
    if config.speculate and any(shard.whole_grad for unit in units for shard in unit.shards):
        raise ConfigError(
            "speculate=True with shard='optimizer': gradients are averaged over the ranks in the step itself, so that nothing can "
            "be updated before. Use shard='gradients', or leave speculate=False."
        )
    device = device or Device(torch.device("cpu"), Traffic())
    budgets = _Budgets(config, free, device)
    least: MemoryPlan | None = None
    fitting: list[MemoryPlan] = []
    for params, optimizer in _homes(config, device, stepped=any(shard.spec.stepped for unit in units for shard in unit.shards)):
        # Beside weights that only the device can reach the step is the device's, wherever the state is.
        grads = [Tier.DEVICE] if optimizer is Tier.DEVICE or (params is Tier.DEVICE and not device.is_host) else []
        whole_grads = any(shard.whole_grad for unit in units for shard in unit.shards)  # they are averaged in memory
        grads += [Tier.HOST, Tier.NVME] if config.nvme_paths and not whole_grads else [Tier.HOST]
        for grad in grads:
            for choice in LADDER:
                plan = _plan(units, config, params, optimizer, grad, choice, held_nbytes, device)
                if not budgets.over(plan):
                    fitting.append(_use_the_rest(plan, units, config, budgets, device))
                    if config.speculate and not fitting[-1].drafted:
                        continue  # what looks less far ahead may leave room for that
                    break  # a less generous choice would cache a little more, and look less far ahead
                if least is None or budgets.excess(plan) < budgets.excess(least):
                    least = plan
    if fitting:
        plan = min(fitting, key=lambda plan: (config.speculate and not plan.drafted, _cost(plan, units)))
        if config.speculate and not plan.drafted and any(shard.spec.stepped for unit in units for shard in unit.shards):
            raise _no_drafts(plan, units, budgets)
        return plan
    if least.planned_nbytes(Tier.NVME) and not config.nvme_paths:
        raise ConfigError("something has its home on NVMe, but nvme_paths is empty: name a folder on the disk to use")
    over = budgets.over(least)
    tight = max(over, key=over.__getitem__)
    raise _too_small(least, tight, budgets, config)


def check_folders(config: Config) -> None:
    """Raises ConfigError when a folder of ``nvme_paths`` is not there."""
    for path in config.nvme_paths:
        if not os.path.isdir(path):
            raise ConfigError(f"nvme_paths: there is no folder {path}. Create it, or name another.")


# Arrays that move together. A step moves each byte of the weights four times, of the state twice: weights come first.
TOGETHER = {"weights": ("weight",), "optimizer state": ("master", "exp_avg", "exp_avg_sq")}


def _use_the_rest(
    plan: MemoryPlan, units: Sequence[UnitSize], config: Config, budgets: _Budgets, device: Device
) -> MemoryPlan:
    """What the budgets have left holds second copies of state, where updates are made ahead, and units of a slower home: for good where the home is "auto", as a cache where it is
    NVMe by name. It is always the same part, so it is there at every step."""
    filling = _Filling(plan, units, budgets)
    if not device.is_host:
        # A unit is there with all of its state, and needs no transfer at all; or its weights pass, and its state stays
        # where the processor steps it.
        if device.kernels is not None:
            if config.params == config.optimizer == "auto":
                filling.place_whole(Tier.DEVICE)
            filling.add_device_slots()
        filling.widen_window()
    elif config.params == "auto" and config.device_memory is not None:
        filling.place("weights", Tier.DEVICE)
    for what, home in (("weights", config.params), ("optimizer state", config.optimizer)):
        if plan.tiers[TOGETHER[what][0]] is not Tier.NVME:
            continue
        if home == "auto":
            filling.place(what, Tier.HOST)
        elif config.host_memory is not None and config.activations != "host":
            filling.cache(what)
    if config.speculate:
        filling.add_drafts(device)
    return filling.result()


class _Filling:
    """A plan on its way to using more of the faster tiers."""

    def __init__(self, plan: MemoryPlan, units: Sequence[UnitSize], budgets: _Budgets):
        self._plan, self._units = plan, units
        self._spare, self._shares = budgets.left(plan), budgets.shared is not None
        self._terms = {tier: dict(of_tier) for tier, of_tier in plan.terms.items()}
        self._placed: dict[str, dict[int, Tier]] = {}
        self._kept: dict[str, frozenset[int]] = {}

    def place(self, what: str, tier: Tier) -> None:
        """Gives units a home on ``tier`` instead of the plan's."""
        names = TOGETHER[what]
        home = self._plan.tiers[names[0]]
        if home is tier:
            return
        chosen, nbytes = self._choose(names, tier, all_of_them=True)
        if chosen:
            self._terms[tier][what] = self._terms[tier].get(what, 0) + nbytes
            self._terms[home][what] -= nbytes
            self._take(home, -nbytes)
            for name in names:
                self._placed.setdefault(name, {}).update(dict.fromkeys(chosen, tier))

    def place_whole(self, tier: Tier) -> None:
        """Gives units a home on ``tier`` with all of their arrays, gradients too."""
        for index in sorted(range(len(self._units)), key=lambda index: self._units[index].weight_nbytes):
            unit, tiers = self._units[index], self._plan.tiers_of(index)
            sizes = {name: sum(shard.nbytes(name) for shard in unit.shards) for name in ARRAYS}
            moved = {name: nbytes for name, nbytes in sizes.items() if nbytes and tiers[name] is not tier}
            nbytes = sum(moved.values())
            if not moved or nbytes > self._spare[tier] or unit.tile_nbytes or unit.is_sliced:
                continue
            for name, size in moved.items():
                self._terms[tiers[name]][_term_of(name)] -= size
                self._spare[tiers[name]] += size
                self._terms[tier][_term_of(name)] = self._terms[tier].get(_term_of(name), 0) + size
                self._spare[tier] -= size
                self._placed.setdefault(name, {})[index] = tier

    def add_device_slots(self) -> None:
        """Lets the device step a part of the state on the host, where there is room for that."""
        slot = _device_slot_nbytes(self._units)
        if not self._plan.device_slot_nbytes and slot and SLOTS * slot <= self._spare[Tier.DEVICE]:
            self._terms[Tier.DEVICE]["optimizer slots"] = SLOTS * slot
            self._spare[Tier.DEVICE] -= SLOTS * slot
            self._plan = replace(self._plan, device_slot_nbytes=slot)

    def widen_window(self) -> None:
        """Gives gathered weights what is left: they then need not be copied again for the backward."""
        passing = sum(unit.weight_nbytes for index, unit in enumerate(self._units)
                      if not unit.tile_nbytes and index not in self._placed.get("weight", ()))  # fmt: skip
        window = self._plan.device_window_nbytes
        wider = min(passing, window + self._spare[Tier.DEVICE])
        if 0 < window != wider:
            self._terms[Tier.DEVICE]["gathered weights"] += wider - window
            self._spare[Tier.DEVICE] -= wider - window
            self._plan = replace(self._plan, device_window_nbytes=wider)

    def cache(self, what: str) -> None:
        """Keeps units' NVMe homes on the host. Their places on disk stay reserved, and the largest unit stays there."""
        names = TOGETHER[what]
        chosen, nbytes = self._choose(names, Tier.HOST, all_of_them=False)
        if chosen:
            self._terms[Tier.HOST][f"{what} kept from NVMe"] = nbytes
            self._kept |= dict.fromkeys(names, frozenset(chosen))

    def add_drafts(self, device: Device) -> None:
        """Gives units a second copy of their state beside it. None where the device computes with the home itself, or steps
        what lies there. The last units come first: their gradients are the first to land."""
        drafted = set()
        for index in reversed(range(len(self._units))):
            unit, kept = self._units[index], self._plan_kept(index)
            tiers = {name: self._placed.get(name, {}).get(index, tier) for name, tier in self._plan.tiers.items()}
            needed: dict[Tier, int] = {}
            for name in (*STATE, *SCALES.values()):
                tier = Tier.HOST if name in kept else tiers[name]
                nbytes = sum(shard.nbytes(name) for shard in unit.shards if shard.spec.stepped)
                needed[tier] = needed.get(tier, 0) + nbytes
            needed = {tier: nbytes for tier, nbytes in needed.items() if nbytes}
            on_disk = needed.get(Tier.NVME, 0)
            checksums = 4 * (on_disk // native.CHECKSUM_NBYTES + CHECKSUMMED * len(unit.shards)) if on_disk else 0
            stays = tiers["weight"] is Tier.DEVICE and not unit.is_sliced
            if not needed or stays or (Tier.DEVICE in needed and not device.is_host):
                continue
            charges = [(tier, "state of updates made ahead", nbytes) for tier, nbytes in needed.items()]
            if self._has_room(needed | {Tier.HOST: needed.get(Tier.HOST, 0) + checksums}):
                drafted.add(index)
                for tier, what, nbytes in [*charges, (Tier.HOST, "checksums", checksums)]:
                    self._take(tier, nbytes)
                    self._terms[tier][what] = self._terms[tier].get(what, 0) + nbytes
        self._plan = replace(self._plan, drafted=frozenset(drafted))

    def _has_room(self, needed: Mapping[Tier, int]) -> bool:
        """Whether all of ``needed`` fits at once."""
        together = sum(needed.get(tier, 0) for tier in SHARED) if self._shares else 0
        return all(nbytes <= self._spare[tier] for tier, nbytes in needed.items()) and together <= self._spare[Tier.HOST]

    def _take(self, tier: Tier, nbytes: int) -> None:
        for each in SHARED if self._shares and tier in SHARED else (tier,):
            self._spare[each] -= nbytes

    def _plan_kept(self, index: int) -> set[str]:
        return {name for name, units in self._kept.items() if index in units}

    def _choose(self, names: Sequence[str], tier: Tier, *, all_of_them: bool) -> tuple[list[int], int]:
        """The units that fit what is left of ``tier``, smallest first, and their bytes."""
        sizes = [sum(shard.nbytes(name) for shard in unit.shards for name in names) for unit in self._units]
        by_size = sorted(range(len(sizes)), key=sizes.__getitem__)
        chosen = []
        for index in by_size if all_of_them else by_size[:-1]:
            placed = index in self._placed.get(names[0], ())
            tiled = tier is Tier.DEVICE and self._units[index].tile_nbytes
            if 0 < sizes[index] <= self._spare[tier] and not placed and not tiled:
                self._take(tier, sizes[index])
                chosen.append(index)
        return chosen, sum(sizes[index] for index in chosen)

    def result(self) -> MemoryPlan:
        return replace(self._plan, terms=self._terms, placed=self._placed, kept=self._kept)


def traffic(plan: MemoryPlan, units: Sequence[UnitSize], *, passes: int = 1) -> dict[str, int]:
    """Bytes of a step with ``passes`` forwards and backwards over every edge, and through memory in the optimizer."""
    edges = dict.fromkeys(("nvme->host", "host->nvme", "host->device", "device->host", "optimizer"), 0)
    for index, unit in enumerate(units):
        tiers, kept = plan.tiers_of(index), plan.kept_of(index)
        for shard in unit.shards:
            weight = shard.nbytes("weight")
            on_disk = {name: tiers[name] is Tier.NVME and name not in kept for name in tiers}
            if tiers["weight"] is not Tier.DEVICE or shard.slices > 1:
                edges["host->device"] += 2 * passes * weight
                edges["nvme->host"] += 2 * passes * weight * on_disk["weight"]
            if not shard.spec.stepped:
                continue
            grad = shard.nbytes("grad")
            edges["device->host"] += passes * grad
            edges["nvme->host"] += (passes + 1) * grad * on_disk["grad"]  # read to be added to, and by the step
            edges["host->nvme"] += passes * grad * on_disk["grad"]
            for name in STATE:
                edges["nvme->host"] += shard.nbytes(name) * on_disk[name]
                edges["host->nvme"] += shard.nbytes(name) * on_disk[name]
            edges["optimizer"] += grad + 2 * sum(shard.nbytes(name) for name in (*STATE, *SCALES.values()))
    return edges


def _term_of(name: str) -> str:
    return {"weight": "weights", "grad": "gradients"}.get(name, "optimizer state")


def _homes(config: Config, device: Device, *, stepped: bool) -> list[tuple[Tier, Tier]]:
    """Homes of (weights, optimizer state) that the configuration allows, fastest first. Raises ConfigError when the device
    allows none of them."""
    everywhere = [tier for tier in Tier if tier is not Tier.NVME or config.nvme_paths]
    params = everywhere if config.params == "auto" else [Tier(config.params)]
    optimizer = everywhere if config.optimizer == "auto" else [Tier(config.optimizer)]
    if not device.is_host and stepped:
        allowed = [homes for homes in itertools.product(params, optimizer) if _is_steppable(homes, config, device)]
        if not allowed:
            raise ConfigError(
                f"params={config.params!r} with optimizer={config.optimizer!r}: what is at home on {device.where} is stepped there, "
                f"which needs kernels ({device.kernels_refusal or 'which are there'}) and all other state in memory. Use "
                "params='host' and optimizer='host', or 'auto'."
            )
        return sorted(allowed, key=lambda homes: (sum(list(Tier).index(home) for home in homes), homes))
    speed = list(Tier).index
    # Weights are moved twice a step and state once each way, but state is several times as large.
    return sorted(itertools.product(params, optimizer), key=lambda homes: (speed(homes[0]) + speed(homes[1]), homes))


def _is_steppable(homes: tuple[Tier, Tier], config: Config, device: Device) -> bool:
    """Whether weights and state at these homes can be stepped: by the processor, or on a device that it does not reach. Of
    mixed homes only what was asked for: the processor steps state on the host with less traffic."""
    if Tier.DEVICE not in homes:
        return True
    mixed = len(set(homes)) > 1
    return device.kernels is not None and Tier.NVME not in homes and not (mixed and "auto" in (config.params, config.optimizer))


def _cost(plan: MemoryPlan, units: Sequence[UnitSize]) -> tuple[int, int]:
    """Bytes of a step over the slowest edges first."""
    edges = traffic(plan, units)
    return edges["nvme->host"] + edges["host->nvme"], edges["host->device"] + edges["device->host"]


SHARED = (Tier.DEVICE, Tier.HOST)  # one memory, where the processor computes


class _Budgets:
    """What the tiers may be charged. Where the processor computes, device and host are one memory: what is not given of them is
    shared, or what the given one leaves."""

    def __init__(self, config: Config, free: Mapping[Tier, int] | None, device: Device):
        self._of = {tier: getattr(config, BUDGETS[tier]) for tier in Tier}
        open_tiers = [tier for tier, given in self._of.items() if given is None]
        for tier in open_tiers:
            self._of[tier] = free[tier] if free is not None else measured_free(tier, config, device)
        self.shared: int | None = None  # bytes of device and host together
        if device.is_host and set(SHARED) <= set(open_tiers):
            self.shared = self._of[Tier.HOST]

    def __getitem__(self, tier: Tier) -> int:
        return self._of[tier]

    def over(self, plan: MemoryPlan) -> dict[Tier, int]:
        """By how much ``plan`` is too large; empty where it fits."""
        found = {tier: more for tier in Tier if (more := plan.planned_nbytes(tier) - self._of[tier]) > 0}
        if self.shared is not None:
            more = plan.planned_nbytes(Tier.DEVICE) + plan.planned_nbytes(Tier.HOST) - self.shared
            if more > max(found.get(Tier.DEVICE, 0), found.get(Tier.HOST, 0)):
                found[Tier.HOST] = more
        return found

    def excess(self, plan: MemoryPlan) -> tuple[int, int]:
        """How far a plan is from fitting: budgets that are too small, then bytes. The nearest one is worth an error."""
        over = self.over(plan)
        return len(over), sum(over.values())

    def left(self, plan: MemoryPlan) -> dict[Tier, int]:
        """What ``plan`` leaves of every tier. Of a memory that two tiers share each has all of it."""
        left = {tier: self._of[tier] - plan.planned_nbytes(tier) for tier in Tier}
        if self.shared is not None:
            left |= dict.fromkeys(SHARED, self.shared - sum(plan.planned_nbytes(tier) for tier in SHARED))
        return left


def measured_free(tier: Tier, config: Config, device: Device | None = None) -> int:
    """Bytes of ``tier`` that a plan may use now. Without a GPU the device is this machine's memory. Of memory a part is left to what
    the engine does not hold (:mod:`infinity.limits`); of a GPU's, to activations."""
    if tier is Tier.DEVICE and device is not None and (free := device.free_nbytes()) is not None:
        return free
    if tier is not Tier.NVME:
        return limits.for_the_engine(limits.memory_left())
    return sum(shutil.disk_usage(path).free for path in config.nvme_paths)


def _plan(
    units: Sequence[UnitSize],
    config: Config,
    params: Tier,
    optimizer: Tier,
    grad: Tier,
    choice: Choice,
    held: int,
    device: Device,
) -> MemoryPlan:
    tiers = {name: home_of(name, params, optimizer, grad) for name in ARRAYS}
    shards = [shard for unit in units for shard in unit.shards]
    terms: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}

    def add(tier: Tier, what: str, nbytes: int) -> None:
        if nbytes:
            terms[tier][what] = terms[tier].get(what, 0) + nbytes

    for name, tier in tiers.items():
        add(tier, _term_of(name), sum(shard.nbytes(name) for shard in shards))

    sizes = sorted((unit.weight_nbytes for unit in units if not unit.tile_nbytes), reverse=True)
    largest = sizes[0] if sizes else 0
    slices = sorted((unit.slice_nbytes for unit in units if not unit.tile_nbytes), reverse=True)
    staging = sum(slices[: 1 + choice.units_ahead]) if params is Tier.NVME else 0
    grad_sizes = sorted((shard.nbytes("grad") for shard in shards), reverse=True)
    grad_staging = sum(grad_sizes[:3]) if grad is Tier.NVME else 0
    if choice is LADDER[-1] and grad is Tier.NVME:
        grad_staging = sum(grad_sizes[:1])
    # Four at once, each of whole checksum blocks.
    activation_staging = 8 * max(choice.service_nbytes, native.CHECKSUM_NBYTES) if config.activations == "nvme" else 0
    slot = _slot_nbytes(shards, tiers, choice.chunk)
    service = choice.service_nbytes if Tier.NVME in tiers.values() else native.BLOCK_NBYTES
    checksums = 4 * (sum(terms[Tier.NVME].values()) // native.CHECKSUM_NBYTES + len(shards) * CHECKSUMMED)

    add(Tier.HOST, "staged weights", staging)
    add(Tier.HOST, "staged gradients", grad_staging)
    add(Tier.HOST, "staged activations", activation_staging)
    add(Tier.HOST, "optimizer slots", choice.slot_count * slot)
    add(Tier.HOST, "service buffer", service)
    add(Tier.HOST, "checksums", checksums if terms[Tier.NVME] else 0)

    if node_size := max((shard.node_size for shard in shards), default=0):
        add(Tier.DEVICE, "second slices", sum(shard.whole_nbytes("weight") for shard in shards) // node_size)
    if any(shard.slices > 1 and shard.spec.stepped for shard in shards):
        whole = max(shard.whole_nbytes("grad") for shard in shards if shard.spec.stepped)
        if not any(shard.whole_grad for shard in shards):
            # Filled while weights of the same units are held; one waits, and one more is on its way to the others.
            ratio = max(shard.spec.grad_dtype.itemsize / shard.spec.dtype.itemsize for shard in shards if shard.spec.stepped)
            add(Tier.DEVICE, "gradients to be averaged", 2 * whole + round_up(int(held * ratio), native.BLOCK_NBYTES))
        # As they come, and their sum in fp32; a whole gradient that is at home elsewhere.
        own = whole * (not device.is_host) * any(shard.whole_grad for shard in shards)
        add(Tier.DEVICE, "gradients of other ranks", 2 * whole + own)
    window = 0
    tile = max((unit.tile_nbytes for unit in units), default=0)
    sliced = any(unit.is_sliced for unit in units)
    keeps = sliced and config.shard != "parameters"
    if params is not Tier.DEVICE or sliced:
        # What one moment holds, and one unit more: in backward the next unit arrives while the last one's gradients
        # are still landing.
        least = held + largest
        if config.device_memory is None:
            least += device.overlaps * largest  # and one on its way meanwhile
        total = sum(sizes)
        window = total if keeps else min(least, total)
        if config.device_memory is not None and config.params != "auto":  # with "auto" units have a home in the rest
            window = min(total, max(window, config.device_memory - tile - sum(terms[Tier.DEVICE].values())))
    add(Tier.DEVICE, "gathered weights", window)
    add(Tier.DEVICE, "a tile", tile)
    borrowed = device_slot = 0
    if not device.is_host and any(shard.spec.stepped for shard in shards):
        # Gradients that are still being read; one more, as it is converted, and as it is added to what is at home.
        borrowed = max(shard.nbytes("grad") for shard in shards)
        add(Tier.DEVICE, "gradients on their way", 3 * borrowed)
        if len({params, optimizer}) > 1 and Tier.DEVICE in (params, optimizer):
            device_slot = _device_slot_nbytes(units)
            add(Tier.DEVICE, "optimizer slots", SLOTS * device_slot)
    return MemoryPlan(
        tiers=tiers,
        units_ahead=choice.units_ahead,
        staging_nbytes=staging,
        grad_staging_nbytes=grad_staging,
        activation_staging_nbytes=activation_staging,
        slot_count=choice.slot_count,
        slot_nbytes=slot,
        service_nbytes=service,
        device_window_nbytes=window,
        borrowed_nbytes=borrowed,
        device_slot_nbytes=device_slot,
        terms=terms,
    )


def _device_slot_nbytes(units: Sequence[UnitSize]) -> int:
    """Of the largest shard that may pass through a device; 0 when nothing is stepped."""
    stepped = [shard for unit in units for shard in unit.shards if shard.spec.stepped]
    return max((slot_nbytes(sum(shard.spec.nbytes_per_element().values()), shard.numel) for shard in stepped), default=0)


def _slot_nbytes(shards: Sequence[ShardSize], tiers: dict[str, Tier], chunk: int) -> int:
    """Bytes of one optimizer slot: the file-homed arrays of ``chunk`` elements, of the shard that needs most."""
    needed = 0
    for shard in shards:
        if shard.spec.stepped:
            sizes = shard.spec.nbytes_per_element()
            per_element = sum(int(size) for name, size in sizes.items() if tiers[name] is Tier.NVME)
            # A chunk of bytes, too, is whole checksum blocks.
            least = native.CHECKSUM_NBYTES if 1 in sizes.values() else 0
            needed = max(needed, per_element * min(max(chunk, least), shard.numel))
    return round_up(needed, native.BLOCK_NBYTES)


def _no_drafts(plan: MemoryPlan, units: Sequence[UnitSize], budgets: _Budgets) -> CapacityError:
    sizes = [sum(shard.nbytes(name) for shard in unit.shards for name in (*STATE, *SCALES.values())) for unit in units
             if any(shard.spec.stepped for shard in unit.shards)]  # fmt: skip
    if all(plan.tiers_of(index)["weight"] is Tier.DEVICE for index in range(len(units))):
        return CapacityError(
            "speculate=True: all weights are at home on the device, which computes with the home itself, so that nothing can be "
            "updated beside it. Give the weights a lower home, Config(params='host') or 'nvme', or leave speculate=False."
        )
    left = ", ".join(f"{format_nbytes(nbytes)} on {tier}" for tier, nbytes in budgets.left(plan).items())
    return CapacityError(
        f"speculate=True: no unit has room for a second copy of its state ({format_nbytes(min(sizes))} for the smallest), on "
        f"the tier that is its home; left are {left}. Raise host_memory or nvme_capacity by that, keep the weights at home on "
        "the host or on NVMe, or leave speculate=False."
    )


REMEDIES = {
    Tier.DEVICE: "or give the weights a lower home: Config(params='host')",
    Tier.HOST: "or move more to disk: Config(params='nvme', optimizer='nvme', nvme_paths=[...])",
    Tier.NVME: "or keep more on the host: Config(optimizer='host')",
}


def _too_small(plan: MemoryPlan, tier: Tier, budgets: _Budgets, config: Config) -> CapacityError:
    budget, parts = budgets[tier], dict(plan.terms[tier])
    if tier is Tier.HOST and budgets.shared is not None:  # the processor computes in the same memory
        budget = budgets.shared
        parts |= {f"{what} (to compute with)": nbytes for what, nbytes in plan.terms[Tier.DEVICE].items()}
    needed = sum(parts.values())
    terms = ", ".join(f"{what} {format_nbytes(nbytes)}" for what, nbytes in parts.items())
    name = BUDGETS[tier]
    given = f"{name} is" if getattr(config, name) is not None else f"{name} was not given and what may be used of what is free is"
    where = f" at {', '.join(config.nvme_paths)}" if tier is Tier.NVME else ""
    return CapacityError(
        f"{given} {format_nbytes(budget)} ({budget} bytes){where}, but the least that works here is {format_nbytes(needed)} "
        f"({needed} bytes): {terms}. Raise {name} by {format_nbytes(needed - budget)}, {REMEDIES[tier]}."
    )
