"""ShardArrays: keeps one shard's flat arrays at their homes, and follows them through the optimizer's updates.

shadow      room for the results of an update made ahead; when the step turns out to be that one, it and the state change places
older       the weights as they were before the last update, where both are kept: it makes the new ones beside them, and they change places
last read   when no copy to the device reads the weights at home any more
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from .. import native
from ..distributed.collectives import Collectives
from ..errors import InternalError
from ..machine.device import PAST, Event
from ..machine.tiers import Tier
from ..storage.arrays import ArrayIO, StateArray
from ..storage.store import ShardStore
from .array_parts import ArrayParts
from .contents import MOVES, Activity, Shadow, Update
from .shard_spec import ShardSpec


class ShardArrays(ArrayParts):
    """The flat arrays of one shard: where they are, which of their elements are whose, and what is under way."""

    def __init__(self, spec: ShardSpec, params: Sequence[torch.nn.Parameter], collectives: Collectives | None = None):
        super().__init__(spec, params, collectives)
        self._last_read: Event = PAST

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

    def allocate(
        self, store: ShardStore, tiers: dict[str, Tier], what: str, *, kept: Collection[str] = (), shadowed: bool = False
    ) -> None:
        """Allocates every array at the tier that ``tiers`` gives its name; those in ``kept`` are cached on the host. ``shadowed``:
        room for a shadow too."""
        homes = self.ranks.row.homes if self.ranks.row is not None else None  # that other ranks can read
        for name, dtype in self.spec.array_dtypes().items():
            begin, end = self.own(name)
            numel, make = end - begin, homes.make_region if homes is not None and name == "weight" else native.Region
            array = store.allocate(tiers[name], dtype, numel, f"{name} of {what}", make=make)
            if name in kept:
                self.contents.reserved.append(array)
                array = store.allocate(Tier.HOST, dtype, numel, f"{name} of {what}, kept from NVMe", make=make)
            self.arrays[name] = array
            if shadowed and self.spec.stepped and name != "grad":
                self.spare_arrays[name] = store.allocate(array.tier, dtype, numel, f"{name} of {what}, updated ahead", make=make)

    @property
    def weight_regions(self) -> list[native.Region | None]:
        """The memory of what the weights are, and may be after the next update; None for what has none of the host's."""
        return [array.region for array in (self.weight, self.older)]

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
        self.spec, self.contents.arrays = spec, self.arrays | arrays

    def keep_older(self, store: ShardStore, what: str) -> None:
        """Takes room for the weights as they were before the last update (AT_HOME only). Raises CapacityError where there is none."""
        if self.spare_arrays:
            raise InternalError(f"the shard of {self.names[0]} has room for a shadow, which cannot be an older version's")
        weight = self.weight
        array = store.allocate_later(weight.tier, weight.dtype, weight.numel, f"older weight of {what}")
        self.contents.beside = {"weight": array}

    def drop_older(self, store: ShardStore) -> None:
        """Gives the room of :meth:`keep_older` back, before any update has used it."""
        if self.spare_arrays:
            store.free_more(self.spare_arrays.pop("weight"))

    @property
    def older(self) -> StateArray:
        """The weights as they were before the last update; those of now where only they are kept."""
        return self.spare_arrays.get("weight", self.weight)

    # --- what is under way ---

    @property
    def activity(self) -> Activity:
        """What goes on in the arrays."""
        return self.contents.activity

    def _check_move(self, to: Activity) -> None:
        if to not in MOVES[self.activity]:
            raise InternalError(f"the shard of {self.names[0]} is {self.activity.name} and cannot go to {to.name}")

    @property
    def update(self) -> Update | None:
        """The last update that was submitted, until somebody has waited for it."""
        return self.contents.update

    @property
    def shadow(self) -> Shadow | None:
        """The update that was made ahead, if there is one."""
        return self.contents.shadow

    @property
    def last_read(self) -> Event:
        """After which no copy to the device reads the weights at home."""
        return self._last_read

    @property
    def spare_arrays(self) -> dict[str, StateArray]:
        """Room for an update made ahead; what is in it counts while there is a shadow only."""
        return self.contents.beside

    @property
    def shadow_extents(self) -> dict[str, native.Extent]:
        """Where an update made ahead puts its results; empty where there is no room for one."""
        return {name: array.extent for name, array in self.spare_arrays.items()}

    def lend(self, event: Event) -> None:
        """Lets a copy to the device read the weights at home until ``event``."""
        self._last_read = event

    def submit(self, update: Update) -> None:
        """Records ``update``, which is under way (AT_HOME or SHADOWED -> STEPPING). A second call with it does nothing."""
        contents = self.contents
        if contents.update is not update:
            self._check_move(Activity.STEPPING)
            contents.update, contents.shadow = update, None

    def advance(self, update: Update, weight: StateArray) -> None:
        """Records ``update``, which is under way and makes new weights in the room beside the old ones (AT_HOME -> STEPPING): ``weight``, which
        are the weights from now on; those before are the older ones. A second call with it does nothing."""
        contents = self.contents
        if self.weight is not weight:
            self._check_move(Activity.STEPPING)
            before = {"weight": self.weight}
            # In one statement, as in keep_shadow().
            contents.arrays, contents.beside, contents.update = contents.arrays | {"weight": weight}, before, update

    def wait(self) -> None:
        """Waits until the last step's bytes are at home (STEPPING -> AT_HOME). Raises what went wrong with it."""
        self.contents.wait()

    def wait_idle(self) -> None:
        """Waits, and until nothing reads the arrays: they are about to be changed from the host."""
        self.wait()
        self.drop_shadow()
        self._last_read.wait()
        self._last_read = PAST

    def cast_shadow(self, shadow: Shadow) -> None:
        """Records ``shadow``, which is about to be submitted (AT_HOME -> SHADOWED)."""
        self._check_move(Activity.SHADOWED)
        self.contents.shadow = shadow

    def drop_shadow(self) -> None:
        """Forgets the shadow once it is over (SHADOWED -> AT_HOME), for what it is made from is about to change."""
        self.contents.drop_shadow()

    def keep_shadow(self) -> None:
        """Makes the shadow the state (SHADOWED -> STEPPING). What was the state is room for the next one."""
        self._check_move(Activity.STEPPING)
        contents = self.contents
        before = {name: contents.arrays[name] for name in contents.beside}
        after, update = contents.arrays | contents.beside, contents.shadow.ticket
        # In one statement, which nothing interrupts: a state half of which is the shadow's would be no state at all.
        contents.arrays, contents.beside, contents.update, contents.shadow = after, before, update, None

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

    def write_part(
        self, store: ArrayIO, name: str, index: int, part: torch.Tensor, *, version: int, begin: int = 0, stays: bool = False
    ) -> None:
        """Puts ``part`` where :meth:`read_part` reads it, from its element ``begin`` on: of it, what is at home here. ``stays``: it does not change
        until all is at home."""
        self.drop_shadow()
        self.last_read.wait()
        begin += self.part(name, index)[0]
        low, high = self.own_part(name, index)
        low, high = max(low, begin), min(high, begin + part.numel())
        if low < high:
            here = part[low - begin : high - begin]
            store.write(self.arrays[name], low - self.own(name)[0], here, version=version, stays=stays)
