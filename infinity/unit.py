"""ParamUnit: the parameters that move together, and what of them is where.

    STORED     home only; costs nothing above it
    FETCHING   home -> staging slots in flight; slots charged
    STAGED     bytes in staging slots, verified when gathered; slots charged
    GATHERING  slots (or a memory home) -> device, and from other ranks what they have
    RESIDENT   parameters usable; device bytes charged

A parameter's storage is one view of its shard's device buffer, whose storage is resized to zero and back and never
replaced: views that autograd saved stay valid.

second slice   of weights that were gathered, this rank's part among the ranks of its machine: until they change, the next
               gather needs no other machine and no home
"""

from __future__ import annotations

import errno
from collections import deque
from enum import Enum, auto

import torch

from . import guard, native
from .collectives import Peers, Pending
from .errors import InfinityError, PeerError, StorageError, UsageError
from .parameter import ParamHandle, ResidentParameter, StoredParameter, own_bytes
from .shard import ParamShard
from .store import ShardStore
from .tiers import Ledger, Reservation, Tier


class Residency(Enum):
    """Where a unit's weights are, beyond their home."""

    STORED = auto()
    FETCHING = auto()
    STAGED = auto()
    GATHERING = auto()
    RESIDENT = auto()


MOVES = {
    Residency.STORED: {Residency.FETCHING, Residency.GATHERING},
    Residency.FETCHING: {Residency.STAGED, Residency.STORED},
    Residency.STAGED: {Residency.GATHERING, Residency.STORED},
    Residency.GATHERING: {Residency.RESIDENT, Residency.STORED},
    Residency.RESIDENT: {Residency.STORED},
}


class ParamUnit:
    """One unit: its shards, its state, and the moves between states."""

    def __init__(self, index: int, name: str, shards: list[ParamShard]):
        self.index, self.name, self.shards = index, name, shards
        self.residency = Residency.STORED
        self.version = 0  # counts changes of the values at home
        self.flats: list[torch.Tensor] = []
        self.handles: list[ParamHandle] = []
        self.is_shared = False  # whether several modules use it, so that its gradients may come long after each other
        self._history: deque[str] = deque(maxlen=6)
        self._slots: list[native.Lease] = []
        self._reads: list[native.Ticket] = []
        self._charge: Reservation | None = None
        self._peers = shards[0].peers if shards else Peers()
        self._pending: list[Pending] = []  # gathers under way
        self.ready = 0  # reductions that every rank could start when they met for the last gather
        self._second: list[torch.Tensor] = []  # slices for the machine's own gathers, one for each shard
        self._second_version = -1  # of the values they are of
        self._versions: list[int] = []  # torch's change counters when the parameters were exposed
        self._watched: dict[torch.nn.Parameter, torch.Tensor | None] = {}  # whose .data was handed out -> value before

    @property
    def weight_nbytes(self) -> int:
        """Bytes on the device while resident, and in staging while staged."""
        return sum(shard.weight_nbytes for shard in self.shards)

    @property
    def stays(self) -> bool:
        """Whether the unit's home is the device, and whole: it is resident always."""
        return self._peers.size == 1 and all(shard.weight.tier is Tier.DEVICE for shard in self.shards)

    @property
    def has_second_slice(self) -> bool:
        """Whether the weights as they are now can be gathered inside the machine."""
        return self._second_version == self.version

    @property
    def is_staged_from_disk(self) -> bool:
        return not self.has_second_slice and any(shard.weight.tier is Tier.NVME for shard in self.shards)

    def attach(self) -> None:
        """Makes every parameter a view of its shard's device buffer. The values must already be at home."""
        for shard in self.shards:
            if self.stays:
                flat = shard.weight.flat
            else:
                flat = torch.empty(shard.layout.numel, dtype=shard.spec.dtype, device="cpu")
            self.flats.append(flat)
            for param, place in zip(shard.params, shard.layout.placements):
                param.data = place.view(flat)  # before the switch of classes: torch's own setter
        if self._peers.node is not None:
            self._second = [torch.empty(f.numel() // self._peers.node.size, dtype=f.dtype, device="cpu") for f in self.flats]
        if self.stays:
            self.residency = Residency.RESIDENT
        else:
            self._empty_storages()
        self.conceal()

    # --- moves ---

    def fetch(self, store: ShardStore, slots: list[native.Lease]) -> None:
        """STORED -> FETCHING: starts reading into ``slots``, one per shard, once the last step's bytes are at home."""
        self._move(Residency.FETCHING)
        self._slots = slots
        self._reads = [
            store.engine.read(shard.weight.extent, 0, slot.address, shard.slice_nbytes, after=shard.update)
            for shard, slot in zip(self.shards, slots)
        ]

    def stage(self) -> None:
        """FETCHING -> STAGED: waits for the reads. When one failed the slots are given back and the error is raised."""
        error: Exception | None = None
        for read in self._reads:  # all of them: a slot must not be given back with a read under way into it
            try:
                read.wait()
            except InfinityError as failure:
                error = error or failure
        self._move(Residency.STAGED if error is None else Residency.STORED)
        if error is not None:
            self._release_slots()
            raise error

    def drop(self, store: ShardStore) -> None:
        """FETCHING or STAGED -> STORED without using the bytes. Reads that have not started are taken back."""
        if self.residency not in (Residency.FETCHING, Residency.STAGED):
            raise self._illegal("be dropped")
        error: Exception | None = None
        for read in self._reads:
            store.engine.cancel(read)
        for read in self._reads:
            try:
                read.wait()
            except InfinityError as failure:
                cancelled = isinstance(failure, StorageError) and failure.errno == errno.ECANCELED
                error = error or (None if cancelled else failure)
        self._move(Residency.STORED)
        self._release_slots()
        if error is not None:
            raise error

    def gather(self, store: ShardStore, ledger: Ledger) -> None:
        """STAGED (or STORED, for a memory home) -> RESIDENT."""
        self.start_gather(store, ledger)
        self.finish_gather(store)

    def start_gather(self, store: ShardStore, ledger: Ledger) -> None:
        """STAGED (or STORED, for a memory home) -> GATHERING: verifies and copies onto the device what this rank has; what
        others have is on its way."""
        from_disk = self.is_staged_from_disk
        if self.residency is not (Residency.STAGED if from_disk else Residency.STORED):
            raise self._illegal("be gathered")
        charge = ledger.reserve(Tier.DEVICE, self.weight_nbytes, f"unit {self.name}")
        self._move(Residency.GATHERING)
        self._charge = charge
        try:
            nbytes = sum(shard.slice_nbytes for shard in self.shards)
            with store.traffic.copying("host->device", nbytes, self.name):
                for i, (shard, flat) in enumerate(zip(self.shards, self.flats)):
                    guard.open(flat.untyped_storage())
                    flat.untyped_storage().resize_(shard.weight_nbytes)
                    if self.has_second_slice:
                        self._in_node(flat).copy_(self._second[i])
                    else:
                        flat[slice(*shard.own("weight"))].copy_(self._staged_bytes(store, i) if from_disk else shard.weight.flat)
            gather = self._peers.gather_in_node if self.has_second_slice else self._peers.gather
            for i, flat in enumerate(self.flats):
                pending = gather(flat, f"{self.name} ({i})")
                if pending is not None:
                    self._pending.append(pending)
                    self.ready = pending.ready
        except BaseException:
            self._fail_gather()
            raise
        for read in self._reads:
            store.traffic.mark("nvme->host", self.name, *read.times)
        self._release_slots()

    def finish_gather(self, store: ShardStore) -> None:
        """GATHERING -> RESIDENT: waits for the other ranks."""
        try:
            if self._pending:
                with store.traffic.stalled("all-gather", self.name):
                    for pending in self._pending:
                        pending.wait()
        except BaseException:
            self._fail_gather()
            raise
        self._pending = []
        self._move(Residency.RESIDENT)
        if self._peers.node is not None and not self.has_second_slice:
            for second, flat in zip(self._second, self.flats):
                second.copy_(self._in_node(flat))
            self._second_version = self.version

    def _in_node(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``flat`` among the ranks of its machine."""
        return flat.view(self._peers.node.size, -1)[self._peers.node.rank]

    def _fail_gather(self) -> None:
        for pending in self._pending:  # what is under way still writes to the device's memory
            try:
                pending.wait()
            except PeerError:
                pass
        self._pending = []
        self._move(Residency.STORED)
        self._empty(self._charge)

    def _staged_bytes(self, store: ShardStore, i: int) -> torch.Tensor:
        shard, slot = self.shards[i], self._slots[i]
        store.verify(shard.weight, slot.address, shard.slice_nbytes)
        return native.tensor_at(store.staging.region, slot.address, shard.slice_numel, shard.spec.dtype)

    def release(self) -> None:
        """RESIDENT -> STORED. The home still has the bytes: weights change only in the optimizer's step."""
        if self.residency is not Residency.RESIDENT or self.stays:
            raise self._illegal("be released")
        self._move(Residency.STORED)
        self._empty(self._charge)

    def _empty(self, charge: Reservation) -> None:
        self._empty_storages()
        self._release_slots()
        charge.release()
        self._charge = None

    def _empty_storages(self) -> None:
        for flat in self.flats:
            storage = flat.untyped_storage()
            guard.open(storage)  # where gathering failed before this one
            storage.resize_(0)
            guard.close(storage)

    def _release_slots(self) -> None:
        for slot in self._slots:
            slot.release()
        self._slots, self._reads = [], []

    def expose(self) -> None:
        """Makes the parameters ordinary ones: something is about to compute with them."""
        self._switch(ResidentParameter)
        self._watched.clear()
        self._versions = [param._version for shard in self.shards for param in shard.params]

    def watch(self, param: torch.nn.Parameter, data: torch.Tensor) -> None:
        """``param.data`` was handed out, through which torch does not count changes."""
        if param not in self._watched:
            # At home on the device there is no other copy to tell a change by; what came compressed is not what is at home.
            self._watched[param] = data.clone() if self.stays or self._peers.compresses else None

    def write_edits(self, store: ShardStore) -> None:
        """Sends home what a forward changed in its own parameters (a clamp of a weight, say).

        Raises UsageError where the change cannot be told from the value before.
        """
        params = [(shard, i, param) for shard in self.shards for i, param in enumerate(shard.params)]
        for (shard, index, param), version in zip(params, self._versions):
            changed, watched = param._version != version, param in self._watched
            if not changed and not watched:
                continue
            before = self._watched.get(param)
            self._peers.same(f"changing {param._infinity.name} in a forward", own_bytes(param))
            if self._peers.compresses and before is None:
                raise UsageError(
                    f"{param._infinity.name} was changed in place inside a forward, but it came there compressed. Change it "
                    "through .data, inside infinity.full_params(..., writeback=True), or set compress_gathers=False."
                )
            if self.stays and before is None:
                if "master" not in shard.arrays:
                    continue  # the device's bytes are the master
                raise UsageError(
                    f"{param._infinity.name} was changed in place inside a forward, and its master cannot follow. "
                    "Change it through .data, or inside infinity.full_params(..., writeback=True)."
                )
            shard.write_changes(store, index, own_bytes(param), before=before, version=shard.weight.extent.version)
            self._second_version = -1

    def conceal(self) -> None:
        """Makes touching a parameter come by the engine, whether its bytes are still on the device or not.

        A write would otherwise change a copy that is about to be dropped, and be lost without a word.
        """
        self._switch(StoredParameter)

    def _switch(self, cls: type) -> None:
        for shard in self.shards:
            for param in shard.params:
                param.__class__ = cls

    def _move(self, to: Residency) -> None:
        if to not in MOVES[self.residency]:
            raise self._illegal(f"go to {to.name}")
        self._history.append(f"{self.residency.name}->{to.name}")
        self.residency = to

    def _illegal(self, what: str) -> UsageError:
        moves = ", ".join(self._history) or "none"
        return UsageError(f"unit {self.name} is {self.residency.name} and cannot {what}; its last moves: {moves}")
