"""Source: one tensor that is to be written, known by its shape and dtype before it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory of which several tensors are views: they go to one file."""

    nbytes: int


@dataclass(frozen=True)
class Source:
    """A tensor that ``read`` gives, on the CPU, whenever it is called; nothing of it is in memory before."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    storage: Storage | None = None  # None: of its own

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Source:
        """Makes the source of a tensor that is in memory; reading gives a copy."""
        return cls(tensor.shape, tensor.dtype, lambda: tensor.detach().clone(memory_format=torch.contiguous_format))

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes, in memory and in a file."""
        return self.shape.numel() * self.dtype.itemsize

    def to(self, dtype: torch.dtype | None) -> Source:
        """Returns the source of the same numbers in ``dtype``; of integers, and for None, this one."""
        if dtype is None or dtype == self.dtype or not self.dtype.is_floating_point:
            return self
        return Source(self.shape, dtype, lambda: self.read().to(dtype))
