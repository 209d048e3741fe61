"""AtHome: the base of proxies for gradients: tensors without memory, whose values are copies.

export     shares a tensor's memory past torch's operations: DLPack, NumPy, a storage, an
           address, another process
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ... import torch_private
from ...errors import UsageError
from ..machine import storage_guard
from ..params.outside_modes import leave_graph
from ..units.handle import DisableTorchFunction, ParamHandle


class AtHome(torch.Tensor):
    """A tensor whose bytes the engine keeps. It is copied and pickled as a plain tensor of its
    values. An export raises UsageError, any other access to its memory RuntimeError."""

    _infinity_grad: ParamHandle
    _lent: Callable[[], torch.Tensor]  # makes a plain tensor of its values, in memory of its own
    plain: torch.Tensor | None = None  # its own values, once its parameter got another gradient

    @classmethod
    def make(cls, handle: ParamHandle, shape, *, stride, dtype, device, offset: int = 0):
        """Makes a proxy for the gradient of ``handle`` or a view of it."""
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, storage_offset=offset, dtype=dtype, device=device
        )
        with DisableTorchFunction():  # closes the storage itself, not what users see
            storage_guard.close(torch.Tensor.untyped_storage(tensor))
        tensor._infinity_grad = handle
        tensor._itself = weakref.ref(tensor)  # with one torch refuses swap_tensors()
        return tensor

    def __repr__(self, *, tensor_contents=None):
        return f"{type(self).__name__}({self._infinity_grad.name}, {self.detach().clone()!r})"

    # --- copies ---

    def __copy__(self):
        return self  # as detach() does: writes to it change the gradient

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.clone().__reduce_ex__(protocol)  # the plain tensor

    def tolist(self):
        """Returns the values as nested lists."""
        return self.clone().tolist()

    @property
    def data(self):
        """The proxy itself, as detach(): writes to it change the gradient."""
        return self.detach()

    @data.setter
    def data(self, value):
        if isinstance(value, AtHome) and value._infinity_grad is self._infinity_grad:
            return  # module.to() assigns the present one
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UsageError(
                f"{self._infinity_grad.name}.grad.data = a tensor of shape {tuple(value.shape)} and"
                f" {value.dtype}: the gradient keeps shape {tuple(self.shape)} and {self.dtype}."
                " Assign param.grad = value.to(param.grad)."
            )
        with torch.no_grad():
            self.copy_(value)

    # --- exports ---

    def _refuse(self, call: str) -> NoReturn:
        raise UsageError(
            f"{self._infinity_grad.name}.grad: {call} would share the gradient's memory, which the "
            "engine keeps at home and uses again. Take a copy first: grad.detach().clone(); to "
            "change the gradient itself, write to it by torch's operations: grad.copy_(values)."
        )

    def numpy(self, *, force: bool = False):
        """Returns an array in memory that the engine does not use. On one rank writes to it are
        writes to the gradient, as in torch; on several it is read-only."""
        array = self._lent().numpy(force=force)
        if not self._is_alone:
            array.flags.writeable = False
        return array

    def apply_(self, function):
        """Applies ``function`` to each element in place. Raises UsageError on several ranks."""
        return self._change("apply_", function)

    def map_(self, other, function):
        """Applies ``function`` to each element and that of ``other``, in place, as
        :meth:`apply_`."""
        return self._change("map_", other, function)

    def _change(self, name: str, *args: Any):
        if not self._is_alone:
            self._refuse(f"{name}()")
        getattr(self._lent(), name)(*args)
        return self

    @property
    def _is_alone(self) -> bool:
        return self._infinity_grad.engine.gradients.values.ranks.alone

    def __dlpack__(self, *args, **kwargs):
        self._refuse("DLPack")

    @property
    def __cuda_array_interface__(self):
        if self.device.type != "cuda":
            raise AttributeError("__cuda_array_interface__ of a tensor that is not on CUDA")
        self._refuse("__cuda_array_interface__")

    def data_ptr(self):
        """Raises UsageError: there is no fixed address."""
        self._refuse("data_ptr()")

    def untyped_storage(self):
        """Raises UsageError: there is no storage of its own."""
        leave_graph(f"{self._infinity_grad.name}.grad")
        self._refuse("untyped_storage()")

    def storage(self):
        """Raises UsageError: there is no storage of its own."""
        self._refuse("storage()")

    def _typed_storage(self):
        self._refuse("storage()")

    def share_memory_(self):
        """Raises UsageError: the bytes stay at their home."""
        self._refuse("share_memory_()")

    def is_shared(self):
        """Returns False: no other process has the bytes."""
        return False

    def is_pinned(self, device: Any = None):
        """Returns False: only a copy can be pinned."""
        return False

    def pin_memory(self, device: Any = None):
        """Returns a copy of the values in pinned memory, as torch does."""
        return self.clone().pin_memory(*(() if device is None else (device,)))


torch_private.close_doors(AtHome, AtHome._refuse, is_asked=True)
