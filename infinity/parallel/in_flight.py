"""In flight: charges what passes between stages to the device: torch keeps a buffer for each micro-batch of each stage."""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakSet

from ..machine.tiers import Tier
from ..runtime.engine import Engine


class InFlight:
    """The buffers of the stages of one engine, for as long as somebody has the stages."""

    def __init__(self, engine: Engine):
        # They are kept by engine, for as long as that is there.
        self._engine, self._stages = weakref.ref(engine), WeakSet[Any]()
        self._nbytes, self._charge = 0, None

    def add(self, stages: list[Any]) -> None:
        """Counts the buffers of ``stages`` from the next :meth:`charge` on."""
        self._stages.update(stages)

    def charge(self) -> None:
        """Charges the buffers there are now, between passes; the window for weights is narrower by what the plan has not left of the budget.

        Ranks of a row charge the same, the most of theirs: what they gather ahead must not differ. Raises CapacityError where there is no room.
        """
        engine, nbytes = self._engine(), sum(map(_buffers_nbytes, self._stages))
        if engine is None or engine.config.device_memory is None:
            return  # nothing that it could exceed
        nbytes = -engine.collectives.least([-nbytes], "buffers between stages")[0]
        if nbytes == self._nbytes:
            return
        account = engine.ledger.accounts[Tier.DEVICE]
        engine.prefetcher.narrow(max(0, nbytes - max(0, account.budget_nbytes - account.planned_nbytes)))
        if self._charge is not None:
            self._charge.release()
        self._charge = engine.ledger.reserve(Tier.DEVICE, nbytes, "what passes between stages")
        self._nbytes = nbytes


def _buffers_nbytes(stage: Any) -> int:
    infos = [info for received in (stage.args_recv_info, stage.grad_recv_info) for of_one in received.values() for info in of_one]
    return sum(buffer.nbytes for info in infos if (buffer := getattr(info, "buffer", None)) is not None)
