"""Source: one tensor to write or to send home, known by its shape and dtype before it is read."""

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
    """A tensor that ``read`` returns at each call. One of a file takes no memory before."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    storage: Storage | None = None  # None: not shared
    may_differ: bool = False  # other ranks may have other values

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
        data = tensor.data
        return cls(tensor.shape, tensor.dtype, lambda: data, may_differ=True)

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
