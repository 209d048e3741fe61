"""HomeArrays: one flat param's flat arrays at their homes, and the running updates of them.

update   the last one that was committed: it defines the bytes at home once it is done. None: all
         bytes are at home
reader   what needs the bytes at home as they are: until an event or a ticket, for which the next
         update waits; or for as long as it holds them, with bytes of its own for the update
draft    where the next update writes: in place, after all readers, or to the bytes of one
commit   makes a draft the arrays: the one end of an update

[Note: why these refer to no parameter] A table of the process holds them until an engine's memory
is freed, which may be after the engine is gone. Objects that users attach to parameters, often the
model itself, must not live as long.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ... import native
from ...errors import InternalError
from ..homes.arrays import StateArray
from ..homes.store import ArrayStore
from ..machine.device import PAST, Event
from ..machine.tiers import Tier
from .flat_layout import FlatLayout
from .flat_param_spec import EVERY_MOMENT, SCALES, FlatParamSpec
from .rows import ChosenRows, Replay, RowSteps

OF_UPDATE = ("master", *EVERY_MOMENT, *SCALES.values())  # that a rule may have


class Update(Protocol):
    """A submitted update."""

    @property
    def done(self) -> bool:
        """Whether it is done."""

    def wait(self) -> None:
        """Blocks until it is done. Raises its error."""


COPY = "copy"  # the reader that copies to the device: the last one is the end of all


@dataclass(eq=False)
class Reader:
    """What needs the bytes at home as they are. ``until``: the end of its read of all arrays, after
    which they may change. ``array``: the weights that it holds, in memory of its own or in that of
    the newest. ``fresh``: bytes for the next update, while it holds the newest weights."""

    until: Event | native.Ticket = PAST
    array: StateArray | None = None
    fresh: StateArray | None = None


@dataclass(eq=False)
class Draft:
    """Where an update writes. ``reader``: has the bytes that get the new weights; None: in place.
    ``events``, ``tickets``: what reads the bytes that it changes."""

    reader: Reader | None
    fresh: StateArray | None
    events: list[Event]
    tickets: list[native.Ticket]


class HomeArrays:
    """The arrays of one flat param, and their running updates."""

    def __init__(self, spec: FlatParamSpec, layout: FlatLayout, names: list[str]):
        """``names``: of the parameters, for messages."""
        self.spec, self.layout, self._names = spec, layout, names
        self.arrays: dict[str, StateArray] = {}
        self.kept: dict[str, StateArray] = {}  # of features (:mod:`.kept`)
        self.readers: dict[Hashable, Reader] = {}  # by who reads
        self._reserved: list[StateArray] = []  # disk space of arrays that are cached on the host
        self.update: Update | None = None  # the last one that was committed
        self.rows: RowSteps | None = None  # that updates may leave behind

    def update_by_rows(self, chosen: ChosenRows) -> None:
        """Lets updates leave rows behind that have no gradient."""
        places = [
            (placement.offset, placement.numel // chosen.count)
            for placement in self.layout.placements
        ]
        is_by_kernel = self.spec.stepped and self.spec.needs is None
        if is_by_kernel and all(row_numel % native.MOMENT_BLOCK == 0 for _, row_numel in places):
            self.rows = chosen.make_steps(places)

    @property
    def weight(self) -> StateArray:
        return self.arrays["weight"]

    def weight_of(self, by: Hashable | None) -> StateArray:
        """Returns the weights that the reader ``by`` holds; the newest ones if there is none."""
        return self.weight if by is None or by not in self.readers else self.readers[by].array

    @property
    def extra_arrays(self) -> list[tuple[str, StateArray]]:
        """The names and arrays beside the state."""
        return [*(("weight", array) for array in self._of_readers), *self.kept.items()]

    @property
    def weight_regions(self) -> list[native.Region | None]:
        """The host memory of the weights, now and after the next updates, or None."""
        return [array.region for array in (self.weight, *self._of_readers)]

    @property
    def _of_readers(self) -> list[StateArray]:
        return [
            reader.fresh or reader.array
            for reader in self.readers.values()
            if reader.array is not None
        ]

    # --- memory ---

    def allocate(
        self,
        store: ArrayStore,
        tiers: dict[str, Tier],
        owner: str,
        *,
        cached: Collection[str] = (),
    ) -> None:
        """Allocates arrays at ``tiers``, and host caches of ``cached``."""
        row = self.layout.ranks.shard_group
        peer_memory = row.peer_memory if row is not None else None  # read by other ranks
        for name, dtype in self.spec.array_dtypes().items():
            begin, end = self.layout.home_range(name)
            is_peer_read = peer_memory is not None and name == "weight"
            allocate = partial(
                store.allocator.allocate,
                dtype=dtype,
                numel=end - begin,
                make=peer_memory.make_region if is_peer_read else native.Region,
                copied=name not in OF_UPDATE,  # the rest when it first passes
            )
            array = allocate(tiers[name], purpose=f"{name} of {owner}")
            if name in cached:
                self._reserved.append(array)
                array = allocate(Tier.HOST, purpose=f"{name} of {owner}, kept from NVMe")
            self.arrays[name] = array

    def grow(self, spec: FlatParamSpec, arrays: dict[str, StateArray]) -> None:
        """Makes these the arrays of ``spec``, with more ``arrays``, and drops those that it lacks.
        Only while no update runs. Idempotent."""
        both = self.arrays | arrays
        self.spec, self.arrays = spec, {name: both[name] for name in spec.array_dtypes()}
        if spec.needs is not None:
            self.rows = None  # of a kernel

    def clear(self) -> None:
        """Drops the arrays. Units and handles form a cycle, for which the memory must not wait."""
        self.arrays.clear()
        self.kept.clear()
        self.readers.clear()
        self._reserved.clear()

    # --- running updates ---

    def _check_at_home(self) -> None:
        if self.update is not None:
            raise InternalError(f"an update of the flat param of {self._names[0]} runs already")

    def read_until(self, by: Hashable, until: Event | native.Ticket) -> None:
        """Lets ``by`` read the arrays ``until`` then. Its read before is over no later."""
        self.readers[by] = Reader(until)

    def hold(self, by: Hashable) -> None:
        """Lets the reader ``by``, which has bytes of its own, hold the newest weights. The next
        update writes new ones to those bytes. Idempotent."""
        reader = self.readers[by]
        if reader.fresh is None:
            reader.array, reader.fresh = self.weight, reader.array

    def drop_drafts(self) -> None:
        """Takes back what :meth:`hold` prepared for an update that was not made. Idempotent."""
        for reader in self.readers.values():
            if reader.fresh is not None:
                reader.array, reader.fresh = reader.fresh, None

    def draft(self) -> Draft:
        """Returns where the next update writes, and what it has to wait for."""
        draft = Draft(None, None, [], [])
        for reader in self.readers.values():
            if reader.fresh is not None:
                draft.reader, draft.fresh = reader, reader.fresh
            if isinstance(reader.until, native.Ticket):
                draft.tickets.append(reader.until)
            elif reader.until is not PAST:
                draft.events.append(reader.until)
        return draft

    def commit(self, draft: Draft, update: Update | None, replay: Replay | None = None) -> None:
        """Records the running ``update``, which writes to ``draft``. Fresh bytes become the
        weights, and the reader keeps the old ones. ``replay`` brings the rows up to date that the
        update left out, when they are needed. Idempotent. Raises InternalError if another update
        runs."""
        if replay is not None:
            self.update = self.rows.replay_after(update, replay)
        elif draft.fresh is None:
            if self.update is not update:
                self._check_at_home()
                self.update = update
        elif self.weight is not draft.fresh:
            self._check_at_home()
            reader, before, after = draft.reader, self.weight, self.arrays | {"weight": draft.fresh}
            # One statement, so that no interrupt leaves a version in two places.
            self.arrays, reader.array, reader.fresh, self.update = after, before, None, update

    def replay(self, updater: native.Updater, rule: native.Rule, version: int) -> Replay:
        """Returns what brings rows up to date that an update to ``version`` leaves behind."""

        def make(runs: list[native.Run]) -> native.UnitUpdate:
            self.wait_readers()
            return self.update_of(rule, runs, [], label=0, version=version)

        def submit(made: native.UnitUpdate) -> native.Ticket:
            updater.submit_all([made])
            return made.ticket

        return Replay(make, submit)

    def wait(self, rows: Collection[int] | None = None) -> None:
        """Waits until the last step's bytes are at home. Raises its error.
        ``rows``: waits for those of these rows; others may stay behind."""
        if self.update is not None and rows is not None and self.rows is not None:
            self.rows.catch_up(rows)
        elif self.update is not None:
            self.update.wait()
            self.update = None

    def has(self, rows: Collection[int] | None = None) -> bool:
        """Tells whether the bytes of ``rows`` (None: all) are at home."""
        if self.update is None:
            return True
        return self.update.done if self.rows is None else self.rows.are_current(rows)

    def wait_running(self) -> None:
        """Waits until no update runs. Rows that are behind stay so. Raises its error."""
        self.wait(rows=())

    def wait_readers(self) -> None:
        """Waits until nothing reads the arrays, which are about to change."""
        for reader in self.readers.values():
            reader.until.wait()
            reader.until = PAST

    def wait_idle(self) -> None:
        """Waits for updates and reads of the arrays, before the host changes them."""
        self.wait()
        self.wait_readers()

    def settle(self) -> None:
        """Waits for the running update and ignores its error: the engine is being shut down."""
        if self.rows is not None:
            self.rows.forget()
        try:
            self.wait()
        # Whoever needed these bytes got the error; here they are discarded.
        except Exception:  # noqa: BLE001
            pass
        for reader in self.readers.values():
            if isinstance(reader.until, native.Ticket):  # a thread reads memory that is freed
                reader.until.wait()
        self.update = None

    # --- for the optimizer ---

    def native_layout(self, rule: native.Rule) -> native.Layout:
        """Describes this flat param to the kernel."""
        spec = self.spec
        return native.Layout(
            rule=rule,
            weight=native.DTYPES[spec.dtype],
            master=spec.master,
            grad=native.DTYPES[spec.grad_dtype],
            moments=native.MOMENT_DTYPES[spec.moment_dtype],
        )

    def update_of(
        self,
        rule: native.Rule,
        runs: list[native.Run],
        after: list[native.Ticket],
        *,
        label: int,
        version: int,
        fresh: StateArray | None = None,
    ) -> native.UnitUpdate:
        """Makes the processor's update of ``runs``, after the tickets ``after``. ``fresh``: for the
        new weights; None: in place."""
        extents = {name: array.extent for name, array in self.arrays.items()}
        if self.layout.ranks.keeps_gradients:
            extents["grad"] = self.shard_of_grad()
        return native.UnitUpdate(
            layout=self.native_layout(rule),
            count=self.layout.shard_numel,
            weight=extents["weight"],
            **{name: extents.get(name) for name in OF_UPDATE},
            grad=extents["grad"],
            runs=runs,
            version=version,
            after=native.joined(after) if after else None,
            label=label,
            shadow=native.Shadow(weight=None if fresh is None else fresh.extent),
        )

    def shard_of_grad(self) -> native.Extent:
        """Returns the extent of this rank's shard in a gradient that is whole in memory."""
        size, layout = self.spec.grad_dtype.itemsize, self.layout
        return self.arrays["grad"].extent.part(
            layout.own_shard[0] * size, layout.shard_numel * size
        )
