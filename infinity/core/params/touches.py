"""Touches: holds units for one operation on their parameters, outside of a pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ... import native
from ...errors import UsageError
from ..machine.sizes import format_nbytes
from ..run.job import Job
from ..run.operations import Operation, Right
from ..units.forms import is_plain
from ..units.handle import ParamHandle, managed, own_bytes
from ..units.residency import Residency
from ..units.unit import ParamUnit
from . import mistakes

logger = logging.getLogger(__name__)
NAMED = 3  # operations in the line that is logged


@dataclass
class Cost:
    """What touches cost between two steps of the optimizer."""

    step: int
    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    operations: dict[str, None] = field(default_factory=dict)

    def __str__(self) -> str:
        names = ", ".join(list(self.operations)[:NAMED])
        return (
            f"{self.count} operations on parameters outside of a pass ({names}) brought"
            f" {format_nbytes(self.nbytes)} in {self.seconds:.3f} s in the last step. Cheaper:"
            " infinity.full_params(model, names) brings a parameter once for many operations, and"
            " infinity.named_weights(model) reads all of them. This is said once."
        )


class Touches:
    """The operations on parameters outside of a pass. ``refuse`` makes the error for one that is
    refused."""

    def __init__(self, job: Job, refuse: Callable[[ParamHandle, str], UsageError]):
        self.job, self._refuse = job, refuse
        self._cost, self._has_warned = Cost(job.steps.index), False
        self._last = -1  # index of the unit that was brought last

    @contextmanager
    def holding(
        self, handles: Sequence[ParamHandle], operation: str, *, writes: bool
    ) -> Iterator[None]:
        """Holds the units of ``handles``; at the end sends home what was changed in them.

        ``writes``: ``operation`` may change the parameters. Raises UsageError if it is refused now,
        or if the bytes are on other ranks.
        """
        job = self.job
        with job.uses.begin():
            job.uses.check(Operation.WRITE_VALUE if writes else Operation.TOUCH, operation)
            is_misuse = mistakes.is_misuse()
            for handle in handles:
                if is_misuse or handle.unit.is_sharded or not is_plain(handle.param):
                    raise self._refuse(handle, operation)
            start, cost = time.perf_counter(), self._cost_of(operation)
            held: list[ParamUnit] = []
            try:
                try:
                    with job.store.guard:
                        for unit in dict.fromkeys(handle.unit for handle in handles):
                            cost.nbytes += self._bring(unit)
                            held.append(unit)
                    # torch counts no writes of lists that have gradients of the engine beside them.
                    is_counted = not (writes and operation.startswith("_foreach_"))
                    for handle in handles:
                        self._watch(handle, is_counted=is_counted)
                    yield
                except Exception:
                    self._let_go(held, operation)
                    raise
                self._let_go(held, operation)
            except BaseException as error:
                if not isinstance(error, Exception):
                    native.insist(partial(_abandon, held))
                raise
            cost.seconds += time.perf_counter() - start

    def put_to_rest(self, handle: ParamHandle) -> None:
        """Releases the unit of ``handle`` from the device, unless it is held, or ranks have to have
        the same units there."""
        with self.job.uses.begin():
            if self.job.ranks.alone and not self.job.prefetcher.is_held(handle.unit):
                self.job.prefetcher.release_all([handle.unit])

    def _bring(self, unit: ParamUnit) -> int:
        """Holds a unit. Returns the bytes that were brought for it."""
        prefetcher, is_brought = self.job.prefetcher, unit.residency is not Residency.RESIDENT
        prefetcher.hold(unit, in_pass=False)
        if is_brought:
            if unit.index == self._last + 1:  # a walk through the model
                prefetcher.fetch_ahead(range(unit.index + 1, len(self.job.units)), 0.0)
            self._last = unit.index
        return unit.weight_nbytes if is_brought else 0

    def _cost_of(self, operation: str) -> Cost:
        """Returns the cost of the present step, to which ``operation`` belongs. Logs that of the
        first step with any, once it is over."""
        cost = self._cost
        if cost.step != self.job.steps.index:
            if cost.nbytes and not self._has_warned:
                self._has_warned = True
                logger.info("%s", cost)
            self._cost = cost = Cost(self.job.steps.index)
        cost.count += 1
        cost.operations.setdefault(operation)
        return cost

    def _watch(self, handle: ParamHandle, *, is_counted: bool) -> None:
        """Watches for a write that torch does not count. Keeps the value before, if home would not
        have it after a write."""
        unit = handle.unit
        is_lost = unit.computes_at_home and (
            "master" in handle.flat_param.arrays or self.job.uses.takes(Right.OWN_WEIGHTS)
        )
        if is_lost or not is_counted:
            unit.watch(handle.param, own_bytes(handle.param))

    def _let_go(self, units: Sequence[ParamUnit], operation: str) -> None:
        """Takes the holds off, which sends changes home. Raises UsageError if they may not be made
        now, with the values of before."""
        refusals = [self._count_edits(unit, operation) for unit in units]
        self.job.prefetcher.unhold_all(units, in_pass=False)
        if any(refusals) or not self.job.ranks.alone:
            # What was refused is not home; ranks have to have the same units resident.
            self.job.prefetcher.release_all(units)
        for refusal in filter(None, refusals):
            raise refusal

    def _count_edits(self, unit: ParamUnit, operation: str) -> UsageError | None:
        """Counts the changes before they go home, so that an interrupt between the two is told. If
        they may not be made now, takes them back and returns the error."""
        if not (edited := unit.exposure.edits.find()):
            return None
        try:
            self.job.uses.check(Operation.WRITE_VALUE, operation)
        except UsageError as error:
            unit.exposure.edits.take_back()
            unit.exposure.begin()
            return error
        for param in edited:
            managed(param).changed()
        return None


def _abandon(units: Sequence[ParamUnit]) -> None:
    """Puts parameters to rest after an interrupt, so that their next use recovers first. A device
    that is the home keeps what was written, unless masters would not have it. Can be called
    again."""
    for unit in units:
        if unit.computes_at_home:
            unit.exposure.edits.take_back()
            for param in unit.exposure.edits.find():
                managed(param).changed()
        unit.exposure.forget()
