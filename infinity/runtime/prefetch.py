"""Prefetcher: makes units resident in time and keeps the device window and the staging pool within their plan.

hold      a reason why a unit must stay resident: a forward that runs in it, a backward that will need it
idle      resident without a hold; such units make room when the window is full: what is needed last goes first
window    device bytes for gathered weights
older     a unit's weights before the last update, where those are kept: a unit of their own here, which a hold of the unit may mean
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from ..distributed.collectives import Collectives
from ..errors import CapacityError
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.sizes import format_nbytes
from ..machine.tiers import Tier
from ..planning.lookahead import LookAhead
from ..planning.schedule import Schedule
from ..state.apart import apart
from ..state.journal import Journal
from ..state.residency import Residency
from ..state.unit import ParamUnit
from ..storage.store import ShardStore
from .pass_state import Pass
from .staging_slots import StagingSlots
from .window import Window

COPIES_AHEAD = 2  # units on their way to the device beside the one that computes
# The same with other ranks in a forward, whose units may still be stepped: each is waited for before the compute starts.
GATHERS_AHEAD = 1


class Prefetcher:
    """Moves units between home and device, on demand and ahead of it."""

    def __init__(
        self,
        units: Sequence[ParamUnit],
        store: ShardStore,
        ledger: Ledger,
        schedule: Schedule,
        *,
        window_nbytes: int,
        units_ahead: int,
        give_way: Callable[[], bool],
        before_gather: Callable[[], None],
        collectives: Collectives,
        device: Device,
        journal: Journal,
        running: Pass,
    ):
        self.units, self.schedule = units, schedule
        self._store, self._ledger, self._journal = store, ledger, journal
        self._window, self._slots = Window(window_nbytes), StagingSlots(units, store)
        # Beside a device that computes by itself the host does not see how long that takes.
        self.look_ahead = LookAhead(units_ahead, is_fixed=device.overlaps)
        self._collectives, self._ranks, self._device = collectives, collectives.ranks, device
        self._give_way = give_way  # asks the backward to let a unit go; False when it cannot
        self._before_gather = before_gather  # starts what comes first on every rank
        self._pass = running
        self.misses = 0  # units waited for that nobody had fetched ahead

    def add(self, units: Sequence[ParamUnit]) -> None:
        """Moves ``units``, too: those that come are numbered from the last one on. Where no budget limits the device they have room of their own."""
        self.units = [*self.units, *units]
        if self._ledger.accounts[Tier.DEVICE].budget_nbytes is None:
            self._window.widen(sum(unit.weight_nbytes for unit in units))
        self._slots = StagingSlots(self.units, self._store)

    # --- holds ---

    @apart
    def hold(self, unit: ParamUnit, *, backward: bool = False, offered: int = 0) -> int | None:
        """Makes ``unit`` resident and keeps it so until :meth:`unhold`. Returns what :meth:`ensure` does."""
        unit = unit.in_use
        self._pass.holds[unit] += 1
        try:
            least = self.ensure(unit, backward=backward, offered=offered)
        except BaseException:
            # Not unhold(): edits of a unit that was not exposed would be those of its last use.
            self._take_off(unit)
            raise
        if self._pass.holds[unit] == 1:
            unit.expose()
        return least

    @apart
    def unhold(self, unit: ParamUnit) -> None:
        """Takes one hold off; without any the unit is idle."""
        unit = unit.in_use
        if self._take_off(unit):
            unit.note_use(self._device.now())
            if unit.residency is Residency.RESIDENT:
                try:
                    unit.write_edits(self._store, self._journal)
                finally:
                    unit.conceal()

    def _take_off(self, unit: ParamUnit) -> bool:
        """Takes one hold off ``unit``. Returns whether it was the last."""
        self._pass.holds[unit] -= 1
        if self._pass.holds[unit] > 0:
            return False
        del self._pass.holds[unit]
        return True

    def is_held(self, unit: ParamUnit) -> bool:
        """Tells whether something computes with ``unit``, or is about to."""
        return unit.in_use in self._pass.holds

    def release_all(self, units: Iterable[ParamUnit]) -> None:
        """Sends ``units`` home, whatever stage they are in: their bytes there are about to change, or did."""
        for unit in units:
            for each in (unit,) if unit.older is None else (unit, unit.older):
                self._release(each)

    def _release(self, unit: ParamUnit) -> None:
        if unit.residency in (Residency.FETCHING, Residency.STAGED):
            unit.drop(self._store)
            return
        if unit.residency is Residency.GATHERING:
            self._finish(unit)
        if unit.residency is Residency.RESIDENT and not unit.stays:
            self._evict(unit)

    def pass_on(self, unit: ParamUnit, older: ParamUnit, change: Callable[[], None]) -> None:
        """Makes what is gathered of ``unit`` that of ``older``, by ``change``: an update is about to make new weights of it. Those that were
        older until now are gone."""
        self._release(older)
        if unit.residency is not Residency.RESIDENT:
            self._release(unit)
        change()
        if unit in self._pass.resident:
            del self._pass.resident[unit]
            self._pass.resident[older] = None

    @apart
    def release_idle(self) -> None:
        """Sends every idle unit home where the pass is over, but where another one is about to use them."""
        if self._pass.is_joined:
            return
        self._collectives.end_pass()
        if self._ranks.keeps_weights or self._pass.is_stale:
            return
        for unit in [unit for unit in self._pass.resident if unit not in self._pass.holds]:
            self._evict(unit)

    # --- residency ---

    def ensure(self, unit: ParamUnit, *, backward: bool = False, offered: int = 0) -> int | None:
        """Makes ``unit`` resident now, then starts fetching what the schedule expects next.

        ``offered``: reductions of gradients that this rank could start. Returns the least number that any rank of the row offered,
        None where the ranks did not meet for a gather.
        """
        least = None
        self._note_compute()
        if unit.residency is Residency.GATHERING:
            self._finish(unit)
        if unit.residency is not Residency.RESIDENT:
            least = self._bring(unit, offered)
        else:
            unit.arriving.precede()  # this may be another stream than the one that waited for it
            if unit in self._pass.resident:
                self._pass.resident[unit] = self._pass.resident.pop(unit)  # most recently used
        for shard in unit.shards:
            if shard.update is not None:
                with self._store.traffic.stalled("nvme->host", unit.name):
                    shard.wait()
        self.schedule.use(unit.index)
        if (times := unit.take_read_times()) is not None:
            self.look_ahead.note_read(unit.index, *times)
        self._pass.computing = unit.index, time.perf_counter()
        self.fetch_ahead(self.schedule.upcoming(backward=backward))
        upcoming = islice(self.schedule.upcoming(backward=backward), COPIES_AHEAD)
        if self._ranks.size > 1:
            ahead = self._gather_ahead(upcoming if backward else islice(upcoming, GATHERS_AHEAD), offered)
            least = least if ahead is None else ahead
        elif self._device.overlaps:
            self._copy_ahead(upcoming)
        return least

    def begin_pass(self, *, training: bool) -> None:
        """Begins a root forward: the schedule knows what is expected."""
        self._pass.computing = None
        self.look_ahead.begin_pass(self.schedule.expected())
        self._collectives.begin_pass(self.schedule.expected(), [unit.index for unit in self._pass.resident], training=training)

    def _note_compute(self) -> None:
        if self._pass.computing is not None:
            unit, since = self._pass.computing
            self.look_ahead.note_compute(unit, time.perf_counter() - since)

    def _gather_ahead(self, upcoming: Iterable[int], offered: int) -> int | None:
        """Starts gathering the next units while this one computes. Returns what all ranks offered, None where none starts.

        Every rank must decide the same, so a unit that has not arrived is waited for. Until the traces of
        a pass agree over the ranks, nothing is gathered before it is used.
        """
        coming, least = [self.units[index] for index in upcoming], None
        if not self._collectives.traces_agree:
            return None
        for unit in coming:
            if unit.residency in (Residency.RESIDENT, Residency.GATHERING):
                continue
            # Where the plan has room for one unit, and further ahead, to wait for the disk would hold up the compute.
            if unit.is_staged_from_disk and (self.look_ahead.depth == 0 or unit is not coming[0]):
                break
            if not self._finds_room(unit, coming):
                break
            self._stage(unit)
            if unit.is_sliced:
                self._before_gather()
            told = unit.start_gather(self._store, self._ledger, offered=offered)
            least = least if told is None else told
            self._pass.resident[unit] = None
        return least

    def _copy_ahead(self, upcoming: Iterable[int]) -> None:
        """Starts copying the next units to the device while this one computes: those that are ready at home, as far as the
        window reaches without what comes before them."""
        coming = [self.units[index] for index in upcoming]
        for unit in coming:
            if unit.residency in (Residency.RESIDENT, Residency.GATHERING):
                continue
            if not unit.is_ready:
                return  # the compute is not to wait for a later unit's update or disk
            if not self._finds_room(unit, coming):
                return
            self._stage(unit)
            try:
                unit.start_gather(self._store, self._ledger)
            except CapacityError:  # activations have the room: it comes when it is needed
                return
            self._pass.resident[unit] = None

    def fetch_ahead(self, upcoming: Iterable[int]) -> None:
        """Starts reading the next units that come from disk, as far as the staging pool reaches."""
        self._slots.fetch_ahead(upcoming, self.look_ahead.depth)

    def _bring(self, unit: ParamUnit, offered: int) -> int | None:
        self._stage(unit)
        self._make_room(unit)
        if unit.is_sliced:
            self._before_gather()
        least = unit.start_gather(self._store, self._ledger, offered=offered)
        self._pass.resident[unit] = None
        self._finish(unit)
        return least

    def _stage(self, unit: ParamUnit) -> None:
        """Has the unit's bytes in memory here."""
        if unit.is_staged_from_disk:
            if unit.residency is Residency.STORED:
                self.misses += 1
                unit.fetch(self._store, self._slots.take(unit))
            if unit.residency is Residency.FETCHING and not unit.copies_while_fetching:
                with self._store.traffic.stalled("nvme->host", unit.name):
                    unit.stage()
        else:
            for shard in unit.shards:
                shard.wait()

    def narrow(self, nbytes: int) -> None:
        """Leaves ``nbytes`` of the planned window to something else, until it is called again; between passes. Ranks of a row give the same.
        Raises CapacityError, with the window as it was, where the largest unit would not fit what is left."""
        self._window.narrow(nbytes, largest_nbytes=max((unit.weight_nbytes for unit in self.units), default=0))
        while self._resident_nbytes() > self._window.nbytes and (idle := self._idle()):
            self._evict(idle[0])

    def _finds_room(self, unit: ParamUnit, coming: Sequence[ParamUnit]) -> bool:
        """Whether ``unit`` fits the window, ahead of its use, once others that are idle and not ``coming`` have made room."""
        if self._fits(unit):
            return True
        for other in self._idle() if not self._ranks.keeps_weights else ():
            if other not in coming:
                self._evict(other)
                if self._fits(unit):
                    return True
        return False

    def _fits(self, unit: ParamUnit) -> bool:
        return self._resident_nbytes() + unit.weight_nbytes <= self._window.nbytes

    def _make_room(self, unit: ParamUnit) -> None:
        """Evicts idle units, then ones that the backward can do without for now, until ``unit`` fits the window."""
        while not self._fits(unit):
            idle = self._idle()
            if idle:
                self._evict(idle[0])
            elif not self._give_way():
                break
        over = self._resident_nbytes() + unit.weight_nbytes - self._window.nbytes
        if over > 0 and self._ledger.accounts[Tier.DEVICE].budget_nbytes is not None:
            held = ", ".join(other.name for other in self._pass.resident)
            raise CapacityError(
                f"unit {unit.name} ({format_nbytes(unit.weight_nbytes)}) does not fit the device window of "
                f"{format_nbytes(self._window.nbytes)} beside the units in use ({held}). Raise "
                f"Config(device_memory=...) by {format_nbytes(over)}."
            )

    def _idle(self) -> list[ParamUnit]:
        """Lists the resident units that nobody holds, in the order in which they make room: by their next use, the farthest first,
        where this pass is expected to go as the last one; of equals, and else, the least recently used first.

        Ranks of a row go by their traces only where these agree, so that all choose the same.
        """
        idle = [other for other in self._pass.resident if other not in self._pass.holds]
        if self._ranks.size == 1 or self._collectives.traces_agree:
            idle.sort(key=lambda other: -self.schedule.next_use(other.index))
        return idle

    def _resident_nbytes(self) -> int:
        return sum(unit.weight_nbytes for unit in self._pass.resident)

    def _finish(self, unit: ParamUnit) -> None:
        try:
            unit.finish_gather(self._store)
        except BaseException:
            self._pass.resident.pop(unit, None)
            raise

    def _evict(self, unit: ParamUnit) -> None:
        if unit.residency is Residency.GATHERING:
            self._finish(unit)
        unit.release()
        self._pass.resident.pop(unit, None)
