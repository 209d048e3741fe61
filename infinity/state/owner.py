"""Owner: what a parameter at home asks of the engine that has its bytes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .. import native
from ..errors import UsageError

if TYPE_CHECKING:
    from .handle import ParamHandle


class GradStandIns(Protocol):
    """Gives and takes ``p.grad`` of a parameter at home."""

    def get(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns what stands for the gradient, None where there is none."""

    def set(self, handle: ParamHandle, value: torch.Tensor | None) -> None:
        """Makes ``value`` the gradient."""


class Owner(Protocol):
    """The engine, as a parameter sees it."""

    gradients: GradStandIns

    @property
    def computing(self) -> bool:
        """Whether a forward or backward of the model is running."""

    def refuse_between(self, what: str) -> None:
        """Raises UsageError where gradients are not whole: between the backwards of a joined pass."""
        ...

    def using(self, *, repairing: bool = False) -> native.Scope:
        """Opens the scope that every use of the engine runs in."""

    def touch(self, handle: ParamHandle, operation: str) -> None:
        """Gathers the parameter inside a forward or backward, and raises UsageError elsewhere."""

    def refusal(self, handle: ParamHandle, operation: str) -> UsageError:
        """Returns the error for ``operation`` on a parameter at home."""

    def write_value(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Sends ``value`` home."""

    def saving_tensors(self) -> AbstractContextManager[Any]:
        """Has weights that autograd saves inside saved as references."""
