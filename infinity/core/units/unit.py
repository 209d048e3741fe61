"""ParamUnit: moves parameters that are needed together between their home and the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Any

import torch

from ... import native
from ...errors import UsageError
from ...ranks.collectives import Collectives
from ..homes.arrays import StateArray
from ..homes.store import ArrayStore
from ..machine.device import PAST, Device
from ..machine.ledger import Ledger
from ..machine.tiers import Tier
from ..machine.traffic import UPDATES, Traffic
from ..run.journal import Journal
from .arrival import Arrival
from .exposure import Exposure
from .flat_param import FlatParam
from .handle import ParamHandle
from .home_arrays import Update
from .residency import Moves, Residency
from .staged_reads import StagedReads
from .unit_buffers import Second, UnitBuffers

# Takes slots for what a unit reads from a disk, one for each flat param.
TakeSlots = Callable[["ParamUnit"], list[native.Lease]]


def flat_params_of(units: Iterable[Any]) -> list[Any]:
    """Lists the flat params of ``units``, in order."""
    return [flat_param for unit in units for flat_param in unit.flat_params]


class ParamUnit:
    """One unit: its flat params, its residency, and the moves between residencies.

    buffers
        The device memory of the weights.
    arrival
        The copy of the weights to there, and the gather.
    exposure
        The parameters, as modules and users see them.
    reader
        Who holds the weights at home, which no update of the unit writes. None: the unit is of the
        newest ones.
    older
        Units of the same parameters, of weights from before an update, that readers hold.
    in_use
        Which of those a hold gathers. None: the unit itself, which must not refer to itself.
    """

    def __init__(
        self,
        index: int,
        name: str,
        flat_params: list[FlatParam],
        device: Device | None = None,
        *,
        reader: Hashable | None = None,
        refusal: str = "",
    ):
        """``refusal``: of held weights, what is said of a forward that changes its parameters."""
        self.index, self.name, self.flat_params, self.reader = index, name, flat_params, reader
        self._device = device or Device(torch.device("cpu"), Traffic())
        self._collectives = flat_params[0].collectives if flat_params else Collectives()
        self._ranks = self._collectives.ranks
        self.buffers = UnitBuffers(flat_params, self._device)
        self.exposure = Exposure(
            name, flat_params, self.buffers, self._collectives, refusal=refusal
        )
        self._second = Second()
        self.arrival = Arrival(
            name, flat_params, self.buffers, self._second, self._collectives, self._device
        )
        self.residency = Residency.STORED
        self.version = 0  # counts changes of the values at home
        self._moves = Moves(f"unit {name}")
        self._reads = StagedReads([])  # and their slots, until these go back
        self._copied: StagedReads | None = None  # the last ones that were copied
        self._charge: native.Charge | None = None
        self.older: list[ParamUnit] = []
        self.in_use: ParamUnit | None = None
        # Whether several modules use the unit, so that its gradients may arrive far apart
        self.lands_apart = False
        self.in_pieces = False  # whether the weights are larger than their staging

    @property
    def handles(self) -> list[ParamHandle]:
        """The handles of all parameters, in the order of the flat params."""
        if len(self.flat_params) == 1:
            return self.flat_params[0].handles  # most units have one: no list for each use
        return [handle for flat in self.flat_params for handle in flat.handles]

    @cached_property
    def weight_nbytes(self) -> int:
        """Bytes on the device while resident, and in staging while staged."""
        return sum(flat.weight_nbytes for flat in self.flat_params)

    @cached_property  # cached: a late backward needs it when the homes are gone
    def computes_at_home(self) -> bool:
        """Whether the unit's home is the device, and whole: it is resident always."""
        return self._ranks.size == 1 and all(
            flat.weight.tier is Tier.DEVICE for flat in self.flat_params
        )

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks have other shards, so that it has to be gathered. Divided experts may
        be whole."""
        return self._ranks.size > 1

    def come_from(self, second: Second) -> None:
        """Lets gathered weights come from ``second`` again. Before :meth:`allocate`."""
        self._second = self.arrival.second = second

    @property
    def is_near(self) -> bool:
        """Whether the current weights can be gathered inside the machine."""
        return self._second.have(self.version)

    @cached_property  # read for every unit that may come next, at each use of one
    def lies_on_disk(self) -> bool:
        """Whether the weights' home is NVMe."""
        return any(flat.weight.tier is Tier.NVME for flat in self.flat_params)

    @property
    def is_staged_from_disk(self) -> bool:
        return self.lies_on_disk and not (self.is_near or self.in_pieces)

    @property
    def copies_while_fetching(self) -> bool:
        """Whether a copy to the device can begin before the whole unit is read. Not with several
        ranks: their actions must not depend on the progress of reads."""
        return self._device.overlaps and self._ranks.size == 1

    @property
    def is_ready(self) -> bool:
        """Whether a copy of the weights to the device waits for no disk and no update."""
        if self.is_staged_from_disk:
            return self.residency is not Residency.STORED and self._reads.done
        return not self.in_pieces and self.arrival.is_current(self._updates)

    # --- homes ---

    @property
    def _weights(self) -> list[StateArray]:
        """The weights at home, one array for each flat param."""
        return [flat.homes.weight_of(self.reader) for flat in self.flat_params]

    @property
    def _updates(self) -> list[Update | None]:
        """The running updates of the weights."""
        return [None if self.reader is not None else flat.homes.update for flat in self.flat_params]

    def complete(self, store: ArrayStore, take: TakeSlots) -> None:
        """Brings the rows that the use which begins needs, and that are not there yet."""
        if missing := self.arrival.take_missing():
            slots = take(self) if self.lies_on_disk and not self.in_pieces else []
            with self.exposure.edits.adding_rows():
                self.arrival.add(missing, store, self._weights, slots)

    def wait_for_update(self) -> None:
        """Waits until the weights of the last step are at home. Raises its error."""
        if self.reader is not None or self.arrival.rows is not None:
            return
        for flat_param in self.flat_params:
            if (update := flat_param.homes.update) is None or update.done:
                flat_param.homes.wait()
            else:
                with self._device.stalled(UPDATES, self.name):
                    flat_param.homes.wait()

    # --- parameters ---

    def attach(self) -> None:
        """Makes every parameter a view of its flat param's device buffer. The values must be at
        home. Allocates nothing: see :meth:`allocate`."""
        self.buffers.show()  # before the class changes: this needs torch's own setter
        self.exposure.attach()

    def allocate(self) -> None:
        """Allocates the device memory, and the parameters' views while it is there. Raises
        CapacityError if the device has no room."""
        self.arrival.stop_choosing()
        self.buffers.allocate(self._weights if self.computes_at_home else None)
        self._second.allocate(self.buffers.flats)
        if self.computes_at_home:
            self.residency = Residency.RESIDENT
        else:
            self.buffers.empty()

    def watch(self, param: torch.nn.Parameter, data: torch.Tensor) -> None:
        """Watches for changes through ``param.data``, of the version in use."""
        unit = self.in_use or self
        unit.exposure.watch(param, data, no_copy=unit.computes_at_home)

    def write_edits(self, store: ArrayStore, journal: Journal) -> None:
        """Sends home the changes that a forward made to its own parameters. Raises UsageError for
        changes that cannot be."""
        if self.exposure.find_edits(
            store, no_copy=self.computes_at_home or self.arrival.lacks_rows
        ):
            if self.arrival.lacks_rows:
                raise UsageError(
                    f"a forward changed rows of {self.name} in place, of which only those are on"
                    " the device that it was called for: change them outside of a forward"
                )
            self._second.forget()  # first: a write may fail after others have gone home
            self.exposure.write_edits(store, journal, no_copy=self.computes_at_home)

    # --- moves ---

    def fetch(self, store: ArrayStore, slots: list[native.Lease], ready: float = 0.0) -> None:
        """Starts reading into ``slots``, one per flat param (STORED -> FETCHING), after the last
        step's writes. ``ready``: when that could have begun, for a timeline. If a read cannot be
        started, frees the slots and stays STORED."""
        self._move(Residency.FETCHING)
        self._reads, pieces = StagedReads(slots, ready), self.copies_while_fetching
        try:
            after = self.arrival.choose(self._updates)
            self._reads.start(
                store, self._weights, after, in_pieces=pieces, spans=self.arrival.spans
            )
        except BaseException:
            self._cancel()
            raise

    def stage(self) -> None:
        """Waits for the reads (FETCHING -> STAGED). After a failed read frees the slots and raises
        its error."""
        error = self._reads.first_error()
        self._move(Residency.STAGED if error is None else Residency.STORED)
        if error is not None:
            self._release_slots()
            raise error

    def drop(self) -> None:
        """Drops the bytes unused (FETCHING or STAGED -> STORED). Cancels reads that have not
        started, and waits for the others."""
        if self.residency not in (Residency.FETCHING, Residency.STAGED):
            raise self._moves.illegal(self.residency, "be dropped")
        if (error := self._cancel()) is not None:
            raise error

    def _cancel(self) -> Exception | None:
        """Cancels the reads (FETCHING or STAGED -> STORED). Returns their first error, if any."""
        error = self._reads.cancel()
        self._move(Residency.STORED)
        self._release_slots()
        return error

    def start_gather(self, store: ArrayStore, ledger: Ledger) -> None:
        """Starts a gather (STAGED, or STORED for a memory home, -> GATHERING): copies this rank's
        shard to the device, and starts gathering the other ranks'. FETCHING -> GATHERING if copies
        overlap reads: each piece is verified and copied as it arrives."""
        from_disk = self.is_staged_from_disk
        fetching = self.residency is Residency.FETCHING and self.copies_while_fetching
        if not fetching and self.residency is not (
            Residency.STAGED if from_disk else Residency.STORED
        ):
            raise self._moves.illegal(self.residency, "be gathered")
        self.buffers.check_left()
        charge = ledger.reserve(Tier.DEVICE, self.weight_nbytes, f"unit {self.name}", passing=True)
        self._move(Residency.GATHERING)
        reads = self._reads if from_disk else None
        self._charge, self._copied = charge, reads or self._copied
        try:
            self.arrival.start(store, self._weights, reads, in_node=self.is_near)
        except BaseException:
            self._fail_gather()
            raise
        store.staging.take_back(self._reads.slots, self.arrival.event)
        self._reads = StagedReads([])

    def finish_gather(self, store: ArrayStore) -> None:
        """Ends a gather (GATHERING -> RESIDENT): later compute is ordered after it. May block on
        other ranks."""
        try:
            self.arrival.finish(store)
        except BaseException:
            self._fail_gather()
            raise
        self._move(Residency.RESIDENT)
        self._second.keep(self.buffers.flats, self.version)

    def _fail_gather(self) -> None:
        self._reads.first_error()
        self.arrival.give_up()
        self._move(Residency.STORED)
        self._empty(self._charge)

    def release(self) -> None:
        """Frees the device memory (RESIDENT -> STORED). Home has the bytes: a forward's edits were
        written when its hold was taken off."""
        if self.residency is not Residency.RESIDENT or self.computes_at_home:
            raise self._moves.illegal(self.residency, "be released")
        self._move(Residency.STORED)
        self._empty(self._charge)

    def change_places(self, other: ParamUnit) -> None:
        """Swaps buffers, with their content, with ``other``, a unit of the same parameters. Both
        are STORED or RESIDENT, and nothing computes with either."""
        for unit in (self, other):
            if unit.residency not in (Residency.STORED, Residency.RESIDENT):
                raise unit._moves.illegal(unit.residency, "change places")
        self.buffers.swap(other.buffers)  # first: recovery resets the fields below
        self.arrival.event, other.arrival.event = other.arrival.event, self.arrival.event
        self.residency, other.residency = other.residency, self.residency
        self._charge, other._charge = other._charge, self._charge

    def rebuild(self) -> None:
        """Resets the unit to its home state after an exception. Only while nothing is in flight.
        The ledger drops the charges."""
        self.arrival.forget_gathers()
        self._reads, self._copied, self._charge = StagedReads([]), None, None
        self.arrival.event = PAST
        self.buffers.forget_uses()
        self._second.forget()
        self._moves.note_rebuild(self.residency)
        self.exposure.forget()
        # The parameters stay views of the newest weights.
        self.buffers.align(
            self._weights if self.computes_at_home else None, shows=self.reader is None
        )
        if self.computes_at_home:
            self.residency = Residency.RESIDENT
        else:
            self.residency = Residency.STORED
            self.buffers.empty()

    def _empty(self, charge: native.Charge) -> None:
        self.buffers.empty()
        self._release_slots()
        charge.release()
        self._charge = None

    def _release_slots(self) -> None:
        self._reads.release()
        self._reads = StagedReads([])

    def take_read_times(self) -> tuple[float, float] | None:
        """Returns the start and the end of the last read, and clears them."""
        copied, self._copied = self._copied, None
        return copied.times if copied is not None else None

    def _move(self, to: Residency) -> None:
        self._moves.note(self.residency, to)
        self.residency = to
