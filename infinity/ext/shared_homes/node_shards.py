"""Node shards: this rank's part of gathered weights, among the ranks of its machine. Until they
change, the next gather needs no other machine and no home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ... import native
from ...core.machine.device import Device
from ...core.machine.tiers import Tier
from ...core.plan.unit_sizes import UnitSize
from ...core.run.job import Job
from ...core.seams import Events, Extension, Term
from ...core.units.unit_buffers import Second
from ...ranks.channel import Channel
from ...ranks.collectives import Collectives

WHAT = "node shards"  # the name of their bytes in plans


class NodeShards(Second):
    """This rank's parts of one unit's gathered weights, among the ranks ``node`` of its machine."""

    def __init__(self, node: Channel):
        self._node = node
        self._parts: list[torch.Tensor] = []  # one for each flat param
        self._version = -1  # of their values

    def allocate(self, flats: Sequence[torch.Tensor]) -> None:
        """Allocates the shards of the device buffers ``flats``."""
        self._parts = [flat.new_empty(flat.numel() // self._node.size) for flat in flats]

    def have(self, version: int) -> bool:
        """Tells whether they have the values of ``version``."""
        return self._version == version

    def copy_out(self, flats: Sequence[torch.Tensor]) -> None:
        """Copies them to this rank's parts of ``flats``."""
        for own, flat in zip(self._parts, flats):
            self._part(flat).copy_(own)

    def keep(self, flats: Sequence[torch.Tensor], version: int) -> None:
        """Copies this rank's parts of gathered ``flats``, the values of ``version``, unless they
        are here already."""
        if not self.have(version):
            for own, flat in zip(self._parts, flats):
                own.copy_(self._part(flat))
            self._version = version

    def forget(self) -> None:
        """Forgets the values."""
        self._version = -1

    def _part(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self._node.size, -1)[self._node.rank]


class SecondShards(Extension):
    """The node shards of all units of a job. Stale weights have none: no memory is planned for
    them, so all ranks gather them each time."""

    _charge: native.Charge

    @classmethod
    def terms(cls, config: Any, units: Sequence[UnitSize], device: Device) -> Iterator[Term]:
        """Yields the bytes of all node shards."""
        flat_params = [flat for unit in units for flat in unit.flat_params]
        if node_size := max((flat.node_size for flat in flat_params), default=0):
            whole = sum(flat.whole_nbytes("weight") for flat in flat_params)
            yield Term(Tier.DEVICE, WHAT, whole // node_size)

    @classmethod
    def begin(
        cls, config: Any, device: Device, collectives: Collectives, events: Events
    ) -> SecondShards | None:
        """Returns the extension if machines share gathered weights."""
        if (node := collectives.ranks.node_group) is None:
            return None
        shards = cls()
        events.allocated.append(partial(shards.charge, node))
        return shards

    def charge(self, node: Channel, job: Job) -> None:
        """Charges the planned bytes, and lets units that are gathered keep their node shards."""
        planned = job.planned.plan.terms[Tier.DEVICE].get(WHAT, 0)
        self._charge = job.ledger.reserve(Tier.DEVICE, planned, WHAT)
        for unit in job.units:
            if unit.flat_params[0].ranks.node_group is not None:
                unit.come_from(NodeShards(node))
