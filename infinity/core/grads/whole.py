"""WholeGradients: keeps this rank's gradients whole on the device until they are averaged or sent
home.

whole     a flat param's gradient of this rank's part of the batch, all elements
"""

from __future__ import annotations

import torch

from ... import native
from ...errors import CapacityError
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.tiers import Tier
from ..units.flat_param import FlatParam
from ..units.handle import ParamHandle
from ..units.unit import ParamUnit


class WholeGradients:
    """Accumulates gradients in memory that the ledger charges. Used from the thread that runs
    backward."""

    def __init__(self, ledger: Ledger, device: Device):
        self._ledger, self._device = ledger, device
        self._memory: dict[FlatParam, tuple[torch.Tensor, native.Charge]] = {}
        self._got: dict[FlatParam, set[int]] = {}  # parameters with a gradient, by index
        self._without_room: set[FlatParam] = set()

    def add(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Adds ``grad`` to the sum of ``handle``. Raises CapacityError if the device has no room
        for a flat param's first gradient."""
        flat_param = handle.flat_param
        view = flat_param.layout.placements[handle.index].view(self.take(handle.unit, flat_param))
        got = self._got.setdefault(flat_param, set())
        view.add_(grad) if handle.index in got else view.copy_(grad)
        got.add(handle.index)

    def add_if_room(self, handle: ParamHandle, grad: torch.Tensor) -> bool:
        """Adds ``grad`` as :meth:`add` does. Returns False if the device has no room, and from then
        on for every gradient of the flat param."""
        if handle.flat_param in self._without_room:
            return False
        try:
            self.add(handle, grad)
        except CapacityError:
            self._without_room.add(handle.flat_param)
            return False
        return True

    def take(self, unit: ParamUnit, flat_param: FlatParam) -> torch.Tensor:
        """Returns memory for a flat param's gradient, allocated if it has none. Its elements are
        undefined until added."""
        if flat_param not in self._memory:
            nbytes = flat_param.layout.numel * flat_param.spec.grad_dtype.itemsize
            charge = self._ledger.reserve(
                Tier.DEVICE, nbytes, f"the gradients of unit {unit.name}", passing=True
            )
            whole = torch.empty(
                flat_param.layout.numel, dtype=flat_param.spec.grad_dtype, device=self._device.where
            )
            self._memory[flat_param] = whole, charge
        return self._memory[flat_param][0]

    def has_gradient(self, handle: ParamHandle) -> bool:
        """Returns whether the parameter of ``handle`` has a gradient here."""
        return handle.index in self._got.get(handle.flat_param, ())

    def give_back(self, handle: ParamHandle) -> torch.Tensor | None:
        """Forgets the sum of ``handle``. Returns it until the next one is added; None if there is
        none."""
        if not self.has_gradient(handle):
            return None
        self._got[handle.flat_param].discard(handle.index)
        return handle.flat_param.layout.placements[handle.index].view(
            self._memory[handle.flat_param][0]
        )

    def pop_got(self, flat_param: FlatParam) -> set[int]:
        """Forgets which parameters of ``flat_param`` have a gradient, and returns their indices."""
        return self._got.pop(flat_param, set())

    def pop(self, flat_param: FlatParam) -> tuple[torch.Tensor, native.Charge]:
        """Moves a flat param's memory to the caller, who releases its charge."""
        return self._memory.pop(flat_param)

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has a gradient here."""
        return not any(self._got.values())

    def drop(self) -> None:
        """Frees all memory."""
        for _, charge in self._memory.values():
            charge.release()
        self._memory.clear()
        self._got.clear()
