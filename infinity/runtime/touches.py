"""Touches: holds units for one operation on their parameters, outside of a pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import UsageError
from ..machine.sizes import format_nbytes
from ..state import mistakes
from ..state.dtensors import is_distributed
from ..state.handle import ParamHandle
from ..state.operations import Operation
from ..state.residency import Residency
from ..state.unit import ParamUnit
from .job import Job

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
        self._cost, self._has_told = Cost(job.steps.index), False
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
                if is_misuse or self._needs_others(handle):
                    raise self._refuse(handle, operation)
            held: list[ParamUnit] = []
            start, cost = time.perf_counter(), self._cost_of(operation)
            try:
                with job.store.guarding():
                    for unit in dict.fromkeys(handle.unit for handle in handles):
                        cost.nbytes += self._bring(unit)
                        held.append(unit)
                if writes:
                    for handle in handles:
                        self._watch(handle, is_counted=not operation.startswith("_foreach_"))
                yield
            finally:
                for unit in held:
                    self._let_go(unit)
            cost.seconds += time.perf_counter() - start

    def _bring(self, unit: ParamUnit) -> int:
        """Holds a unit. Returns the bytes that were brought for it."""
        prefetcher, is_brought = self.job.prefetcher, unit.residency is not Residency.RESIDENT
        prefetcher.hold(unit, in_pass=False)
        if is_brought:
            if unit.index == self._last + 1:  # a walk through the model
                prefetcher.fetch_ahead(range(unit.index + 1, len(self.job.units)))
            self._last = unit.index
        return unit.weight_nbytes if is_brought else 0

    def _cost_of(self, operation: str) -> Cost:
        """Returns the cost of the present step, to which ``operation`` belongs. Logs that of the
        first step with any, once it is over."""
        cost = self._cost
        if cost.step != self.job.steps.index:
            if cost.nbytes and not self._has_told:
                self._has_told = True
                logger.info("%s", cost)
            self._cost = cost = Cost(self.job.steps.index)
        cost.count += 1
        cost.operations.setdefault(operation)
        return cost

    @staticmethod
    def _needs_others(handle: ParamHandle) -> bool:
        return handle.unit.is_sharded or is_distributed(handle.param)

    @staticmethod
    def _watch(handle: ParamHandle, *, is_counted: bool) -> None:
        """Watches for a write that torch may not count (lists with gradients of the engine). Keeps
        the value before, if home would not have it then."""
        if not is_counted or handle.unit.stays and "master" in handle.flat_param.arrays:
            handle.unit.watch(handle.param, handle.param.detach())

    def _let_go(self, unit: ParamUnit) -> None:
        """Takes the hold off, which sends changes home. What autograd saved before is stale."""
        edits = [handle.forward_edits for handle in unit.handles]
        self.job.prefetcher.unhold(unit, in_pass=False)
        for handle, before in zip(unit.handles, edits):
            if handle.forward_edits != before:
                handle.changed()
        if not self.job.ranks.alone:  # ranks have to have the same units resident
            self.job.prefetcher.release_all([unit])
