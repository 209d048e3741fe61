"""UnitBuffers: the device memory of one unit, of which its parameters are views.

A parameter is one view of its shard's device buffer (:mod:`.device_buffer`).

second slice   this rank's part of gathered weights, among the ranks of its machine: until they
               change, the next gather needs no other machine and no home
"""

from __future__ import annotations

from functools import cached_property

import torch

from ..distributed.collectives import Collectives
from ..errors import UsageError
from ..machine.device import PAST, Device, Event
from ..machine.tiers import Tier
from ..machine.traffic import Traffic
from ..storage.store import ShardStore
from .device_buffer import DeviceBuffer
from .dtensors import is_distributed
from .forward_edits import ForwardEdits
from .handle import ParamHandle, own_bytes
from .journal import Journal
from .parameter import RESIDENT, STORED
from .residency import Residency
from .shard import ParamShard
from .weight_storages import WeightStorages


class UnitBuffers:
    """One unit's shards, and their device buffers, of which the parameters are views."""

    def __init__(
        self, index: int, name: str, shards: list[ParamShard], device: Device | None = None
    ):
        self.index, self.name, self.shards = index, name, shards
        self._device = device or Device(torch.device("cpu"), Traffic())
        self.residency = Residency.STORED
        self.version = 0  # counts changes of the values at home
        self.buffers: list[DeviceBuffer] = []
        self._is_shared = False
        self._collectives = shards[0].collectives if shards else Collectives()
        self._ranks = self._collectives.ranks
        self._last_use: Event = PAST  # the end of the last compute with it
        # Slices for gathers inside the machine, one for each shard.
        self._second: list[torch.Tensor] = []
        self._second_version = -1  # the version of their values
        self._edits = ForwardEdits(self.shards)

    @property
    def handles(self) -> list[ParamHandle]:
        """The handles of all parameters, in the order of the shards."""
        return [handle for shard in self.shards for handle in shard.handles]

    @property
    def flats(self) -> list[torch.Tensor]:
        """The whole device buffers, one for each shard."""
        return [buffer.flat for buffer in self.buffers]

    @cached_property
    def weight_nbytes(self) -> int:
        """Bytes on the device while resident, and in staging while staged."""
        return sum(shard.weight_nbytes for shard in self.shards)

    @cached_property  # cached: a late backward needs it when the homes are gone
    def stays(self) -> bool:
        """Whether the unit's home is the device, and whole: it is resident always."""
        return self._ranks.size == 1 and all(
            shard.weight.tier is Tier.DEVICE for shard in self.shards
        )

    @property
    def is_sliced(self) -> bool:
        """Whether other ranks have other slices, so that it has to be gathered. Divided experts may
        be whole."""
        return self._ranks.size > 1

    @property
    def has_second_slice(self) -> bool:
        """Whether the current weights can be gathered inside the machine."""
        return self._second_version == self.version

    @cached_property  # read for every unit that may come next, at each use of one
    def lies_on_disk(self) -> bool:
        """Whether the weights' home is NVMe."""
        return any(shard.weight.tier is Tier.NVME for shard in self.shards)

    @property
    def is_staged_from_disk(self) -> bool:
        return self.lies_on_disk and not self.has_second_slice

    def attach(self) -> None:
        """Makes every parameter a view of its shard's device buffer. The values must be at home.
        Allocates nothing: see :meth:`allocate`."""
        for buffer in self.buffers:
            buffer.show()  # before the class changes: this needs torch's own setter
        self.conceal()

    def allocate(self) -> None:
        """Allocates the device buffers, and the parameters' views while a buffer has memory. Raises
        CapacityError if the device has no room."""

        flats: list[torch.Tensor] = []

        def make() -> None:
            for shard in self.shards:
                flats.append(
                    torch.empty(
                        shard.layout.numel, dtype=shard.spec.dtype, device=self._device.where
                    )
                )

        if self.stays:
            flats = [shard.weight.flat for shard in self.shards]
        else:
            self._device.put("in", make).wait()
        self.buffers = [
            DeviceBuffer(shard, flat, self._device) for shard, flat in zip(self.shards, flats)
        ]
        if self._ranks.node is not None:
            self._second = [f.new_empty(f.numel() // self._ranks.node.size) for f in self.flats]
        if self.stays:
            self.residency = Residency.RESIDENT
        else:
            self._empty_storages()

    def _in_node(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of ``flat`` among the ranks of its machine."""
        return flat.view(self._ranks.node.size, -1)[self._ranks.node.rank]

    def _empty_storages(self) -> None:
        for buffer in self.buffers:
            buffer.empty(self._last_use)

    def _align(self, *, shows: bool = True) -> None:
        """Restores the views of parameters and buffers. ``shows``: makes the parameters views of
        these."""
        for buffer in self.buffers:
            if self.stays:
                buffer.return_home()
            buffer.align(shows=shows)

    @property
    def is_held(self) -> bool:
        """Whether anything beside the engine refers to the device memory."""
        return any(buffer.is_held for buffer in self.buffers)

    def list_in(self, storages: WeightStorages, unit: UnitBuffers | None = None) -> None:
        """Registers the device buffers in ``storages``, as those of ``unit`` (None: this one)."""
        for buffer in self.buffers:
            buffer.list_in(storages, unit or self)

    def expose(self) -> None:
        """Makes the parameters ordinary ones, for a forward or backward that uses them."""
        self._switch(RESIDENT)
        # Values exported before this hold were compared with home already.
        self._edits.begin(
            [
                param
                for buffer in self.buffers
                if buffer.is_exported
                for param in buffer.shard.params
            ]
        )

    def conceal(self) -> None:
        """Hooks every use of a parameter: the engine handles it, even while its bytes are on the
        device.

        Otherwise a write would change a copy that is about to be dropped, and be lost without an
        error.
        """
        self._switch(STORED)

    def _switch(self, classes: tuple[type, type]) -> None:
        plain, distributed = classes
        for shard in self.shards:
            for param in shard.params:
                param.__class__ = distributed if is_distributed(param) else plain

    def watch(self, param: torch.nn.Parameter, data: torch.Tensor) -> None:
        """Watches for changes through ``data``, the ``param.data`` that a user got: torch does not
        count them."""
        self._edits.watch(param, data, self._can_be_compared)

    @property
    def _can_be_compared(self) -> bool:
        """Whether a comparison with home shows a change. Not for a device home, which has no other
        copy, nor for compressed gathers, whose values differ anyway."""
        return not self.stays and not self._ranks.compresses

    def write_edits(self, store: ShardStore, journal: Journal) -> None:
        """Sends home the changes that a forward made to its own parameters (clamping a weight, for
        example).

        Raises UsageError if a change cannot be distinguished from the earlier value.
        """
        self._look_at_exports(store)
        if self._edits.look():
            self._second_version = -1  # first: a write may fail after others have gone home
            self._edits.write(
                store,
                journal,
                self._collectives,
                compresses=self._ranks.compresses,
                stays=self.stays,
            )

    def _look_at_exports(self, store: ShardStore) -> None:
        """Watches parameters changed through an export (NumPy, DLPack), which torch does not count.

        Raises UsageError if an export moved them to other memory, or if other ranks would need the
        change.
        """
        for buffer in self.buffers:
            if buffer.is_moved:
                raise UsageError(
                    f"share_memory_() of weights of unit {self.name}: what other processes would"
                    " see of them is not what is trained, whose home is on"
                    f" {buffer.shard.weight.tier}. Share a copy:"
                    " weight.detach().clone().share_memory_()."
                )
            if not self._can_be_compared or not buffer.is_exported:
                continue
            for index, param in enumerate(buffer.shard.params):
                if self._edits.knows(param) or buffer.shard.holds(store, index, own_bytes(param)):
                    continue
                if not self._ranks.alone:
                    raise UsageError(
                        f"{buffer.shard.names[index]} was changed in a forward through an array or"
                        " an export of it. With several ranks change it through .data, or inside"
                        " infinity.full_params(..., writeback=True)."
                    )
                self._edits.watch(param, own_bytes(param), True)

    def share(self) -> None:
        """Marks the unit as used by several modules, so that its gradients may arrive far apart."""
        self._is_shared = True

    @property
    def is_shared(self) -> bool:
        """Whether several modules use the unit."""
        return self._is_shared

    def note_use(self, event: Event) -> None:
        """Records ``event``, the end of compute with the unit: its memory is not reused before."""
        self._last_use = event
