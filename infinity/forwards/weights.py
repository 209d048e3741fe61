"""Weights: what a block that runs another way needs of the engine whose weights it computes with."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from ..errors import UsageError
from ..gradients.bank import GradientBank
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.traffic import Traffic
from ..state.journal import Journal
from ..state.unit import ParamUnit
from ..storage.store import ShardStore


class PlannedActivations(Protocol):
    """The activations of blocks that are chosen for: kept, sent home, or computed again."""

    spare_nbytes: int | None  # of the device's budget, for activations; None: all go home
    outside_nbytes: int  # that modules save outside of all blocks

    def run_block(self, block: Any) -> AbstractContextManager[None]:
        """Has what is saved inside counted as ``block``'s."""

    @property
    def block(self) -> Any | None:
        """The block that runs, None outside of all."""


class Weights(Protocol):
    """The engine, as a block sees it that runs another way."""

    journal: Journal
    device: Device
    ledger: Ledger
    traffic: Traffic
    store: ShardStore
    gradients: GradientBank

    @property
    def activations(self) -> PlannedActivations | None:
        """Takes what a forward saves home. None: it stays with torch."""

    @property
    def is_recomputed(self) -> bool:
        """Whether what runs now runs a second time in the backward, or this is that time."""

    def units_of(self, block: nn.Module) -> list[ParamUnit]:
        """Lists the units that have parameters of ``block`` and are gathered whole."""

    def saving_tensors(self) -> AbstractContextManager[Any]:
        """Has weights that autograd saves inside saved as references."""

    def hold_for_backward(self, unit: ParamUnit) -> None:
        """Has the running backward hold ``unit``."""

    def join_backward(self) -> None:
        """Has the running backward end what it holds."""


def found_weakly(engine: Weights) -> Callable[[], Weights]:
    """Makes what finds the engine for whatever autograd's graph holds: a loss that somebody kept must not keep the homes.

    It raises UsageError where the engine is gone.
    """
    reference = weakref.ref(engine)

    def find() -> Weights:
        if (found := reference()) is None:
            raise too_late()
        return found

    return find


def too_late() -> UsageError:
    """Makes the error for a backward whose weights are gone."""
    return UsageError(
        "this backward needs weights that went with the engine: run it before unwrap_model, and before the model is dropped (a loss alone "
        "does not keep them)"
    )
