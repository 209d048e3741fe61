"""ForwardContext: the parts of a job that replacement forwards use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ..grads.bank import GradientBank
from ..homes.store import ArrayStore
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.traffic import Traffic
from ..units.handle import ParamHandle
from ..units.unit import ParamUnit
from .journal import Journal


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """The parts of one job that replacement forwards use. Made for one call, because it keeps the
    homes."""

    owner: object  # as long as it lives, so do the homes
    journal: Journal
    device: Device
    ledger: Ledger
    traffic: Traffic
    store: ArrayStore
    gradients: GradientBank

    # The running forward is recomputed in the backward, or is itself that recomputation.
    is_recomputed: Callable[[], bool]
    # Makes autograd save weights inside as references, not as copies
    saving_tensors: Callable[[], AbstractContextManager[Any]]
    # Makes units' parameters ordinary ones, for a forward that runs again in the backward
    running_again: Callable[[Sequence[ParamUnit]], AbstractContextManager[Any]]
    track_backward: Callable[[], None]  # so that the end of the backward releases what it holds
    # Autograd will add up whole gradients of a table's uses
    expect_sum: Callable[[ParamHandle], None]


def found_weakly(make: Callable[[], ForwardContext]) -> Callable[[], ForwardContext]:
    """Returns a function that calls ``make``, a method of the engine, which it holds weakly.
    Autograd's graph holds that function, so a loss that is kept does not keep the homes.

    The function raises UsageError if the engine is gone.
    """
    reference = weakref.WeakMethod(make)

    def find() -> ForwardContext:
        if (context := reference()) is None:
            raise too_late()
        return context()

    return find


def too_late() -> UsageError:
    """Returns the error for a backward whose weights are gone."""
    return UsageError(
        "this backward needs weights that went with the engine: run it before unwrap_model, and"
        " before the model is dropped (a loss alone does not keep them)"
    )
