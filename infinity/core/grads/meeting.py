"""Meeting: adds the gradients of one parameter's uses in one backward, in autograd's order.

lookup  a use that reads rows by their ids: its gradient is zero elsewhere
whole   a use of every row

[Note: why rows wait] Torch adds the uses' gradients first, and the sum to ``p.grad``. So a row with
a gradient of a lookup is kept out of what lands before it: it is added up here, and lands when the
backward ends. All other rows get zeros from lookups, and land as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch

from ...torch_private import GRAPH_NODES
from ..units.handle import ParamHandle


class GradUse(Enum):
    """How the running backward uses a parameter's gradient."""

    NONE = auto()
    ACCUMULATED = auto()  # into ``p.grad``
    RETURNED = auto()  # by ``torch.autograd.grad``

    @classmethod
    def of(cls, accumulator: Any) -> GradUse:
        """Returns the use from a parameter's ``AccumulateGrad`` node; None if it has no node."""
        if accumulator is None:
            return cls.NONE
        try:
            return cls.ACCUMULATED if GRAPH_NODES.found(accumulator) else cls.NONE
        except RuntimeError:  # torch raises only for a leaf whose gradient is returned
            return cls.RETURNED


def lookup_gradient(
    dy: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int | None
) -> torch.Tensor:
    """Returns the gradient ``[rows, width]`` of a lookup whose output got ``dy``, as torch computes
    it; the rows of ``padding_idx`` are zero."""
    return torch.ops.aten.embedding_dense_backward(
        dy, ids, rows, -1 if padding_idx is None else padding_idx, False
    )


class Meeting:
    """The rows of one backward's lookups. Used from the thread that runs it."""

    def __init__(self, handle: ParamHandle, ids: Sequence[torch.Tensor]):
        """``ids``: of all lookups whose gradients this backward still makes."""
        self.handle = handle
        self.is_first: bool | None = None  # None: no part has landed
        spec, (count, width) = handle.flat_param.spec, handle.param.shape
        none = torch.empty(0, dtype=torch.int64, device=handle.param.device)
        self.ids = torch.cat([none, *(lookup.reshape(-1) for lookup in ids)])
        # No number of different ids is asked for: the host would wait for the device.
        if self.ids.numel() < count:
            self.ids = self.ids.sort().values
            is_first = torch.ones_like(self.ids, dtype=torch.bool)
            is_first[1:] = self.ids[1:] != self.ids[:-1]
        else:
            self.ids = torch.arange(count, device=self.ids.device)
            is_first = torch.ones_like(self.ids, dtype=torch.bool)
        self._repeated = ~is_first[:, None]
        self.sum = torch.zeros(
            len(self.ids), width, dtype=spec.dtype, device=self.ids.device
        )  # of the first row of each id

    def begin(self, *, is_first: bool) -> None:
        """Notes that a part lands before the rows. ``is_first``: nothing had landed before."""
        if self.is_first is None:
            self.is_first = is_first

    def add(self, ids: torch.Tensor, dy: torch.Tensor, padding_idx: int | None) -> None:
        """Adds the gradient of a lookup of ``ids``, whose output got ``dy``."""
        # In the order of the ids, so that torch adds the same in the same order.
        places = torch.searchsorted(self.ids, ids)
        if padding_idx is not None:
            dy = dy.masked_fill((ids == padding_idx)[..., None], 0)
        self.sum.add_(lookup_gradient(dy, places, len(self.ids), None))

    def keep_rows(self, grad: torch.Tensor) -> torch.Tensor:
        """Adds the lookups' rows of a whole use's ``grad``. Returns ``grad``, which is changed:
        zeros are left of them."""
        if not len(self.ids):
            return grad
        self.sum.add_(grad.index_select(0, self.ids).masked_fill_(self._repeated, 0))
        return grad.add_(0.0).index_fill_(0, self.ids, 0)  # as adding the zeros of other rows does

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids and their rows of the sum; those of repeated ids are zero."""
        return self.ids, self.sum
