"""WholeGradients: keeps this rank's gradients whole on the device until they are averaged or sent
home.

whole     a shard's gradient of this rank's part of the batch, all elements
"""

from __future__ import annotations

import torch

from .. import native
from ..errors import CapacityError
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.tiers import Tier
from ..state.handle import ParamHandle
from ..state.shard import ParamShard
from ..state.unit import ParamUnit


class WholeGradients:
    """Accumulates gradients in memory that the ledger charges. Used from the thread that runs
    backward."""

    def __init__(self, ledger: Ledger, device: Device):
        self._ledger, self._device = ledger, device
        self._kept: dict[ParamShard, tuple[torch.Tensor, native.Charge]] = {}
        self._got: dict[ParamShard, set[int]] = {}  # parameters with a gradient, by index
        self._without_room: set[ParamShard] = set()

    def add(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Adds ``grad`` to the sum of ``handle``. Raises CapacityError if the device has no room
        for a shard's first gradient."""
        shard = handle.shard
        view = shard.layout.placements[handle.index].view(self.take(handle.unit, shard))
        got = self._got.setdefault(shard, set())
        view.add_(grad) if handle.index in got else view.copy_(grad)
        got.add(handle.index)

    def add_if_room(self, handle: ParamHandle, grad: torch.Tensor) -> bool:
        """Adds ``grad`` as :meth:`add` does. Returns False if the device has no room, and from then
        on for every gradient of the shard."""
        if handle.shard in self._without_room:
            return False
        try:
            self.add(handle, grad)
        except CapacityError:
            self._without_room.add(handle.shard)
            return False
        return True

    def take(self, unit: ParamUnit, shard: ParamShard) -> torch.Tensor:
        """Returns memory for a shard's gradient, allocated if it has none. Its elements are
        undefined until added."""
        if shard not in self._kept:
            nbytes = shard.layout.numel * shard.spec.grad_dtype.itemsize
            charge = self._ledger.reserve(
                Tier.DEVICE, nbytes, f"the gradients of unit {unit.name}", passing=True
            )
            whole = torch.empty(
                shard.layout.numel, dtype=shard.spec.grad_dtype, device=self._device.where
            )
            self._kept[shard] = whole, charge
        return self._kept[shard][0]

    def has(self, shard: ParamShard) -> bool:
        """Returns whether any parameter of ``shard`` has a gradient here."""
        return bool(self._got.get(shard))

    def has_gradient(self, handle: ParamHandle) -> bool:
        """Returns whether the parameter of ``handle`` has a gradient here."""
        return handle.index in self._got.get(handle.shard, ())

    def pop_got(self, shard: ParamShard) -> set[int]:
        """Forgets which parameters of ``shard`` have a gradient, and returns their indices."""
        return self._got.pop(shard, set())

    def pop(self, shard: ParamShard) -> tuple[torch.Tensor, native.Charge]:
        """Moves a shard's memory to the caller, who releases its charge."""
        return self._kept.pop(shard)

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has a gradient here."""
        return not any(self._got.values())

    def drop(self) -> None:
        """Frees all memory."""
        for _, charge in self._kept.values():
            charge.release()
        self._kept.clear()
        self._got.clear()
