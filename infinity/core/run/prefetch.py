"""Prefetcher: makes units resident in time, within the device window and the staging pool.

hold      a reason why a unit must stay resident: a forward that runs in it, or a backward that will
          need it
show      a hold in which the parameters are ordinary ones: the forward of an owner. Autograd saves
          them as references there, and nowhere else
idle      resident without a hold; a full window evicts idle units, the one needed last first
window    device bytes for gathered weights
older     of weights of a unit from before an update: units of their own here, one of which a hold
          of the unit may mean
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import islice

import torch

from ...errors import CapacityError
from ...ranks.collectives import Collectives
from ..homes.store import ArrayStore
from ..machine.device import Device
from ..machine.ledger import Ledger
from ..machine.sizes import format_nbytes
from ..machine.tiers import BUDGETS, Tier
from ..params.outside_modes import outside_modes
from ..units.added import always_rests
from ..units.forms import form_of
from ..units.residency import Residency
from ..units.unit import ParamUnit, flat_params_of
from .journal import Journal
from .lookahead import LookAhead
from .pass_state import Pass
from .schedule import Schedule
from .staging_slots import StagingSlots
from .window import Window

COPIES_AHEAD = 2  # units on their way to the device beside the one that computes
# The same in a forward with several ranks. A later unit may still be stepped, and compute would
# wait for that.
GATHERS_AHEAD = 1


# Adds to an error what gives a window of so many bytes, and so many of gradients and of what is not
# planned beside it.
Explain = Callable[[CapacityError, int, int, int], CapacityError]
COMING = (Residency.RESIDENT, Residency.GATHERING)


class Prefetcher:
    """Moves units between home and device, on demand and ahead of it."""

    def __init__(
        self,
        units: Sequence[ParamUnit],
        store: ArrayStore,
        ledger: Ledger,
        schedule: Schedule,
        *,
        window_nbytes: int,
        autograd_nbytes: int = 0,
        explain: Explain,
        units_ahead: int,
        give_way: Callable[[], bool],
        collectives: Collectives,
        device: Device,
        journal: Journal,
        running: Pass,
    ):
        self.units, self.schedule = units, schedule
        self._store, self._ledger, self._journal = store, ledger, journal
        self._window = Window(window_nbytes)
        self._slots = StagingSlots(units, store, schedule.next_use)
        self.autograd_nbytes = autograd_nbytes  # for gradients, beside the window
        self._explain = explain
        # The host cannot time the compute of a device that runs asynchronously.
        self.look_ahead = LookAhead(units_ahead, is_fixed=device.overlaps)
        self._collectives, self._ranks, self._device = collectives, collectives.ranks, device
        self._give_way = give_way  # lets the backward release a unit; False when it has none
        self._pass = running
        self._traces_agree: Callable[[], bool] = bool  # of the pass: see Collectives.begin_pass
        # In this pass: whether no weights move, and autograd may save them as they are. Its views
        # of one with a master would be taken for a user's, who may change it.
        self.moves_nothing = self.saves_weights = False
        self.misses = 0  # units that were not fetched ahead of their use

    def add(self, units: Sequence[ParamUnit]) -> None:
        """Adds ``units``, numbered after the last one; without a device budget the window grows."""
        self.units = [*self.units, *units]
        vars(self).pop("never_moves", None)
        if self._ledger.accounts[Tier.DEVICE].budget_nbytes is None:
            self._window.widen(sum(unit.weight_nbytes for unit in units))
        self._slots = StagingSlots(self.units, self._store, self.schedule.next_use)

    @cached_property
    def never_moves(self) -> tuple[bool, bool]:
        """Whether all weights are on the device as long as the job lasts, as plain tensors of one
        rank, and no budget counts what computes with them; and whether none has a master."""
        flats = flat_params_of(self.units)
        plain = all(
            form_of(param).classes is None and not always_rests(param)
            for flat in flats
            for param in flat.params
        )
        rests = plain and self._ranks.alone and all(unit.computes_at_home for unit in self.units)
        budget = self._ledger.accounts[Tier.DEVICE].budget_nbytes
        return rests and budget is None, not any("master" in flat.arrays for flat in flats)

    # --- holds ---

    @outside_modes
    def hold(
        self, unit: ParamUnit, *, backward: bool = False, in_pass: bool = True, shows: bool = True
    ) -> None:
        """Makes ``unit`` resident until :meth:`unhold`. Blocks as :meth:`ensure`. ``in_pass``: it
        is a use of the schedule. ``shows``: makes the parameters ordinary ones."""
        unit = unit.in_use or unit
        self._pass.holds[unit] = self._pass.holds.get(unit, 0) + 1
        try:
            if in_pass and not self.moves_nothing:
                self.ensure(unit, backward=backward)
            else:
                self._make_resident(unit)
            if not (backward or (in_pass and self._pass.frames)):  # no pass ends behind this
                self._collectives.wait_for_ordered()
        except BaseException:
            # Not unhold(): the unit is not exposed, so its edits would be those of its last use.
            self._take_off(unit, self._pass.holds)
            raise
        if shows:
            self._pass.shows[unit] = self._pass.shows.get(unit, 0) + 1
            # In a pass chosen rows stay at rest: see ext/rows/chosen_experts.py.
            shows = not in_pass or unit.arrival.rows is None
        if self._pass.holds[unit] == 1:
            unit.exposure.begin(shows=shows)
        elif shows and self._pass.shows[unit] == 1:
            unit.exposure.show()

    @outside_modes
    def unhold(self, unit: ParamUnit, *, in_pass: bool = True, shows: bool = True) -> None:
        """Takes one hold off. The last makes the unit idle, and sends its edits home."""
        unit = unit.in_use or unit
        if shows and self._take_off(unit, self._pass.shows) and self._pass.holds[unit] > 1:
            unit.exposure.end()
        if self._take_off(unit, self._pass.holds):
            if in_pass:
                self.schedule.leave(unit.index)
            try:
                if unit.residency is Residency.RESIDENT:
                    try:
                        unit.write_edits(self._store, self._journal)
                    finally:
                        unit.exposure.end()
            finally:
                unit.buffers.note_use(self._device.now())

    def unhold_all(
        self, units: Iterable[ParamUnit], at_rest: Iterable[ParamUnit] = (), *, in_pass: bool = True
    ) -> None:
        """Takes one hold off each of ``units`` as :meth:`unhold` does, and one without shows off
        each ``at_rest``. After the error of one, off the others too."""
        units, at_rest = iter(units), iter(at_rest)
        try:
            for unit in units:
                self.unhold(unit, in_pass=in_pass)
            for unit in at_rest:
                self.unhold(unit, shows=False)
        except BaseException:
            self.unhold_all(units, at_rest, in_pass=in_pass)
            raise

    @staticmethod
    def _take_off(unit: ParamUnit, holds: dict[ParamUnit, int]) -> bool:
        """Takes one of ``holds`` off ``unit``. Returns whether it was the last."""
        holds[unit] -= 1
        if holds[unit] > 0:
            return False
        del holds[unit]
        return True

    def is_held(self, unit: ParamUnit) -> bool:
        """Tells whether a forward or backward holds ``unit``."""
        return (unit.in_use or unit) in self._pass.holds

    def release_all(self, units: Iterable[ParamUnit]) -> None:
        """Releases ``units`` from device and staging, in any state: their homes change."""
        for unit in units:
            for version in (unit, *unit.older):
                self._release(version)

    def _release(self, unit: ParamUnit) -> None:
        if unit.residency in (Residency.FETCHING, Residency.STAGED):
            unit.drop()
            return
        if unit.residency is Residency.GATHERING:
            self._finish(unit)
        if unit.residency is Residency.RESIDENT and not unit.computes_at_home:
            self._evict(unit)

    def hand_over(self, unit: ParamUnit, older: ParamUnit, change: Callable[[], None]) -> None:
        """Makes the gathered weights of ``unit`` those of ``older``, by ``change``, before an
        update writes new ones. Those that ``older`` had are dropped."""
        self._release(older)
        if unit.residency is not Residency.RESIDENT:
            self._release(unit)
        change()
        if unit in self._pass.resident:
            del self._pass.resident[unit]
            self._pass.resident[older] = None

    @outside_modes
    def release_idle(self) -> None:
        """Ends the pass and releases every idle unit, unless ranks or the pass keep weights. Does
        nothing inside an accumulation pass. Every data rank calls this, and it may block on
        them."""
        if self._pass.is_accumulating:
            return
        self._collectives.end_pass()
        if self._ranks.keeps_weights or self._pass.keeps_idle:
            return
        for unit in [unit for unit in self._pass.resident if unit not in self._pass.holds]:
            self._evict(unit)

    # --- residency ---

    def ensure(self, unit: ParamUnit, *, backward: bool = False) -> None:
        """Makes ``unit`` resident now, then starts fetching the next units of the schedule. Blocks
        on the disk, and on the other ranks for a gather."""
        if self._pass.computing is not None:
            computed, since = self._pass.computing
            self.look_ahead.note_compute(computed, time.perf_counter() - since)
        self._make_resident(unit)
        self.schedule.use(unit.index, backward=backward, saves=torch.is_grad_enabled())
        self._pass.computing = unit.index, (wanted_at := time.perf_counter())
        if (times := unit.take_read_times()) is not None:
            self.look_ahead.note_read(unit.index, *times)
        self.fetch_ahead(self.schedule.upcoming(backward=backward), wanted_at)
        upcoming = islice(self.schedule.upcoming(backward=backward), COPIES_AHEAD)
        if self._ranks.size > 1 and not backward:
            upcoming = islice(upcoming, GATHERS_AHEAD)
        if self._ranks.size > 1 or self._device.overlaps:
            self._gather_ahead(upcoming)

    def _make_resident(self, unit: ParamUnit) -> None:
        if unit.residency is Residency.GATHERING:
            self._finish(unit)
        if unit.residency is not Residency.RESIDENT:
            # Of a weight that runs in tiles staging memory holds a tile alone.
            self.refuse_over([unit], unit.weight_nbytes)
            self._stage(unit)
            while not self._fits(unit):
                if idle := self._idle():
                    self._evict(idle[0])
                elif not self._give_way():  # what the backward can spare
                    break
            self.refuse_over([unit], self._resident_nbytes() + unit.weight_nbytes)
            unit.start_gather(self._store, self._ledger)
            self._pass.resident[unit] = None
            self._finish(unit)
        else:
            # This stream may not be the one that waited for the gather
            unit.arrival.event.precede()
            if unit in self._pass.resident:
                self._pass.resident[unit] = self._pass.resident.pop(unit)  # most recently used
        unit.wait_for_update()
        self.complete(unit)

    def complete(self, unit: ParamUnit) -> None:
        """Brings the rows of resident ``unit`` that the use which begins needs. Blocks on the
        disk."""
        unit.complete(self._store, self._slots.take)

    def begin_pass(self, *, training: bool) -> None:
        """Begins a root forward with the trace that the schedule expects. Every data rank calls
        this; it does not wait for their answers."""
        self._pass.computing = None
        rests, without_masters = self.never_moves
        self.moves_nothing = rests and not any(unit.older for unit in self.units)
        self.saves_weights = self.moves_nothing and without_masters
        self.look_ahead.begin_pass(self.schedule.expected())
        self._traces_agree = self._collectives.begin_pass(
            self.schedule.expected(),
            [unit.index for unit in self._pass.resident],
            training=training,
        )

    def _gather_ahead(self, upcoming: Iterable[int]) -> None:
        """Starts gathering the next units while this one computes, as far as the window has room.

        Several ranks must decide the same, so this blocks until a staged unit has arrived. Nothing
        is gathered ahead in a pass whose trace differs between them.
        """
        coming, is_sharded = [self.units[index] for index in upcoming], self._ranks.size > 1
        if is_sharded and not self._traces_agree():
            return
        for unit in coming:
            if unit.residency in COMING or not unit.arrival.comes_ahead:
                continue
            # Compute must not wait for a later unit's update or disk read. Among ranks it waits
            # for the next unit's read alone, if there is room for more than one.
            is_next = self.look_ahead.depth and unit is coming[0]
            comes = is_next or not unit.is_staged_from_disk if is_sharded else unit.is_ready
            if not (comes and self._finds_room(unit, coming)):
                return
            self._stage(unit)
            try:
                unit.start_gather(self._store, self._ledger)
            except CapacityError:  # activations use the room: the unit is copied on demand
                if is_sharded:
                    raise
                return
            self._pass.resident[unit] = None

    def fetch_ahead(self, upcoming: Iterable[int], wanted_at: float) -> None:
        """Starts reading the next units from disk, wanted since then, as far as there is room."""
        self._slots.fetch_ahead(upcoming, self.look_ahead.depth, wanted_at)

    def _stage(self, unit: ParamUnit) -> None:
        """Brings the unit's bytes into memory. Blocks on the disk and on running updates."""
        if unit.is_staged_from_disk:
            if unit.residency is Residency.STORED:
                self.misses, wanted_at = self.misses + 1, time.perf_counter()
                unit.fetch(self._store, self._slots.take(unit), wanted_at)
            if unit.residency is Residency.FETCHING and not unit.copies_while_fetching:
                with self._device.stalled("nvme->host", unit.name):
                    unit.stage()
        else:
            unit.wait_for_update()

    def make_gradient_room(self, nbytes: int) -> None:
        """Evicts idle units, then ones the backward can spare, until autograd can make ``nbytes``
        of gradients."""
        while self._resident_nbytes() + nbytes > self._window.nbytes + self.autograd_nbytes:
            if idle := self._idle():
                self._evict(idle[0])
            elif not self._give_way():
                return

    def narrow(self, nbytes: int) -> None:
        """Takes ``nbytes`` of the planned window away until the next call; between passes, and the
        same on all ranks of a shard group. Raises CapacityError, with nothing changed, if the
        largest unit would not fit with its gradients."""
        needed = [
            unit.weight_nbytes
            + max(
                0,
                unit.weight_nbytes * any(handle.grad is not None for handle in unit.handles)
                - self.autograd_nbytes,
            )
            for unit in self.units
        ]
        try:
            self._window.narrow(nbytes, largest_nbytes=max(needed, default=0))
        except CapacityError as error:
            account = self._ledger.accounts[Tier.DEVICE]
            budget, largest = account.budget_nbytes or 0, max(needed)
            short = largest + nbytes - self._window.planned_nbytes
            error.needed = {BUDGETS[Tier.DEVICE]: budget + short}
            spare = nbytes + max(0, budget - account.planned_nbytes)
            raise self._explain(error, largest, 0, spare) from None
        while self._resident_nbytes() > self._window.nbytes and (idle := self._idle()):
            self._evict(idle[0])

    def _finds_room(self, unit: ParamUnit, coming: Sequence[ParamUnit]) -> bool:
        """Evicts idle units not in ``coming`` until ``unit`` fits. Returns whether it does."""
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

    def refuse_over(self, units: Sequence[ParamUnit], nbytes: int) -> None:
        """Raises CapacityError if the window of a budget is less than the ``nbytes`` that are
        needed for ``units``. The error names what is enough, with which none of them runs in
        tiles."""
        budget = self._ledger.accounts[Tier.DEVICE].budget_nbytes
        if nbytes <= self._window.nbytes or budget is None:
            return
        # An accelerator's, and those that ranks average, have room of their own.
        makes = self._device.is_host and self._collectives.ranks.data_size == 1
        trained = [unit for unit in units if any(handle.grad for handle in unit.handles)]
        grads = makes * max((unit.weight_nbytes for unit in trained), default=0)
        self.refuse(units, grads)

    def refuse(self, units: Sequence[ParamUnit], grads: int) -> None:
        """Raises the CapacityError of :meth:`refuse_over` for ``units`` and ``grads`` bytes of
        gradients, for which there is no room."""
        budget = self._ledger.accounts[Tier.DEVICE].budget_nbytes
        held = [unit for unit in self._pass.resident if unit in self._pass.holds]
        held = [unit for unit in held if unit not in units]
        needed = sum(unit.weight_nbytes for unit in (*units, *held))
        names = " with unit ".join(
            f"{unit.name} ({format_nbytes(unit.weight_nbytes)})" for unit in units
        )
        error = CapacityError(
            f"unit {names} does not fit the device window of {format_nbytes(self._window.nbytes)}"
            f" beside the units in use ({', '.join(other.name for other in held)})."
        )
        error.needed = {BUDGETS[Tier.DEVICE]: budget + needed + grads - self._window.nbytes}
        raise self._explain(error, needed, grads, 0)

    def _idle(self) -> list[ParamUnit]:
        """Lists the resident units without holds, in the order of eviction: farthest next use first
        if the pass follows the last one, then least recently used.

        Several ranks order by next use only if their traces agree, so that all choose the same.
        Every data rank calls this, and the first call of a pass blocks on them.
        """
        idle = [other for other in self._pass.resident if other not in self._pass.holds]
        if (self._ranks.size == 1 or self._traces_agree()) and len(idle) > 1:
            idle.sort(key=lambda other: -self.schedule.next_use(other.index))
        return idle

    def _resident_nbytes(self) -> int:
        return sum([unit.weight_nbytes for unit in self._pass.resident])

    def _finish(self, unit: ParamUnit) -> None:
        try:
            unit.finish_gather(self._store)
            self._slots.freed_at = time.perf_counter()
        except BaseException:
            self._pass.resident.pop(unit, None)
            raise

    def _evict(self, unit: ParamUnit) -> None:
        if unit.residency is Residency.GATHERING:
            self._finish(unit)
        unit.release()
        self._pass.resident.pop(unit, None)
