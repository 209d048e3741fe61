"""Stored: distributed parameters whose local part is at home. While that is on the device their
class is exactly DTensor, which torch dispatches fast."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ...core.params import mistakes
from ...core.params.parameter import StoredManaged
from ...core.units.handle import DisableTorchFunction, handle_of


class StoredDTensor(StoredManaged, DTensor):
    """A distributed parameter, or its detached tensor, whose local part is at home."""

    __slots__ = ()

    def detached_at_rest(self) -> torch.Tensor:
        """Returns a DTensor over the same local part, at rest as well."""
        with DisableTorchFunction():
            alias = DTensor.detach(self)
        alias.__class__ = StoredDTensor
        alias._infinity = handle_of(self)
        return alias

    def viewed_at_rest(self, func) -> torch.Tensor | None:
        """Returns a view for autograd itself only."""
        if not mistakes.is_called_from("torch/autograd/graph.py"):
            return None
        with DisableTorchFunction():
            return func(self, self)

    def to_local(self, *args, **kwargs):
        """Gathers the local part inside a forward or backward; raises UsageError elsewhere."""
        return self._gathered("to_local").to_local(*args, **kwargs)

    def full_tensor(self, *args, **kwargs):
        """Gathers the global tensor inside a forward or backward; raises UsageError elsewhere."""
        return self._gathered("full_tensor").full_tensor(*args, **kwargs)

    def redistribute(self, *args, **kwargs):
        """Redistributes the tensor inside a forward or backward; raises UsageError elsewhere."""
        return self._gathered("redistribute").redistribute(*args, **kwargs)

    def _gathered(self, what: str) -> DTensor:
        handle = handle_of(self)
        with handle.engine.uses.begin():
            handle.engine.touch(handle, what)
        param = handle.param
        param.__class__ = DTensor
        return param
