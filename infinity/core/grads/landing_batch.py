"""LandingBatch: lands the gradients of one unit together, in memory that the device computes with.

One call of torch copies or adds them all. A call for each would cost the thread that launches it
more than a small gradient takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..machine.device import Device
from ..machine.traffic import Traffic
from ..units.handle import ParamHandle
from .changes import GradChanges
from .landing import SHARED_NBYTES
from .norms import LandingNorms
from .record import GradRecord

TakeNorm = Callable[[torch.Tensor, float], torch.Tensor]
# By parameter: the record, the place at home, the value, and how to take a norm
Waiting = dict[ParamHandle, tuple[GradRecord, torch.Tensor, torch.Tensor, TakeNorm]]


class LandingBatch:
    """Gradients that count as landed, and whose bytes are not home yet. Used from the thread that
    runs backward or the step.

    Precondition of :meth:`add`: the backward whose gradient it is has not ended, so that recovery
    finds the gradient torn.
    """

    def __init__(self, device: Device, traffic: Traffic, norms: LandingNorms, changes: GradChanges):
        self._device, self._traffic = device, traffic
        self.norms, self.changes = norms, changes
        self.drop()

    def add(
        self,
        handle: ParamHandle,
        home: torch.Tensor,
        value: torch.Tensor,
        take_norm: TakeNorm,
        *,
        adds: bool,
    ) -> None:
        """Adds ``value`` to what lands next: it is set as the gradient of ``handle``, ``home``, or
        added to it (``adds``). What waits of another unit lands first: a plan has room for one, but
        a GPU for few bytes."""
        if (unit := handle.unit) is not self._unit or handle in self._set or handle in self._added:
            self.land()
            self._unit = unit
        record = handle.grad
        if adds and record.factors:
            self.changes.apply_factors(handle, [home])
        record.norm = None
        (self._added if adds else self._set)[handle] = record, home, value, take_norm
        self._nbytes += home.nbytes
        if self._nbytes >= SHARED_NBYTES:
            self.land()

    def land(self) -> None:
        """Lands all that waits. Also takes the requested norms while the bytes are in cache, which
        saves a second read, perhaps from disk."""
        if self._unit is None:
            return
        start, order, nbytes, freed = time.perf_counter(), self.norms.order, self._nbytes, 0
        for waiting, call in (
            (self._set, torch._foreach_copy_),
            (self._added, torch._foreach_add_),
        ):
            if waiting:
                _, homes, values, _ = zip(*waiting.values())
                with torch.no_grad():
                    call(homes, values)
            for record, home, value, take_norm in waiting.values():
                record.norm = None if order is None else (order, take_norm(home, order))
                freed += value.nbytes
        name, is_host = self._unit.name, self._device.is_host  # else it stays on the device
        self.drop()
        self._traffic.copied_here("device->host", is_host and nbytes, name, start)
        if is_host:
            self._device.note_freed(freed)  # once autograd lets go of them

    def drop(self) -> None:
        """Forgets what waits."""
        self._unit: Any = None
        self._nbytes = 0
        self._set: Waiting = {}
        self._added: Waiting = {}
