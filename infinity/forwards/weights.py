"""Weights: the interface that replacement forwards need of the engine."""

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
from ..storage.store import ArrayStore


class PlannedActivations(Protocol):
    """The activations of planned blocks: kept, sent home, or recomputed."""

    spare_nbytes: int | None  # device budget left for activations; None: all go home
    outside_nbytes: int  # saved outside of all blocks

    def run_block(self, block: Any) -> AbstractContextManager[None]:
        """Counts the tensors saved inside as those of ``block``."""

    @property
    def block(self) -> Any | None:
        """The running block, or None outside of all blocks."""


class Weights(Protocol):
    """The engine, as replacement forwards use it."""

    journal: Journal
    device: Device
    ledger: Ledger
    traffic: Traffic
    store: ArrayStore
    gradients: GradientBank

    @property
    def activations(self) -> PlannedActivations | None:
        """The store that takes saved tensors home. None: they stay with torch."""

    @property
    def is_recomputed(self) -> bool:
        """Whether the running forward is recomputed in the backward, or is that recomputation."""

    def units_of(self, block: nn.Module) -> list[ParamUnit]:
        """Lists the units that have parameters of ``block`` and are gathered whole (not tiled)."""

    def saving_tensors(self) -> AbstractContextManager[Any]:
        """Makes autograd save weights inside as references, not as copies."""

    def hold_for_backward(self, unit: ParamUnit) -> None:
        """Holds ``unit`` until the running backward ends."""

    def join_backward(self) -> None:
        """Registers the running backward, so that its end releases what it holds."""


def found_weakly(engine: Weights) -> Callable[[], Weights]:
    """Returns a function that finds the engine by a weak reference. Autograd's graph holds that
    function, so a loss that is kept does not keep the homes.

    The function raises UsageError if the engine is gone.
    """
    reference = weakref.ref(engine)

    def find() -> Weights:
        if (found := reference()) is None:
            raise too_late()
        return found

    return find


def too_late() -> UsageError:
    """Returns the error for a backward whose weights are gone."""
    return UsageError(
        "this backward needs weights that went with the engine: run it before unwrap_model, and"
        " before the model is dropped (a loss alone does not keep them)"
    )
