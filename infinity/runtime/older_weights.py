"""OlderWeights: runs an engine on two versions of its weights, where updates are made while what began before them goes on.

One update late: batch t computes with the weights that update t - 1 began with, max(t - 1, 0) updates after the first ones, and its gradients
are applied to those of now. Arrays of the older weights lie beside the home, two bytes a parameter in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import InternalError, UsageError
from ..state.operations import State
from ..state.versions import UnitVersions
from .job import Job


class OlderWeights:
    """The older weights of one engine. Used from the thread that runs the model, between forwards and backwards."""

    def __init__(self, job: Job):
        """Takes room for them on every rank. Raises CapacityError where there is none, and PeerError where
        another rank has none: nothing is changed then."""
        self._job, self._pass = job, job.running
        self._first = 0  # the engine's step when the run began
        self._versions: list[UnitVersions] = []
        units = [unit for unit in job.units if UnitVersions.has(unit)]
        shards = [(unit, shard) for unit in units for shard in unit.shards if shard.spec.stepped]
        taken = []
        try:
            with job.collectives.together("taking room for a second version of the weights"):
                for unit, shard in shards:
                    shard.wait_idle()
                    taken.append(shard)
                    shard.keep_older(job.store, f"unit {unit.name}")
                job.prefetcher.release_all(units)
                self._versions = [UnitVersions(unit, len(job.units) + number) for number, unit in enumerate(units)]
        except BaseException:
            for unit in units:
                unit.older = None
            for shard in taken:
                shard.drop_older(job.store)
            raise
        for versions in self._versions:
            versions.older.list_in(job.storages, versions.unit)
        job.prefetcher.add([versions.older for versions in self._versions])
        running, scopes = job.running, job.scopes
        job.uses.define(State.STALE, lambda: running.is_stale and not scopes.interrupted)
        job.uses.define(State.BETWEEN, lambda: running.is_stale and not running.is_updating and not scopes.interrupted)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps both versions inside the block. It begins with one, and ends with the newest alone."""
        try:
            self._first, self._pass.is_stale, self._pass.is_updating = self._job.steps.index, True, False
            yield
            with self._job.uses.begin():
                # What was fetched ahead is for a batch that does not come.
                self._job.prefetcher.release_all([versions.unit for versions in self._versions])
                for versions in self._versions:
                    versions.compute_with(older=False)
            self._pass.is_stale = False
        except BaseException:
            self._job.uses.interrupt()  # in an update, perhaps, that has not been made: the next use puts right which weights are which
            self._pass.is_stale = False
            raise

    def compute_for(self, batch: int) -> None:
        """Has what runs from now on have the weights of ``batch``, counted from the beginning of the run.

        Raises UsageError where an exception has ended the run, though somebody caught it.
        """
        if not self._pass.is_stale:
            raise UsageError(
                "this run without flush was cut short by an exception that something inside it has caught: its stages are not all after the same "
                "update. Go on from a checkpoint."
            )
        made = self._job.steps.index - self._first
        wanted = max(batch - 1, 0)
        if made - wanted not in (0, 1):
            raise InternalError(f"batch {batch} wants the weights after {wanted} updates of this run, of which {made} are made")
        for versions in self._versions:
            versions.compute_with(older=wanted < made)

    def update(self, step: Callable[[], object]) -> None:
        """Makes an update by ``step``, between two uses of the engine: the weights that it begins with become the older ones."""
        job = self._job
        with job.uses.begin():
            for versions in self._versions:
                job.prefetcher.pass_on(versions.unit, versions.older, versions.begin_update)
        self._pass.is_updating = True
        step()
        self._pass.is_updating = False

    def settle(self) -> None:
        """Goes back to the newest weights alone, whatever an exception left. Only while nothing is running."""
        for versions in self._versions:
            versions.settle()
