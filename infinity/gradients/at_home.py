"""AtHome: what stand-ins for gradients have in common: tensors without memory, whose values are copies.

export     what shares a tensor's memory with something that torch's operations do not go through:
           DLPack, NumPy, a storage, an address, another process
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..errors import UsageError
from ..machine import storage_guard
from ..state.handle import DisableTorchFunction, ParamHandle


class AtHome(torch.Tensor):
    """A tensor whose bytes are the engine's. It is copied and pickled as the plain tensor of its
    values; what would share memory raises UsageError, and any other access to it RuntimeError."""

    _infinity_grad: ParamHandle
    plain: torch.Tensor | None = None  # what it is once its parameter got another gradient

    @classmethod
    def make(cls, handle: ParamHandle, shape, *, stride, dtype, device, offset: int = 0):
        """Makes a stand-in for what is of the gradient of ``handle``."""
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, strides=stride, storage_offset=offset, dtype=dtype, device=device)
        with DisableTorchFunction():  # as the storage itself, not what a user is told of it
            storage_guard.close(torch.Tensor.untyped_storage(tensor))
        tensor._infinity_grad = handle
        return tensor

    def __repr__(self, *, tensor_contents=None):
        return f"{type(self).__name__}({self._infinity_grad.name}, {self.detach().clone()!r})"

    # --- copies ---

    def __copy__(self):
        return self  # as detach() does: what is written to it is written to the gradient

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.clone().__reduce_ex__(protocol)  # the plain tensor

    def tolist(self):
        """Returns the values, as nested lists."""
        return self.clone().tolist()

    @property
    def data(self):
        """The stand-in itself, as detach() is: what is written to it is written to the gradient."""
        return self.detach()

    @data.setter
    def data(self, value):
        if isinstance(value, AtHome) and value._infinity_grad is self._infinity_grad:
            return  # module.to() of what is there already
        raise UsageError(
            f"{self._infinity_grad.name}.grad.data = ... would not reach its home: assign "
            "param.grad = value, or write grad.copy_(value)"
        )

    # --- exports ---

    def _refuse_reshaping(self, func: Any) -> NoReturn:
        raise UsageError(
            f"{func} of {self._infinity_grad.name}.grad would give the gradient another shape or other memory, and it "
            "keeps those of its parameter. Work on a copy: grad.detach().clone()"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self._infinity_grad.name}.grad: {what} would share the gradient's memory, which the "
            "engine keeps at home and uses again. Take a copy first: grad.detach().clone(); to "
            "change the gradient itself, write to it by torch's operations: grad.copy_(values)."
        )

    def numpy(self, *, force: bool = False):
        """Raises UsageError: an array would share memory that the engine reuses."""
        self._refuse("numpy()")

    def __array__(self, *args, **kwargs):
        self._refuse("an array of NumPy")

    def __dlpack__(self, *args, **kwargs):
        self._refuse("DLPack")

    @property
    def __cuda_array_interface__(self):
        if self.device.type != "cuda":
            raise AttributeError("__cuda_array_interface__ of a tensor that is not on CUDA")
        self._refuse("__cuda_array_interface__")

    def data_ptr(self):
        """Raises UsageError: there is no address that stays."""
        self._refuse("data_ptr()")

    def untyped_storage(self):
        """Raises UsageError: there is no storage of its own."""
        self._refuse("untyped_storage()")

    def storage(self):
        """Raises UsageError: there is no storage of its own."""
        self._refuse("storage()")

    def _typed_storage(self):
        self._refuse("storage()")

    def share_memory_(self):
        """Raises UsageError: the bytes stay where the plan has them."""
        self._refuse("share_memory_()")

    def is_shared(self):
        """Returns False: no other process has the bytes."""
        return False

    def is_pinned(self, device: Any = None):
        """Returns False: a copy would have to be pinned."""
        return False

    def pin_memory(self, device: Any = None):
        """Returns the values in pinned memory, as torch does: a copy."""
        return self.clone().pin_memory(*(() if device is None else (device,)))
