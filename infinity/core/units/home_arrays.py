"""HomeArrays: one flat param's flat arrays at their homes, and the running updates of them.

update      the last one that was submitted: it defines the bytes at home once it is done. None: all
            bytes are at home
stale       weights before earlier updates, if they are kept, each in a slot: an update writes its
            result to the slot that was chosen, and the weight and that slot are swapped
last read   the event after which no copy to the device reads the weights at home
saved       the ticket after which a checkpoint's save no longer reads the arrays

[Note: why these refer to no parameter] A table of the process holds them until an engine's memory
is freed, which may be after the engine is gone. Objects that users attach to parameters, often the
model itself, must not live as long.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ... import native
from ...errors import InternalError
from ...ext.rows.expert_rows import ExpertRows, Replay
from ..homes.arrays import StateArray
from ..homes.store import ArrayStore
from ..machine.device import PAST, Event
from ..machine.tiers import Tier
from .flat_layout import FlatLayout
from .flat_param_spec import EVERY_MOMENT, SCALES, FlatParamSpec

OF_UPDATE = ("master", *EVERY_MOMENT, *SCALES.values())  # that a rule may have


class Update(Protocol):
    """A submitted update."""

    @property
    def done(self) -> bool:
        """Whether it is done."""

    def wait(self) -> None:
        """Blocks until it is done. Raises its error."""


class HomeArrays:
    """The arrays of one flat param, and their running updates."""

    def __init__(self, spec: FlatParamSpec, layout: FlatLayout, names: list[str]):
        """``names``: of the parameters, for messages."""
        self.spec, self.layout, self._names = spec, layout, names
        self.arrays: dict[str, StateArray] = {}
        self.kept: dict[str, StateArray] = {}  # of features (:mod:`.kept`)
        self.beside: StateArray | None = None  # the chosen slot
        self.stale: list[StateArray] = []  # one for each slot
        self._reserved: list[StateArray] = []  # disk space of arrays that are cached on the host
        self.update: Update | None = None  # the last one that was submitted
        self.last_read: Event = PAST
        self.saved: native.Ticket | None = None
        self.rows: ExpertRows | None = None  # that updates may leave behind

    def update_by_rows(self, count: int) -> None:
        """Lets updates leave experts behind that have no gradient: ``count`` rows of each
        parameter."""
        places = [(place.offset, place.numel // count) for place in self.layout.placements]
        is_by_kernel = self.spec.stepped and not self.spec.class_piece
        if is_by_kernel and all(each % native.MOMENT_BLOCK == 0 for _, each in places):
            self.rows = ExpertRows(count, places)

    @property
    def weight(self) -> StateArray:
        return self.arrays["weight"]

    def weight_in(self, slot: int | None) -> StateArray:
        """Returns the stale weights in ``slot``; the newest ones for None, or if only they are
        kept."""
        return self.weight if slot is None or not self.stale else self.stale[slot]

    @property
    def arrays_beside(self) -> list[tuple[str, StateArray]]:
        """The names and arrays beside the state."""
        return [*(("weight", array) for array in self.stale), *self.kept.items()]

    @property
    def weight_regions(self) -> list[native.Region | None]:
        """The host memory of the weights, now and after the next update, or None."""
        return [array.region for array in (self.weight, self.beside or self.weight)]

    # --- memory ---

    def allocate(
        self,
        store: ArrayStore,
        tiers: dict[str, Tier],
        what: str,
        *,
        kept: Collection[str] = (),
    ) -> None:
        """Allocates arrays at ``tiers``, and host caches of ``kept``."""
        row = self.layout.ranks.shard_group
        homes = row.homes if row is not None else None  # read by other ranks
        for name, dtype in self.spec.array_dtypes().items():
            begin, end = self.layout.own(name)
            numel, make = (
                end - begin,
                homes.make_region if homes is not None and name == "weight" else native.Region,
            )
            array = store.arrays.allocate(tiers[name], dtype, numel, f"{name} of {what}", make=make)
            if name in kept:
                self._reserved.append(array)
                array = store.arrays.allocate(
                    Tier.HOST, dtype, numel, f"{name} of {what}, kept from NVMe", make=make
                )
            self.arrays[name] = array

    def allocate_missing(
        self, store: ArrayStore, spec: FlatParamSpec, tiers: dict[str, Tier], what: str
    ) -> dict[str, StateArray]:
        """Allocates, after the wrap, ``spec``'s missing arrays, zeroed, for :meth:`grow`."""
        made: dict[str, StateArray] = {}
        try:
            for name, dtype in spec.array_dtypes().items():
                if name not in self.arrays or self.arrays[name].dtype != dtype:
                    begin, end = self.layout.own(name)
                    made[name] = store.arrays.allocate_later(
                        tiers[name], dtype, end - begin, f"{name} of {what}"
                    )
        except BaseException:
            for array in made.values():
                store.arrays.free_more(array)
            raise
        return made

    def grow(self, spec: FlatParamSpec, arrays: dict[str, StateArray]) -> None:
        """Makes these the arrays of ``spec``, with more ``arrays``, and drops those that it lacks.
        Only while no update runs. Idempotent."""
        both = self.arrays | arrays
        self.spec, self.arrays = spec, {name: both[name] for name in spec.array_dtypes()}
        if spec.class_piece is not None:
            self.rows = None  # of a kernel

    def choose(self, slot: int) -> None:
        """Chooses the ``slot`` to which the next update writes the new weights, if it is to keep
        the old ones."""
        if self.stale:
            self.beside = self.stale[slot]

    def clear(self) -> None:
        """Drops the arrays. Units and handles form a cycle, for which the memory must not wait."""
        self.arrays.clear()
        self.kept.clear()
        self.beside = None
        self.stale.clear()
        self._reserved.clear()
        self.last_read = PAST

    # --- running updates ---

    def _check_at_home(self) -> None:
        if self.update is not None:
            raise InternalError(f"an update of the flat param of {self._names[0]} runs already")

    def lend(self, event: Event) -> None:
        """Lets a copy to the device read the weights at home until ``event``."""
        self.last_read = event

    def submit(self, update: Update) -> None:
        """Records the running ``update``. Idempotent. Raises InternalError if another one runs."""
        if self.update is not update:
            self._check_at_home()
            self.update = update

    def leave_behind(
        self, update: Update | None, updater: native.Updater, rule: native.Rule, version: int
    ) -> None:
        """Records the running ``update`` of some experts, to ``version``; ``updater`` brings the
        others up to date when they are needed. Idempotent."""

        def make(runs: list[native.Run]) -> native.UnitUpdate:
            self.wait_readers()
            return self.update_of(rule, runs, [], label=0, version=version)

        def submit(made: native.UnitUpdate) -> native.Ticket:
            updater.submit_all([made])
            return made.ticket

        self.update = self.rows.run_behind(update, Replay(make, submit))

    def advance(self, update: Update, weight: StateArray) -> None:
        """Records the running ``update``, which writes the new ``weight`` beside the old one. The
        new one becomes current, the old one stale. Idempotent. Raises InternalError if another
        update runs."""
        if self.weight is not weight:
            self._check_at_home()
            before, after = self.weight, self.arrays | {"weight": weight}
            stale = [before if array is weight else array for array in self.stale]
            # One statement, so that no interrupt leaves a version in two places.
            self.arrays, self.stale, self.beside, self.update = after, stale, before, update

    def wait(self, rows: Collection[int] | None = None) -> None:
        """Waits until the last step's bytes are at home. Raises its error.
        ``rows``: waits for those of these experts; others may stay behind."""
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
        """Waits until no update runs. Experts that are behind stay so. Raises its error."""
        self.wait(rows=())

    def wait_readers(self) -> None:
        """Waits for copies to the device and for a save: what they read must not change."""
        self.last_read.wait()
        self.wait_save()

    def wait_save(self) -> None:
        """Waits until a save beside the training has read the arrays."""
        if self.saved is not None:
            self.saved.wait()
            self.saved = None

    def wait_idle(self) -> None:
        """Waits for updates and reads of the arrays, before the host changes them."""
        self.wait()
        self.wait_readers()
        self.last_read = PAST

    def settle(self) -> None:
        """Waits for the running update and ignores its error: the engine is being shut down."""
        if self.rows is not None:
            self.rows.forget()
        try:
            self.wait()
        # Whoever needed these bytes got the error; here they are discarded.
        except Exception:  # noqa: BLE001
            pass
        self.wait_save()  # it reads memory that is about to be freed
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
        newer: StateArray | None = None,
    ) -> native.UnitUpdate:
        """Makes the processor's update of ``runs``, after the tickets ``after``. ``newer``: for the
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
            shadow=native.Shadow(weight=None if newer is None else newer.extent),
        )

    def shard_of_grad(self) -> native.Extent:
        """Returns the extent of this rank's shard in a gradient that is whole in memory."""
        size, layout = self.spec.grad_dtype.itemsize, self.layout
        return self.arrays["grad"].extent.part(
            layout.own_shard[0] * size, layout.shard_numel * size
        )
