"""ShardArrays: keeps one shard's flat arrays at their homes, and follows them through the optimizer's updates.

    AT_HOME    nothing is under way
    STEPPING   an update is under way: the bytes at home are its once it is over
    SHADOWED   the results of an update made ahead lie beside the state, or are on their way there

slice       what of every array this rank has: an equal part of the flat elements, of one rank all of them
shadow      room for the results of an update made ahead; when the step turns out to be that one, it and the state change places
older       the weights as they were before the last update, where both are kept: it makes the new ones beside them, and they change places
last read   when no copy to the device reads the weights at home any more
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch

from .. import native
from ..distributed.collectives import Collectives
from ..errors import InternalError
from ..machine.device import PAST, Event
from ..machine.tiers import Tier
from ..storage.arrays import ArrayIO, StateArray
from ..storage.store import ShardStore
from .flat_layout import FlatLayout
from .shard_spec import ShardSpec, elements_each


class Activity(Enum):
    """What goes on in a shard's arrays."""

    AT_HOME = auto()
    STEPPING = auto()
    SHADOWED = auto()


MOVES = {
    Activity.AT_HOME: {Activity.STEPPING, Activity.SHADOWED},
    Activity.STEPPING: {Activity.AT_HOME},
    Activity.SHADOWED: {Activity.AT_HOME, Activity.STEPPING},
}


class Update(Protocol):
    """A submitted update."""

    @property
    def done(self) -> bool:
        """Whether it is over."""

    def wait(self) -> None:
        """Blocks until it is over. Raises what went wrong with it."""


@dataclass(frozen=True, eq=False)
class Shadow:
    """An update made ahead, and all that it was made with: a step with other inputs is another one."""

    update: native.UnitUpdate
    inputs: object

    @property
    def ticket(self) -> native.Ticket | None:
        """None before it is submitted."""
        return self.update.ticket


class ShardArrays:
    """The flat arrays of one shard: where they are, which of their elements are whose, and what is under way.

    With other ranks, reading a part needs all of them; writing one does not.
    """

    def __init__(self, spec: ShardSpec, params: Sequence[torch.nn.Parameter], collectives: Collectives | None = None):
        self.spec, self.params = spec, tuple(params)
        self.collectives = collectives or Collectives()
        self.ranks = self.collectives.ranks
        self.names = [f"parameter {i} of a shard" for i in range(len(params))]  # until they are known
        self.layout = FlatLayout.of(params, self.ranks.size)
        self.slice_numel = self.layout.numel // self.ranks.size
        self.arrays: dict[str, StateArray] = {}
        self._reserved: list[StateArray] = []  # places on disk of what is cached on the host
        self._update: Update | None = None  # the last one that was submitted
        self._beside: dict[str, StateArray] = {}  # room for a shadow; empty where none are made
        self._shadow: Shadow | None = None
        self._last_read: Event = PAST
        self._assembled: dict[str, torch.Tensor] = {}  # whole arrays, while they are read part by part

    @property
    def weight(self) -> StateArray:
        return self.arrays["weight"]

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the whole weights, as they lie on the device."""
        return self.layout.numel * self.spec.dtype.itemsize

    @property
    def slice_nbytes(self) -> int:
        """Bytes of this rank's slice of the weights, as it lies at home."""
        return self.slice_numel * self.spec.dtype.itemsize

    def own(self, name: str, rank: int | None = None) -> tuple[int, int]:
        """Returns the elements of the whole array ``name`` that this rank (or ``rank``) has at home: first and behind the last."""
        if name == "grad" and self.ranks.keeps_gradients:
            return 0, self.layout.numel
        each = self.slice_numel // elements_each(name)
        rank = self.ranks.rank if rank is None else rank
        return rank * each, (rank + 1) * each

    @property
    def own_slice(self) -> tuple[int, int]:
        """Elements that the optimizer steps here: first and behind the last."""
        return self.ranks.rank * self.slice_numel, (self.ranks.rank + 1) * self.slice_numel

    def slice_part(self, index: int, rank: int | None = None) -> tuple[int, int]:
        """Returns the elements of parameter ``index`` in this rank's slice (or ``rank``'s); none where begin = end."""
        place = self.layout.placements[index]
        first = (self.ranks.rank if rank is None else rank) * self.slice_numel
        begin, end = max(place.offset, first), min(place.end, first + self.slice_numel)
        return begin, max(begin, end)

    def own_part(self, name: str, index: int) -> tuple[int, int]:
        """Returns the elements of the whole array ``name`` that are parameter ``index``'s and at home; none where begin = end."""
        (begin, end), (low, high) = self.part(name, index), self.own(name)
        begin, end = max(begin, low), min(end, high)
        return begin, max(begin, end)

    def name(self, names: Sequence[str]) -> None:
        """Sets the parameters' names, for messages."""
        self.names = list(names)

    def allocate(
        self, store: ShardStore, tiers: dict[str, Tier], what: str, *, kept: Collection[str] = (), shadowed: bool = False
    ) -> None:
        """Allocates every array at the tier that ``tiers`` gives its name; those in ``kept`` are cached on the host. ``shadowed``:
        room for a shadow too."""
        for name, dtype in self.spec.array_dtypes().items():
            begin, end = self.own(name)
            numel = end - begin
            array = store.allocate(tiers[name], dtype, numel, f"{name} of {what}")
            if name in kept:
                self._reserved.append(array)
                array = store.allocate(Tier.HOST, dtype, numel, f"{name} of {what}, kept from NVMe")
            self.arrays[name] = array
            if shadowed and self.spec.stepped and name != "grad":
                self._beside[name] = store.allocate(array.tier, dtype, numel, f"{name} of {what}, updated ahead")

    def allocate_missing(self, store: ShardStore, spec: ShardSpec, tiers: dict[str, Tier], what: str) -> dict[str, StateArray]:
        """Allocates, after the wrap, zeroed arrays that ``spec`` has and this shard has not. Nothing uses them before :meth:`grow`."""
        made: dict[str, StateArray] = {}
        try:
            for name, dtype in spec.array_dtypes().items():
                if name not in self.arrays:
                    begin, end = self.own(name)
                    made[name] = store.allocate_later(tiers[name], dtype, end - begin, f"{name} of {what}")
        except BaseException:
            for array in made.values():
                store.free_more(array)
            raise
        return made

    def grow(self, spec: ShardSpec, arrays: dict[str, StateArray]) -> None:
        """Makes this a shard of ``spec``, which has ``arrays`` besides (AT_HOME only). A second call does nothing."""
        self.spec, self.arrays = spec, self.arrays | arrays

    def keep_older(self, store: ShardStore, what: str) -> None:
        """Takes room for the weights as they were before the last update (AT_HOME only). Raises CapacityError where there is none."""
        if self._beside:
            raise InternalError(f"the shard of {self.names[0]} has room for a shadow, which cannot be an older version's")
        weight = self.weight
        array = store.allocate_later(weight.tier, weight.dtype, weight.numel, f"older weight of {what}")
        self._beside = {"weight": array}

    def drop_older(self, store: ShardStore) -> None:
        """Gives the room of :meth:`keep_older` back, before any update has used it."""
        if self._beside:
            store.free_more(self._beside.pop("weight"))

    @property
    def older(self) -> StateArray:
        """The weights as they were before the last update; those of now where only they are kept."""
        return self._beside.get("weight", self.weight)

    # --- what is under way ---

    @property
    def activity(self) -> Activity:
        """Read off what there is, so that an exception between two statements cannot leave it untrue."""
        if self._shadow is not None:
            return Activity.SHADOWED
        return Activity.AT_HOME if self._update is None else Activity.STEPPING

    def _check_move(self, to: Activity) -> None:
        if to not in MOVES[self.activity]:
            raise InternalError(f"the shard of {self.names[0]} is {self.activity.name} and cannot go to {to.name}")

    @property
    def update(self) -> Update | None:
        """The last update that was submitted, until somebody has waited for it."""
        return self._update

    @property
    def shadow(self) -> Shadow | None:
        """The update that was made ahead, if there is one."""
        return self._shadow

    @property
    def last_read(self) -> Event:
        """After which no copy to the device reads the weights at home."""
        return self._last_read

    @property
    def spare_arrays(self) -> dict[str, StateArray]:
        """Room for an update made ahead; what is in it counts while there is a shadow only."""
        return self._beside

    @property
    def shadow_extents(self) -> dict[str, native.Extent]:
        """Where an update made ahead puts its results; empty where there is no room for one."""
        return {name: array.extent for name, array in self._beside.items()}

    def lend(self, event: Event) -> None:
        """Lets a copy to the device read the weights at home until ``event``."""
        self._last_read = event

    def submit(self, update: Update) -> None:
        """Records ``update``, which is under way (AT_HOME or SHADOWED -> STEPPING). A second call with it does nothing."""
        if self._update is not update:
            self._check_move(Activity.STEPPING)
            self._update, self._shadow = update, None

    def advance(self, update: Update, weight: StateArray) -> None:
        """Records ``update``, which is under way and makes new weights in the room beside the old ones (AT_HOME -> STEPPING): ``weight``, which
        are the weights from now on; those before are the older ones. A second call with it does nothing."""
        if self.weight is not weight:
            self._check_move(Activity.STEPPING)
            before = {"weight": self.weight}
            # In one statement, as in keep_shadow().
            self.arrays, self._beside, self._update = self.arrays | {"weight": weight}, before, update

    def wait(self) -> None:
        """Waits until the last step's bytes are at home (STEPPING -> AT_HOME). Raises what went wrong with it."""
        if self._update is not None:
            self._update.wait()
            self._update = None

    def wait_idle(self) -> None:
        """Waits, and until nothing reads the arrays: they are about to be changed from the host."""
        self.wait()
        self.drop_shadow()
        self._last_read.wait()
        self._last_read = PAST

    def cast_shadow(self, shadow: Shadow) -> None:
        """Records ``shadow``, which is about to be submitted (AT_HOME -> SHADOWED)."""
        self._check_move(Activity.SHADOWED)
        self._shadow = shadow

    def drop_shadow(self) -> None:
        """Forgets the shadow once it is over (SHADOWED -> AT_HOME), for what it is made from is about to change."""
        if self._shadow is not None and (ticket := self._shadow.ticket) is not None:
            try:
                ticket.wait()
            finally:  # where the wait itself was interrupted the update is still under way, and not forgotten
                self._shadow = self._shadow if not ticket.done else None
        self._shadow = None

    def keep_shadow(self) -> None:
        """Makes the shadow the state (SHADOWED -> STEPPING). What was the state is room for the next one."""
        self._check_move(Activity.STEPPING)
        before = {name: self.arrays[name] for name in self._beside}
        # In one statement, which nothing interrupts: a state half of which is the shadow's would be no state at all.
        self.arrays, self._beside, self._update, self._shadow = self.arrays | self._beside, before, self._shadow.ticket, None

    def forget_update(self) -> None:
        """Forgets the last update, whatever came of it (-> AT_HOME): the engine is being shut down."""
        self._update = self._shadow = None

    def forget(self) -> None:
        """Drops the arrays. Units and their handles refer to each other: the memory must not wait for them."""
        self.arrays.clear()
        self._beside.clear()
        self._reserved.clear()

    def native_layout(self, rule: native.Rule) -> native.Layout:
        """Describes this shard to the kernel."""
        spec = self.spec
        return native.Layout(
            rule=rule,
            weight=native.DTYPES[spec.dtype],
            master=spec.master,
            grad=native.DTYPES[spec.grad_dtype],
            moments=native.MOMENT_DTYPES[spec.moment_dtype],
        )

    def slice_of_grad(self) -> native.Extent:
        """Returns this rank's slice of a gradient that lies whole in memory."""
        size = self.spec.grad_dtype.itemsize
        return self.arrays["grad"].extent.part(self.own_slice[0] * size, self.slice_numel * size)

    # --- parts of arrays ---

    @contextmanager
    def assembling(self, store: ArrayIO, names: Iterable[str]) -> Iterator[None]:
        """Has :meth:`read_part` in the block read of whole arrays ``names``, which are in memory as long: the ranks meet once for each
        array and not for each part. All ranks do so together."""
        wanted = [name for name in names if name in self.arrays] if self.ranks.size > 1 else []
        try:
            for name in wanted:
                pieces = [self.own(name, rank) for rank in range(self.ranks.size)]
                out = torch.empty(pieces[-1][1], dtype=self.arrays[name].dtype, device="cpu")
                first, last = self.own(name)
                out[first:last] = store.read(self.arrays[name], 0, last - first)
                self.collectives.assemble(out, pieces, f"reading {name} of {self.names[0]} and its unit")
                self._assembled[name] = out
            yield
        finally:
            self._assembled.clear()

    def read_part(self, store: ArrayIO, name: str, index: int, *, array: StateArray | None = None) -> torch.Tensor:
        """Reads parameter ``index``'s part of array ``name`` as it lies there. ``array``: another one that is laid out as that is."""
        begin, end = self.part(name, index)
        if name in self._assembled and array is None:
            return self._assembled[name][begin:end].clone()
        array = array or self.arrays[name]
        low, high = self.own_part(name, index)
        first = self.own(name)[0]
        if (low, high) == (begin, end) and self.ranks.size == 1:
            return store.read(array, begin, end)
        out = torch.empty(end - begin, dtype=array.dtype, device="cpu")
        if low < high:
            out[low - begin : high - begin] = store.read(array, low - first, high - first)
        pieces = []
        for rank in range(self.ranks.size):
            low, high = self.own(name, rank)
            low, high = max(begin, low), min(end, high)
            pieces.append((low - begin, max(low, high) - begin))
        self.collectives.assemble(out, pieces, f"reading {name} of {self.names[index]}")
        return out

    def read_own_part(self, store: ArrayIO, name: str, index: int) -> torch.Tensor:
        """Reads what of :meth:`read_part` is at home here."""
        begin, end = self.own_part(name, index)
        if begin == end:
            return torch.empty(0, dtype=self.arrays[name].dtype, device="cpu")
        first = self.own(name)[0]
        return store.read(self.arrays[name], begin - first, end - first)

    def see_own_part(self, store: ArrayIO, name: str, index: int) -> torch.Tensor:
        """Returns what :meth:`read_own_part` does, to look at: where the home is memory it is that, and changes with it."""
        begin, end = self.own_part(name, index)
        array, first = self.arrays[name], self.own(name)[0]
        if begin < end and array.flat is not None and array.flat.is_cpu:
            return array.flat[begin - first : end - first]
        return self.read_own_part(store, name, index)

    def write_part(self, store: ArrayIO, name: str, index: int, part: torch.Tensor, *, version: int, begin: int = 0) -> None:
        """Puts ``part`` where :meth:`read_part` reads it, from its element ``begin`` on: of it, what is at home here."""
        self.drop_shadow()
        self.last_read.wait()
        begin += self.part(name, index)[0]
        low, high = self.own_part(name, index)
        low, high = max(low, begin), min(high, begin + part.numel())
        if low < high:
            store.write(self.arrays[name], low - self.own(name)[0], part[low - begin : high - begin], version=version)

    def part(self, name: str, index: int) -> tuple[int, int]:
        """Returns the elements of array ``name`` that are parameter ``index``'s: first and behind the last."""
        place, each = self.layout.placements[index], elements_each(name)
        return place.offset // each, -(-place.end // each)
