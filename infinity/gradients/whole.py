"""WholeGradients: keeps gradients of this rank on the device, whole, until they are averaged over the ranks or sent home.

whole     a shard's gradient of this rank's part of the batch, all elements
"""

from __future__ import annotations

import torch

from .. import native
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.tiers import Tier
from ..state.handle import ParamHandle
from ..state.shard import ParamShard
from ..state.unit import ParamUnit


class WholeGradients:
    """Adds gradients up in memory that the ledger charges. Used from the thread that runs backward."""

    def __init__(self, ledger: Ledger, device: Device):
        self._ledger, self._device = ledger, device
        self._kept: dict[ParamShard, tuple[torch.Tensor, native.Charge]] = {}
        self._got: dict[ParamShard, set[int]] = {}  # parameters with a gradient, by index

    def add(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Adds ``grad`` to what is kept of ``handle``'s. Raises CapacityError where the device has no room for a shard's first."""
        shard = handle.shard
        view = shard.layout.placements[handle.index].view(self.take(handle.unit, shard))
        got = self._got.setdefault(shard, set())
        view.add_(grad) if handle.index in got else view.copy_(grad)
        got.add(handle.index)

    def take(self, unit: ParamUnit, shard: ParamShard) -> torch.Tensor:
        """Takes memory for a shard's gradient, unless it has some. Its elements are undefined until they are added."""
        if shard not in self._kept:
            nbytes = shard.layout.numel * shard.spec.grad_dtype.itemsize
            charge = self._ledger.reserve(Tier.DEVICE, nbytes, f"the gradients of unit {unit.name}", passing=True)
            whole = torch.empty(shard.layout.numel, dtype=shard.spec.grad_dtype, device=self._device.where)
            self._kept[shard] = whole, charge
        return self._kept[shard][0]

    def has(self, shard: ParamShard) -> bool:
        """Tells whether any parameter of ``shard`` has a gradient here."""
        return bool(self._got.get(shard))

    def has_gradient(self, handle: ParamHandle) -> bool:
        """Tells whether ``handle``'s parameter has a gradient here."""
        return handle.index in self._got.get(handle.shard, ())

    def pop_got(self, shard: ParamShard) -> set[int]:
        """Forgets which parameters of ``shard`` have a gradient, and returns their indices."""
        return self._got.pop(shard, set())

    def pop(self, shard: ParamShard) -> tuple[torch.Tensor, native.Charge]:
        """Gives a shard's memory to the caller, who releases its charge."""
        return self._kept.pop(shard)

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has a gradient here."""
        return not any(self._got.values())

    def drop(self) -> None:
        """Gives all memory back."""
        for _, charge in self._kept.values():
            charge.release()
        self._kept.clear()
        self._got.clear()
