"""In flight: charges the buffers between stages to the device. torch keeps one for each micro-batch
of each stage."""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakSet

from ...core.machine.tiers import Tier
from ...core.run.engine import Engine
from ...core.wrap.agreement import least


class InFlight:
    """The buffers of one engine's stages, as long as the stages exist."""

    def __init__(self, engine: Engine):
        # Stored by engine, as long as that exists: refer to it weakly.
        self._engine, self._stages = weakref.ref(engine), WeakSet[Any]()
        self._nbytes, self._charge = 0, None

    def add(self, stages: list[Any]) -> None:
        """Counts the buffers of ``stages`` from the next :meth:`charge` on."""
        self._stages.update(stages)

    def charge(self) -> None:
        """Charges the current buffers, between passes. Narrows the weight window by the bytes for
        which the plan has left no room.

        Every rank calls this. The ranks of a row charge the maximum of theirs: their gathers ahead
        must not differ. Raises CapacityError if there is no room.
        """
        engine, nbytes = self._engine(), sum(map(_buffers_nbytes, self._stages))
        if engine is None or engine.job.config.device_memory is None:
            return  # no budget to exceed
        job = engine.job
        said, among = "buffers between stages", job.ranks.unit_channels
        nbytes = -least(job.collectives, [-nbytes], said, among)[0]
        if nbytes == self._nbytes:
            return
        account = engine.job.ledger.accounts[Tier.DEVICE]
        engine.job.prefetcher.narrow(
            max(0, nbytes - max(0, account.budget_nbytes - account.planned_nbytes))
        )
        if self._charge is not None:
            self._charge.release()
        self._charge = engine.job.ledger.reserve(Tier.DEVICE, nbytes, "what passes between stages")
        self._nbytes = nbytes


def _buffers_nbytes(stage: Any) -> int:
    infos = [
        info
        for received in (stage.args_recv_info, stage.grad_recv_info)
        for of_one in received.values()
        for info in of_one
    ]
    return sum(
        buffer.nbytes for info in infos if (buffer := getattr(info, "buffer", None)) is not None
    )
