"""SavedWeight: replaces a weight in autograd's graph, so that the graph holds no bytes of it.

Inside an owner, autograd saves each weight as a reference to its unit. Unpacking it makes the unit
resident. This works for any output of the module and any kind of checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UsageError
from ..forwards.lazy_logits import Logits
from ..state.unit import ParamUnit
from ..state.weight_storages import WeightStorages
from .saved_tensor import SavedTensor, through_dtensors


@dataclass(eq=False)
class SavedWeight:
    """A saved tensor in a unit's device buffer: its location instead of its bytes."""

    unit: ParamUnit
    version: int  # of the unit's values when it was saved
    flat: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, unit: ParamUnit, flat: torch.Tensor) -> SavedWeight:
        """Returns a reference to ``tensor``, a view of ``flat``, a device buffer of ``unit``."""
        view = (
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return cls(unit, unit.in_use.version, flat, *view)

    def check(self) -> None:
        """Raises UsageError if the bytes that the forward computed with are not available in this
        backward."""
        if self.version != self.unit.in_use.version and self._is_changed():
            raise UsageError(
                f"this backward needs weights of unit {self.unit.name} as they were in its forward,"
                " but they were changed since (by optimizer.step(), load_state_dict() or an edit)."
                " Run backward before that."
            )

    def _is_changed(self) -> bool:
        """Tells whether the parameter itself has changed, not only others of its unit."""
        if self.unit.stale is not None:  # whose versions change without the parameters'
            return True
        start = self.offset * self.dtype.itemsize // self.flat.itemsize - self.flat.storage_offset()
        changes = [
            handle.changed_at
            for buffer in self.unit.buffers
            if buffer.flat is self.flat
            for handle, place in zip(buffer.flat_param.handles, buffer.flat_param.layout.placements)
            if place.offset <= start <= place.end
        ]
        return not changes or max(changes) > self.version

    def tensor(self) -> torch.Tensor:
        """Makes the tensor that was saved. Its unit is resident."""
        bare = torch.empty(0, dtype=self.dtype, device=self.flat.device)
        bare = bare.set_(self.flat.untyped_storage(), self.offset, self.size, self.stride)
        bare = bare.conj() if self.conj else bare
        return torch._neg_view(bare) if self.neg else bare


def is_checkpoint(hooks: tuple | None) -> bool:
    """Tells whether a pair of saved-tensor hooks is a non-reentrant checkpoint's."""
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


OPAQUE: set[type] = {Logits}
try:
    from torch._subclasses.fake_tensor import FakeTensor

    OPAQUE.add(FakeTensor)
except ImportError:  # pragma: no cover
    pass


def saving_hooks(
    storages: WeightStorages, hold: Callable[[ParamUnit], None]
) -> tuple[Callable, Callable]:
    """Makes a pair of saved-tensor hooks that save weights as references. Other tensors go to the
    hooks around them.

    ``storages``: of the units' device buffers. ``hold`` makes a unit resident until the running
    backward is done with it.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    outer_pack, outer_unpack = outer if outer is not None else (None, None)
    # A checkpoint counts the saved tensors, and must get the same count in its forward and in its
    # recomputation. There the same weight may be saved with or without these hooks.
    counted = is_checkpoint(outer) or getattr(outer_pack, "is_counted", False)

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.layout is torch.strided and type(tensor) not in OPAQUE:
            entry = storages.find(tensor)
            if entry is not None:
                if counted:
                    outer_pack(tensor)
                return SavedWeight.of(tensor, *entry)
        return outer_pack(tensor) if outer_pack else SavedTensor(tensor)

    def unpack(saved: Any) -> torch.Tensor:
        if not isinstance(saved, SavedWeight):
            return saved.tensor() if isinstance(saved, SavedTensor) else outer_unpack(saved)
        saved.check()
        hold(saved.unit)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            _save_in_graph_of_backward(storages, hold)
        return saved.tensor()

    pack, unpack = through_dtensors(pack, unpack)
    pack.is_counted = counted
    return pack, unpack


def _save_in_graph_of_backward(storages: WeightStorages, hold: Callable[[ParamUnit], None]) -> None:
    """Saves weights as references in the graph of a backward (``create_graph=True``), too.

    Called as a node of the graph takes its saved weights out, before it computes with them. Nobody
    takes the hooks off: autograd restores the thread's hooks at the end of each node.
    """
    torch._C._autograd._push_saved_tensors_default_hooks(*saving_hooks(storages, hold))
