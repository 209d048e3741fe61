"""Touches: holds units for one operation on their parameters, outside of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..errors import UsageError
from ..state import mistakes
from ..state.dtensors import is_distributed
from ..state.handle import ParamHandle
from ..state.operations import Operation
from ..state.unit import ParamUnit
from .job import Job


class Touches:
    """The operations on parameters outside of a pass. ``refuse`` makes the error for one that is
    refused."""

    def __init__(self, job: Job, refuse: Callable[[ParamHandle, str], UsageError]):
        self.job, self._refuse = job, refuse

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
            for handle in handles:
                if self._needs_others(handle) or mistakes.is_misuse():
                    raise self._refuse(handle, operation)
            held: list[ParamUnit] = []
            try:
                with job.store.guarding():
                    for unit in dict.fromkeys(handle.unit for handle in handles):
                        job.prefetcher.hold(unit, in_pass=False)
                        held.append(unit)
                if writes:
                    for handle in handles:
                        self._watch(handle)
                yield
            finally:
                for unit in held:
                    self._let_go(unit)

    @staticmethod
    def _needs_others(handle: ParamHandle) -> bool:
        return handle.unit.is_sharded or is_distributed(handle.param)

    @staticmethod
    def _watch(handle: ParamHandle) -> None:
        """Keeps the value before a write, if home would not have it then."""
        if handle.unit.stays and "master" in handle.flat_param.arrays:
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
