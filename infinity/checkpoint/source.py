"""Source: one tensor to write, known by its shape and dtype before it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory shared by several tensors, which are views of it: they go to one file."""

    nbytes: int


@dataclass(frozen=True)
class Source:
    """A tensor that ``read`` returns, on the CPU, at each call. It takes no memory before."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    storage: Storage | None = None  # None: not shared
    is_of_rank: bool = False  # in memory, where other ranks may have other values

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Source:
        """Makes the source of a tensor in memory; reading returns a copy."""
        return cls(
            tensor.shape,
            tensor.dtype,
            lambda: tensor.detach().clone(memory_format=torch.contiguous_format),
        )

    @classmethod
    def lent(cls, tensor: torch.Tensor) -> Source:
        """Makes the source of a tensor in memory; reading returns its own data."""
        return cls(tensor.shape, tensor.dtype, lambda: tensor.data, is_of_rank=True)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor, in memory and in a file."""
        return self.shape.numel() * self.dtype.itemsize

    def to(self, dtype: torch.dtype | None) -> Source:
        """Returns the source of the same numbers in ``dtype``; for integers, and for None, this
        one."""
        if dtype is None or dtype == self.dtype or not self.dtype.is_floating_point:
            return self
        return replace(self, dtype=dtype, read=lambda: self.read().to(dtype), storage=None)
