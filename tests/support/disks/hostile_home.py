"""The hostile home: one home of tests that is harder than host memory and disk.

Words used here:

**turn**: the begin of an outermost use, of two at most after each pass and each step. Every array
that no running pass needs is then brought from disk to memory, or from memory to disk. Half of a
flat param's arrays are on disk at any time, and each turn makes new memory. **poison**: bytes of
0xFF, which are NaN in every floating dtype. A turn poisons what it leaves. Poisoned are also device
buffers, as they are freed and as they are made, staged bytes once they were copied, and memory as
it is leased.

A feature that keeps a place, memory or a view over two uses computes with NaN, or raises. A wrap is
at this home if one of its folders for NVMe is made by :func:`hostile_folder`; all of its state is
planned for NVMe then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from infinity import native
from infinity.config import Config
from infinity.core import seams
from infinity.core.homes.arrays import StateArray, bytes_of
from infinity.core.homes.staging import ThroughHost
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.device import Device
from infinity.core.machine.tiers import Tier
from infinity.core.plan import plan
from infinity.core.run.job import Job
from infinity.core.units.flat_param_spec import SCALES
from infinity.core.units.unit import ParamUnit
from infinity.errors import StorageError

NAME = "hostile"
_grad_tiers = plan._grad_tiers
POISON = 0xFF
MOST_TURNS = 2  # between two passes or steps: a loop over parameters is one use for each
MOST_NBYTES = 64 * 2**20  # of poisoned memory that a model keeps, so that it is not given again


def hostile_folder(folder: Path) -> Path:
    """Makes the folder below ``folder`` that makes a wrap hostile. Wraps of this process look for
    it from now on."""
    for listed, kind in ((seams.EXTENSIONS, Turns), (seams.STAGING_BACKENDS, PoisonedReads)):
        if kind not in listed:
            listed.insert(0, kind)
    plan._grad_tiers = grad_homes
    (folder / NAME).mkdir(parents=True, exist_ok=True)
    return folder / NAME


def is_hostile(config: Config) -> bool:
    return any(Path(path).name == NAME for path in config.nvme_paths)


def grad_homes(params, optimizer, units, config, device):
    """Gradients on disk, which a plan without budgets does not choose."""
    homes = _grad_tiers(params, optimizer, units, config, device)
    return homes[-1:] if is_hostile(config) else homes


class Turns(seams.Extension):
    """The turns of one wrapped model. ``moved``: how many arrays they have brought elsewhere."""

    def __init__(self) -> None:
        self.count = self.moved = 0
        self._more = MOST_TURNS
        # Disk space of arrays that are in memory
        self._spaces: WeakKeyDictionary[StateArray, StateArray] = WeakKeyDictionary()
        self._left: deque[torch.Tensor] = deque()
        self._left_nbytes = 0
        self._poisons: list[native.Region] = []  # the last one is the largest
        self._poisoning: list[native.Ticket] = []

    @classmethod
    def begin(cls, config, device, collectives, events):
        if not is_hostile(config):
            return None
        device.__class__, device.freed, device.fillers = PoisonedDevice, set(), []
        return cls()

    def install(self, job: Job, model) -> None:
        self._job, job.store.__class__ = job, PoisonedStore
        job.events.use_ready.append(self.take)
        job.events.pass_ended.append(self.go_on)
        job.events.step_ended.append(self.go_on)

    def go_on(self, *_) -> None:
        """Lets more turns come: a pass or a step has ended."""
        self._more = MOST_TURNS

    def take(self) -> None:
        """Takes a turn."""
        job = self._job
        if not self._more or job.store.io is None or job.store.guard.failure is not None:
            return  # or unwrapped, or the use is about to raise
        self.count, self._more = self.count + 1, self._more - 1
        job.gradients.homes.close_all(flat for unit in job.units for flat in unit.flat_params)
        job.gradients.homes.settle()
        units = [
            unit
            for unit in job.units
            if not any(each in job.running.holds for each in (unit, *unit.older))
        ]
        job.prefetcher.release_all(units)
        places = {array: tier for unit in units for array, tier in self._places(unit)}
        # Memory that is made in a user's inference mode could not be written to outside of it.
        with job.store.guard, torch.inference_mode(False), torch.no_grad():
            self._bring(places)
        for unit in units:
            for each in (unit, *unit.older):
                each.lies_on_disk = self._tier(unit.index) is Tier.NVME

    def _places(self, unit: ParamUnit) -> Iterator[tuple[StateArray, Tier]]:
        """Yields the arrays of ``unit`` that move, once nothing uses them, and their next tiers."""
        for flat_param in unit.flat_params:
            homes = flat_param.homes
            homes.wait_running(), homes.wait_readers()
            arrays = dict(homes.arrays)
            scales = [arrays.pop(name) for name in SCALES.values() if name in arrays]
            weights = [arrays.pop("weight")]
            for reader in homes.readers.values():
                weights += [array for array in (reader.array, reader.fresh) if array is not None]
            # The weights of a unit are staged together, those of each version.
            yield from ((array, self._tier(unit.index)) for array in weights)
            for place, array in enumerate([*arrays.values(), *homes.kept.values()], 1):
                yield array, self._tier(unit.index + place)
            yield from ((array, Tier.HOST) for array in scales)  # updates have no slots for them

    def _tier(self, place: int) -> Tier:
        return Tier.HOST if (self.count + place) % 2 else Tier.NVME

    def _bring(self, places: dict[StateArray, Tier]) -> None:
        """Brings arrays to these tiers, and poisons what they leave. Those that are there stay, or
        are given other memory."""
        store, moves = self._job.store, []
        while self._poisoning:  # else it might come after what is written there now
            with contextlib.suppress(StorageError):
                self._poisoning.pop().wait()
        for array, tier in places.items():
            if not array.numel or array.tier is tier is Tier.NVME:
                continue
            if tier is Tier.HOST:
                other = new_memory(array)
            elif (other := self._spaces.pop(array, None)) is None:  # it was made in memory
                other = store.space.allocate(array.nbytes, NAME, None)
            moves.append((array, other, self._copy(array, other)))
        for *_, ticket in moves:
            if ticket is not None:
                ticket.wait()
        for array, other, _ in moves:
            other.extent.version = array.extent.version
            change_places(array, other, store)
            if other.flat is None:
                self._spaces[array] = other
                poison = self._poison(other.extent.nbytes)
                self._poisoning.append(self._write(other.extent, poison.address, poison))
            else:
                other.flat.view(torch.uint8).fill_(POISON)
                self._leave(other.flat)
        self.moved += len(moves)

    def _copy(self, array: StateArray, other: StateArray) -> native.Ticket | None:
        """Starts copying ``array`` to the place of ``other``. None: it is copied."""
        if array.flat is None:
            io, checksums = self._job.store.io, self._job.store.checksums
            extent, lease = array.extent, held(other.region)
            return io.read(
                extent, 0, other.extent.address, extent.nbytes, lease=lease, checksum=checksums
            )
        if other.flat is None:
            return self._write(other.extent, array.extent.address, array.region)
        other.flat.copy_(array.flat)
        return None

    def _write(
        self, extent: native.Extent, address: int, region: native.Region | None
    ) -> native.Ticket:
        store = self._job.store
        return store.io.write(
            extent, 0, address, extent.nbytes, lease=held(region), checksum=store.checksums
        )

    def _poison(self, nbytes: int) -> native.Region:
        """Returns so much poison."""
        if not self._poisons or self._poisons[-1].nbytes < nbytes:
            region = native.Region(nbytes, huge_pages=False, touch_threads=0)
            native.tensor_at(region, region.address, nbytes, torch.uint8).fill_(POISON)
            self._poisons.append(region)  # the others may be being written
        return self._poisons[-1]

    def _leave(self, memory: torch.Tensor) -> None:
        """Keeps poisoned memory, so that it is not given again soon."""
        self._left.append(memory)
        self._left_nbytes += memory.nbytes
        while self._left_nbytes > MOST_NBYTES:
            self._left_nbytes -= self._left.popleft().nbytes


def held(region: native.Region | None) -> native.Lease | None:
    """Returns a lease of the region. A transfer that has it keeps the memory, whatever becomes of
    the turn that started it."""
    return None if region is None else native.PinnedPool(region).try_lease(region.nbytes)


class NoCharge:
    def release(self) -> None:
        pass


def new_memory(array: StateArray) -> StateArray:
    """Makes memory for ``array``, which nothing has had, in whole blocks of a disk."""
    region = native.Region(array.extent.nbytes, huge_pages=False, touch_threads=0)
    flat = native.tensor_at(region, region.address, array.numel, array.dtype)
    extent = native.Extent.in_memory(region.address, array.nbytes, region)
    return StateArray(Tier.HOST, array.dtype, array.numel, extent, flat, None, region)


def change_places(array: StateArray, other: StateArray, store: ArrayStore) -> None:
    for name in ("tier", "extent", "flat", "region"):
        mine, its = getattr(array, name), getattr(other, name)
        setattr(array, name, its), setattr(other, name, mine)
    array.charge = array.charge or NoCharge()
    places = store.space._places
    mine, its = places.pop(array, None), places.pop(other, None)
    places.update({each: place for each, place in ((array, its), (other, mine)) if place})


class PoisonedReads(ThroughHost):
    """Reads through host memory, which is poisoned once its bytes were asked for. What is given are
    other bytes, poisoned when the next are asked for."""

    given: torch.Tensor | None = None

    @classmethod
    def works(cls, config, device):
        return is_hostile(config)

    def arrived(self, transfer, address, nbytes):
        with torch.inference_mode(False):  # whatever the user's
            staged = super().arrived(transfer, address, nbytes)
            if self.given is not None:
                self.given.fill_(POISON)
            self.given = staged.clone()
            staged.fill_(POISON)
        return self.given


class PoisonedStore(ArrayStore):
    """Poisons memory as it is leased."""

    def take_lease(self, pool, nbytes, give_up=lambda: False):
        lease = super().take_lease(pool, nbytes, give_up)
        bytes_of(pool, lease, nbytes).fill_(POISON)
        return lease


class PoisonedDevice(Device):
    """The processor, whose buffers are poisoned as they are freed and as they are made: never where
    one was before.

    freed
        The addresses where buffers were.
    fillers
        Memory that keeps the allocator from giving those again.
    """

    freed: set[int]
    fillers: list[torch.Tensor]

    def resize(self, storage, nbytes, *, after=()):
        before = storage.nbytes()
        if before and not nbytes:
            poison(storage)
            self.freed.add(storage.data_ptr())
        super().resize(storage, nbytes, after=after)
        if nbytes and not before:
            for _ in range(16):
                if storage.data_ptr() not in self.freed:
                    break
                storage.resize_(0)
                self.fillers.append(torch.empty(nbytes, dtype=torch.uint8))
                storage.resize_(nbytes)
            poison(storage)
        if sum(map(len, self.fillers)) > MOST_NBYTES:
            self.fillers.clear(), self.freed.clear()


def poison(storage: torch.UntypedStorage) -> None:
    storage_bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
    storage_bytes.fill_(POISON)
