"""UnitBuffers: the device memory of one unit's weights, of which its parameters are views.

A parameter is one view of its flat param's device buffer (:mod:`.device_buffer`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..homes.arrays import StateArray
from ..machine.device import Device, Event
from .device_buffer import DeviceBuffer
from .flat_param import FlatParam
from .weight_storages import WeightStorages

USES = 8  # recorded ones from which on those that are over are dropped


class UnitBuffers:
    """The device buffers of one unit, one for each flat param."""

    def __init__(self, flat_params: Sequence[FlatParam], device: Device):
        self._flat_params, self._device = flat_params, device
        self.all: list[DeviceBuffer] = []
        self._uses: list[Event] = []  # ends of compute with them, since they were filled
        self._leaked = False  # a view outlived a use: it may be read until they are emptied

    @property
    def flats(self) -> list[torch.Tensor]:
        """The whole device buffers."""
        return [buffer.flat for buffer in self.all]

    def allocate(self, weights: Sequence[StateArray] | None) -> None:
        """Allocates the buffers, and the parameters' views while a buffer has memory. Raises
        CapacityError if the device has no room. ``weights``: the buffers are these arrays."""
        flats: list[torch.Tensor] = []

        def make() -> None:
            for flat_param in self._flat_params:
                numel, dtype = flat_param.layout.numel, flat_param.spec.dtype
                flats.append(torch.empty(numel, dtype=dtype, device=self._device.where))

        if weights is not None:
            flats = [weight.flat for weight in weights]
        else:
            self._device.put("in", make).wait()
        self.all = [
            DeviceBuffer(flat_param, flat, self._device)
            for flat_param, flat in zip(self._flat_params, flats)
        ]

    def show(self) -> None:
        """Makes the parameters views of these. They are at rest, or not managed yet."""
        for buffer in self.all:
            buffer.show()

    def align(self, weights: Sequence[StateArray] | None, *, shows: bool) -> None:
        """Restores the views of parameters and buffers. ``weights``: the buffers are these arrays.
        ``shows``: makes the parameters views of these."""
        for index, buffer in enumerate(self.all):
            if weights is not None:
                buffer.return_to(weights[index])
            buffer.align(shows=shows)

    def empty(self) -> None:
        """Frees the memory after its uses. Not after all compute so far: the thread that launches
        it is ahead, and the next weights would come late."""
        after = [*self._uses, *([] if self._uses and not self._leaked else [self._device.now()])]
        for buffer in self.all:
            buffer.empty(after)
        self.forget_uses()

    def check_left(self) -> None:
        """Raises UsageError if memory that was left to its holders was written to."""
        for buffer in self.all:
            buffer.check_left()

    @property
    def is_held(self) -> bool:
        """Whether anything beside the engine refers to the device memory."""
        return any(buffer.is_held for buffer in self.all)

    def list_in(self, storages: WeightStorages, unit: object) -> None:
        """Registers the buffers in ``storages``, as those of ``unit``."""
        for buffer in self.all:
            buffer.list_in(storages, unit)

    def note_use(self, event: Event) -> None:
        """Records ``event``, the end of compute with them: their memory is not reused before."""
        if len(self._uses) >= USES:
            self._uses = [use for use in self._uses if not use.done]
        self._uses.append(event)
        self._leaked = self._leaked or (self._device.overlaps and self.is_held)

    def forget_uses(self) -> None:
        """Forgets what was recorded: what comes next waits for all compute so far."""
        self._uses, self._leaked = [], False

    def swap(self, other: UnitBuffers) -> None:
        """Swaps the memory, with its content, with that of the same parameters' ``other``."""
        # One statement, so that no interrupt can lose a buffer. Recovery forgets the uses.
        self.all, other.all = other.all, self.all
        self._uses, other._uses = other._uses, self._uses
        self._leaked, other._leaked = other._leaked, self._leaked


class Second:
    """A place nearer than home, from which gathered weights can come again. This one is none: an
    extension may bring others."""

    def allocate(self, flats: Sequence[torch.Tensor]) -> None:
        """Allocates its part of the device buffers ``flats``."""

    def have(self, version: int) -> bool:
        """Tells whether it has the values of ``version``."""
        return False

    def copy_out(self, flats: Sequence[torch.Tensor]) -> None:
        """Copies them to this rank's parts of ``flats``."""

    def keep(self, flats: Sequence[torch.Tensor], version: int) -> None:
        """Copies this rank's parts of gathered ``flats``, the values of ``version``."""

    def forget(self) -> None:
        """Forgets the values."""
