"""StaleWeights: versions of the weights from before earlier updates. An update runs while earlier
micro-batches still use them (PipeDream, PipeDream-2BW).

version   how many updates the weights have had since the run began
kept      versions beside the newest, each in a slot of its own; 0: updates are in place
ahead     with error feedback: every version is computed with as it is expected to be so many
          updates later, from the last one; that takes a slot for the newest one, too

Gradients of any version are applied to the newest weights. Stale weights are at the same home, two
bytes a parameter in bf16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ...core.machine.tiers import Tier
from ...core.run.job import Job
from ...core.run.operations import Activity, Right, StateKind
from ...core.seams import Extension
from ...core.units.unit import ParamUnit
from ...errors import InternalError, UsageError
from ..class_step.admission import INSTEAD
from .versions import UnitVersions, add_slot, drop_slot, make_stale

REMEDY = (
    "{} is not available while a pipeline runs without flush: its stages are not all after the same"
    " update. Call it when run() has returned, which flushes: between two calls there is one"
    " version of the weights."
)


class VersionState(StateKind):
    """While a pipeline runs without flush, and the same except for the updates that it makes."""

    STALE = Activity("w", frozenset({Right.ONE_VERSION}), REMEDY)
    BETWEEN = Activity("o", frozenset({Right.LOOP_STEPS}), REMEDY)


class StaleWeights(Extension):
    """The stale weights of one engine. Used from the thread that runs the model, between forwards
    and backwards."""

    def __init__(self, job: Job):
        """Keeps none before :meth:`keep`."""
        self._job, self._pass = job, job.running
        self._first = 0  # the engine's step when the run began
        self._kept, self._ahead = 0, 0.0  # of the run
        self._versions = [UnitVersions(unit) for unit in job.units if UnitVersions.has(unit)]
        self._allocated = 0
        self._runs = self._is_updating = False  # by itself, between two batches

    def rights(self, job: Job) -> dict[StateKind, Callable[[], bool]]:
        """Takes rights while a pipeline runs without flush, and some more between its updates."""
        scopes = job.scopes

        def runs() -> bool:
            return self._runs and not scopes.interrupted

        return {
            VersionState.STALE: runs,
            VersionState.BETWEEN: lambda: runs() and not self._is_updating,
        }

    def keep(self, kept: int) -> None:
        """Allocates room for ``kept`` versions, as far as there is none yet; every rank calls this.
        Raises CapacityError if there is no room, PeerError if another rank has none, and UsageError
        if an optimizer's class steps; nothing is changed then."""
        job, units = self._job, [versions.unit for versions in self._versions]
        flat_params = [
            (unit, flat) for unit in units for flat in unit.flat_params if flat.spec.stepped
        ]
        if by_class := [flat.names[0] for _, flat in flat_params if flat.spec.needs is not None]:
            raise UsageError(
                f"without_flush: {by_class[0]} is stepped by its optimizer's own code, which does"
                " not write new weights beside the old ones. Run the pipeline with flush."
            )
        made, before = list[ParamUnit](), self._allocated
        try:
            with job.collectives.together("taking room for more versions of the weights"):
                needed = Counter[Tier]()
                for _, flat in flat_params:
                    needed[flat.weight.tier] += (kept - before) * flat.weight.nbytes
                for tier, nbytes in needed.items():
                    job.store.allocator.make_room(tier, nbytes, "weights of older versions")
                for slot in range(before, kept):
                    for unit, flat_param in flat_params:
                        flat_param.homes.wait_idle()
                        add_slot(flat_param.homes, job.store, slot, f"unit {unit.name}")
                    job.prefetcher.release_all(units)
                    first = len(job.prefetcher.units) + len(made)
                    made += [
                        make_stale(unit, first + number, job.device)
                        for number, unit in enumerate(units)
                    ]
        except BaseException:
            for unit in units:
                unit.older = unit.older[:before]
            for slot in range(before, kept):
                for _, flat_param in flat_params:
                    drop_slot(flat_param.homes, job.store, slot)
            raise
        if kept > before:
            for unit, stale in zip(units * (kept - before), made):
                stale.buffers.list_in(job.storages, unit)
            job.prefetcher.add(made)
            self._allocated = kept

    @contextmanager
    def running(self, kept: int = 1, ahead: float = 0.0) -> Iterator[None]:
        """Keeps up to ``kept`` stale versions inside the block. It begins with none, and ends with
        the newest alone."""
        try:
            self._first, self._kept, self._ahead = self._job.steps.index, kept, ahead
            self._runs, self._is_updating = True, False
            # Units are used in another version, too, and other stages are at other batches.
            self._pass.kind, self._pass.keeps_idle = "unflushed", True
            self._pass.stages_differ = True
            if ahead:
                self._extrapolate(0, None)
            yield
            with self._job.uses.begin():
                # Units fetched ahead are for a batch that does not come.
                self._job.prefetcher.release_all([versions.unit for versions in self._versions])
                for versions in self._versions:
                    versions.compute_with(None)
            self._end()
        except BaseException:
            # An update may be half done: the next use restores which version is which.
            self._job.uses.interrupt()
            self._end()
            raise

    def _end(self) -> None:
        self._runs = self._pass.keeps_idle = self._pass.stages_differ = False
        self._pass.kind = "train"

    @property
    def _made(self) -> int:
        """The newest version."""
        return self._job.steps.index - self._first

    def compute_with(self, version: int) -> None:
        """Selects the ``version`` of the weights for the next forwards, or backwards.

        Raises UsageError if an exception has ended the run, even if it was caught.
        """
        if not self._runs:
            raise UsageError(
                "this run without flush was cut short by an exception that something inside it has"
                " caught: its stages are not all after the same update. Go on from a checkpoint."
            )
        made, kept = self._made, self._kept
        if not made - kept <= version <= made:
            raise InternalError(
                f"weights after {version} updates of this run are asked for, of which {made} are"
                f" made and {kept} are kept"
            )
        slot = version % self._slots if version < made or self._ahead else None
        for versions in self._versions:
            versions.compute_with(slot)

    @property
    def _slots(self) -> int:
        return self._kept + bool(self._ahead)

    def update(self, step: Callable[[], object]) -> None:
        """Runs ``step``, between two uses of the engine: the weights before it become stale ones,
        in place of the oldest."""
        job = self._job
        # The oldest's. With error feedback the newest version is in a slot, too.
        slot = (self._made + bool(self._ahead)) % max(1, self._slots)
        with job.uses.begin():
            for versions in self._versions if self._kept else ():
                job.prefetcher.hand_over(
                    versions.unit, versions.unit.older[slot], partial(versions.begin_update, slot)
                )
        self._is_updating = True
        step()
        if self._ahead:
            self._extrapolate(slot, self._ahead)
        self._is_updating = False

    def _extrapolate(self, slot: int, ahead: float | None) -> None:
        job = self._job
        with job.uses.begin():
            for versions in self._versions:
                job.prefetcher.release_all([versions.unit.older[slot]])
                versions.extrapolate(job.store, slot, ahead)

    def install(self, job: Job, model: object) -> None:
        """Adds a listener for parameters that come later."""
        job.events.admitting.append(self.refuse_more)

    def refuse_more(self, asked: str) -> None:
        """Raises UsageError: ``asked`` would step parameters that have no stale weights."""
        raise UsageError(
            f"{asked} after without_flush, which keeps no stale weights of these parameters."
            f" {INSTEAD}"
        )

    def drop(self, job: Job) -> None:
        """Returns to the newest weights alone, after an exception."""
        self._end()
        for versions in self._versions:
            versions.settle()
