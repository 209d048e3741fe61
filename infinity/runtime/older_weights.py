"""OlderWeights: runs an engine on two versions of its weights, where updates are made while what began before them goes on.

One update late: batch t computes with the weights that update t - 1 began with, max(t - 1, 0) updates after the first ones, and its gradients
are applied to those of now. Arrays of the older weights lie beside the home, two bytes a parameter in bf16.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..errors import InternalError, UsageError
from ..state.operations import State
from ..state.versions import UnitVersions
from .running import Running


class Versioned(Running, Protocol):
    """The engine, as what keeps two versions of its weights sees it."""

    older: OlderWeights | None

    @property
    def step_index(self) -> int:
        """Optimizer steps that were made."""


class OlderWeights:
    """The older weights of one engine. Used from the thread that runs the model, between forwards and backwards."""

    def __init__(self, engine: Versioned):
        """Takes room for them on every rank, and has the engine know of it. Raises CapacityError where there is none, and PeerError where
        another rank has none: nothing is changed then."""
        self._engine = weakref.ref(engine)  # the engine holds this object
        self.is_running = self._is_updating = False
        self._first = 0  # the engine's step when the run began
        self._versions: list[UnitVersions] = []
        units = [unit for unit in engine.units if UnitVersions.has(unit)]
        shards = [(unit, shard) for unit in units for shard in unit.shards if shard.spec.stepped]
        taken = []
        try:
            with engine.collectives.together("taking room for a second version of the weights"):
                for unit, shard in shards:
                    shard.wait_idle()
                    taken.append(shard)
                    shard.keep_older(engine.store, f"unit {unit.name}")
                engine.release(units)
                self._versions = [UnitVersions(unit, len(engine.units) + number) for number, unit in enumerate(units)]
        except BaseException:
            for unit in units:
                unit.older = None
            for shard in taken:
                shard.drop_older(engine.store)
            raise
        for versions in self._versions:
            versions.older.list_in(engine.storages, versions.unit)
        engine.prefetcher.add([versions.older for versions in self._versions])
        engine.older = self
        me, scopes = weakref.ref(self), engine.scopes
        engine.uses.define(State.STALE, lambda: (older := me()) is not None and older.is_running and not scopes.interrupted)
        engine.uses.define(
            State.BETWEEN, lambda: (older := me()) is not None and older.is_between_updates and not scopes.interrupted
        )

    @property
    def engine(self) -> Versioned:
        return self._engine()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps both versions inside the block. It begins with one, and ends with the newest alone."""
        try:
            self._first, self.is_running, self._is_updating = self.engine.step_index, True, False
            yield
            with self.engine.uses.begin():
                # What was fetched ahead is for a batch that does not come.
                self.engine.release([versions.unit for versions in self._versions])
                for versions in self._versions:
                    versions.compute_with(older=False)
            self.is_running = False
        except BaseException:
            self.engine.uses.interrupt()  # in an update, perhaps, that has not been made: the next use puts right which weights are which
            self.is_running = False
            raise

    def compute_for(self, batch: int) -> None:
        """Has what runs from now on have the weights of ``batch``, counted from the beginning of the run.

        Raises UsageError where an exception has ended the run, though somebody caught it.
        """
        if not self.is_running:
            raise UsageError(
                "this run without flush was cut short by an exception that something inside it has caught: its stages are not all after the same "
                "update. Go on from a checkpoint."
            )
        made = self.engine.step_index - self._first
        wanted = max(batch - 1, 0)
        if made - wanted not in (0, 1):
            raise InternalError(f"batch {batch} wants the weights after {wanted} updates of this run, of which {made} are made")
        for versions in self._versions:
            versions.compute_with(older=wanted < made)

    def update(self, step: Callable[[], object]) -> None:
        """Makes an update by ``step``, between two uses of the engine: the weights that it begins with become the older ones."""
        engine = self.engine
        with engine.uses.begin():
            for versions in self._versions:
                engine.prefetcher.pass_on(versions.unit, versions.older, versions.begin_update)
        self._is_updating = True
        step()
        self._is_updating = False

    @property
    def is_between_updates(self) -> bool:
        """Whether a run is under way, and makes no update just now."""
        return self.is_running and not self._is_updating

    def rebuild(self) -> None:
        """Goes back to the newest weights alone, whatever an exception left. Only while nothing is running."""
        self.is_running = False
        for versions in self._versions:
            versions.settle()
