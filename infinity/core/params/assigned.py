"""Assigned: a tensor that ``p.grad = tensor`` gave, which is the gradient in torch from then on.

outdated  with several ranks: the gradient has changed since, and the tensor has not
early     a step in mid-backward has applied it, and the rest of that step has not run yet
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..units.forms import local_of
from ..units.handle import ParamHandle
from .lent import Lent, Source, memory_of

GRADS = Source()


class Assigned(Lent):
    """One assigned tensor. ``is_copied``: the gradient is a copy of it, made by other ranks too,
    and cannot be made anew. ``is_ours``: the engine allocated it, to show the gradient."""

    def __init__(
        self, handle: ParamHandle, tensor: torch.Tensor, *, is_copied: bool, is_ours: bool = False
    ):
        super().__init__(GRADS, handle, tensor, follows=True, is_ours=False)
        self._is_ours, self.is_copied = is_ours, is_copied
        self.is_outdated = self.is_early = False
        self.let_go()

    @property
    def is_writable(self) -> bool:
        """Whether torch would add to it in place: no two elements share memory."""
        return not any(
            step == 0 and size > 1 for step, size in zip(self.bytes.stride(), self.bytes.shape)
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether the tensor's memory was replaced, for example by ``tensor.data = ...``."""
        tensor = self.tensor()
        return tensor is not None and memory_of(local_of(tensor)) != memory_of(self.bytes)

    def outdate(self) -> None:
        """Marks the tensor as outdated: the gradient is about to change without it. From then on
        any change counted by torch counts: the user took it for the gradient."""
        self.is_outdated, self._seen = True, (self._count(), self._seen[1])

    def change(self, change: Callable[[torch.Tensor], object]) -> None:
        """Runs ``change`` in place on the tensor."""
        with torch.inference_mode() if self.bytes.is_inference() else torch.no_grad():
            change(self.bytes)
