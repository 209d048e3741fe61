"""StaleWeights: double-buffered weights. An update runs while earlier micro-batches still use the
old ones (PipeDream-2BW).

Updates are one step late. Batch t computes with the weights that update t - 1 started from, that is
after max(t - 1, 0) updates. Its gradients are applied to the newest weights. The stale weights are
at the same home, two bytes a parameter in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import InternalError, UsageError
from ..state.operations import State
from ..state.versions import UnitVersions
from .job import Job


class StaleWeights:
    """The stale weights of one engine. Used from the thread that runs the model, between forwards
    and backwards."""

    def __init__(self, job: Job):
        """Allocates the stale weights; every rank calls this. Raises CapacityError if there is no
        room, PeerError if another rank has none, and UsageError if an optimizer's class steps;
        nothing is changed then."""
        self._job, self._pass = job, job.running
        self._first = 0  # the engine's step when the run began
        self._versions: list[UnitVersions] = []
        units = [unit for unit in job.units if UnitVersions.has(unit)]
        flat_params = [
            (unit, flat) for unit in units for flat in unit.flat_params if flat.spec.stepped
        ]
        if by_class := [flat.names[0] for _, flat in flat_params if flat.spec.class_piece]:
            raise UsageError(
                f"without_flush: {by_class[0]} is stepped by its optimizer's own code, which does"
                " not write new weights beside the old ones. Run the pipeline with flush."
            )
        taken = []
        try:
            with job.collectives.together("taking room for a second version of the weights"):
                for unit, flat_param in flat_params:
                    flat_param.homes.wait_idle()
                    taken.append(flat_param)
                    flat_param.homes.keep_stale(job.store, f"unit {unit.name}")
                job.prefetcher.release_all(units)
                self._versions = [
                    UnitVersions(unit, len(job.units) + number) for number, unit in enumerate(units)
                ]
        except BaseException:
            for unit in units:
                unit.stale = None
            for flat_param in taken:
                flat_param.homes.drop_stale(job.store)
            raise
        for versions in self._versions:
            versions.stale.buffers.list_in(job.storages, versions.unit)
        job.prefetcher.add([versions.stale for versions in self._versions])
        running, scopes = job.running, job.scopes
        job.uses.define(State.STALE, lambda: running.runs_without_flush and not scopes.interrupted)
        job.uses.define(
            State.BETWEEN,
            lambda: (
                running.runs_without_flush and not running.is_updating and not scopes.interrupted
            ),
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps both versions inside the block. It begins with one, and ends with the newest
        alone."""
        try:
            self._first, self._pass.runs_without_flush, self._pass.is_updating = (
                self._job.steps.index,
                True,
                False,
            )
            yield
            with self._job.uses.begin():
                # Units fetched ahead are for a batch that does not come.
                self._job.prefetcher.release_all([versions.unit for versions in self._versions])
                for versions in self._versions:
                    versions.compute_with(stale=False)
            self._pass.runs_without_flush = False
        except BaseException:
            # An update may be half done: the next use restores which version is which.
            self._job.uses.interrupt()
            self._pass.runs_without_flush = False
            raise

    def compute_for(self, batch: int) -> None:
        """Selects the weights of ``batch``, counted from the beginning of the run, for the next
        forwards.

        Raises UsageError if an exception has ended the run, even if it was caught.
        """
        if not self._pass.runs_without_flush:
            raise UsageError(
                "this run without flush was cut short by an exception that something inside it has"
                " caught: its stages are not all after the same update. Go on from a checkpoint."
            )
        made = self._job.steps.index - self._first
        wanted = max(batch - 1, 0)
        if made - wanted not in (0, 1):
            raise InternalError(
                f"batch {batch} wants the weights after {wanted} updates of this run, of which"
                f" {made} are made"
            )
        for versions in self._versions:
            versions.compute_with(stale=wanted < made)

    def update(self, step: Callable[[], object]) -> None:
        """Runs ``step``, between two uses of the engine: the weights before it become the stale
        ones."""
        job = self._job
        with job.uses.begin():
            for versions in self._versions:
                job.prefetcher.keep_as_stale(versions.unit, versions.stale, versions.begin_update)
        self._pass.is_updating = True
        step()
        self._pass.is_updating = False

    def settle(self) -> None:
        """Returns to the newest weights alone, after an exception. Only while nothing is
        running."""
        for versions in self._versions:
            versions.settle()
