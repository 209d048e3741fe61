"""ShardArrays: one shard's flat arrays at their homes, and the optimizer's running updates of them.

shadow      buffers for the results of an update made ahead; if the step uses it, they and the state
            are swapped
older       the weights before the last update, if both versions are kept: an update writes its
            result there, and the two are swapped
last read   the event after which no copy to the device reads the weights at home
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
    """One shard's flat arrays: homes, each parameter's elements, and running updates."""

    def __init__(
        self,
        spec: ShardSpec,
        params: Sequence[torch.nn.Parameter],
        collectives: Collectives | None = None,
    ):
        super().__init__(spec, params, collectives)
        self._last_read: Event = PAST

    @property
    def weight(self) -> StateArray:
        return self.arrays["weight"]

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the whole weights, as on the device."""
        return self.layout.numel * self.spec.dtype.itemsize

    @property
    def slice_nbytes(self) -> int:
        """Bytes of this rank's slice of the weights, as at home."""
        return self.slice_numel * self.spec.dtype.itemsize

    def allocate(
        self,
        store: ShardStore,
        tiers: dict[str, Tier],
        what: str,
        *,
        kept: Collection[str] = (),
        shadowed: bool = False,
    ) -> None:
        """Allocates arrays at ``tiers``, host caches of ``kept`` and, if ``shadowed``, a shadow."""
        homes = self.ranks.row.homes if self.ranks.row is not None else None  # read by other ranks
        for name, dtype in self.spec.array_dtypes().items():
            begin, end = self.own(name)
            numel, make = (
                end - begin,
                homes.make_region if homes is not None and name == "weight" else native.Region,
            )
            array = store.arrays.allocate(tiers[name], dtype, numel, f"{name} of {what}", make=make)
            if name in kept:
                self.contents.reserved.append(array)
                array = store.arrays.allocate(
                    Tier.HOST, dtype, numel, f"{name} of {what}, kept from NVMe", make=make
                )
            self.arrays[name] = array
            if shadowed and self.spec.stepped and name != "grad":
                self.spare_arrays[name] = store.arrays.allocate(
                    array.tier, dtype, numel, f"{name} of {what}, updated ahead", make=make
                )

    @property
    def weight_regions(self) -> list[native.Region | None]:
        """The host memory of the weights, now and after the next update, or None."""
        return [array.region for array in (self.weight, self.older)]

    def allocate_missing(
        self, store: ShardStore, spec: ShardSpec, tiers: dict[str, Tier], what: str
    ) -> dict[str, StateArray]:
        """Allocates, after the wrap, ``spec``'s missing arrays, zeroed, for :meth:`grow`."""
        made: dict[str, StateArray] = {}
        try:
            for name, dtype in spec.array_dtypes().items():
                if name not in self.arrays:
                    begin, end = self.own(name)
                    made[name] = store.arrays.allocate_later(
                        tiers[name], dtype, end - begin, f"{name} of {what}"
                    )
        except BaseException:
            for array in made.values():
                store.arrays.free_more(array)
            raise
        return made

    def grow(self, spec: ShardSpec, arrays: dict[str, StateArray]) -> None:
        """Makes this a shard of ``spec`` with more ``arrays`` (AT_HOME only). Idempotent."""
        self.spec, self.contents.arrays = spec, self.arrays | arrays

    def keep_older(self, store: ShardStore, what: str) -> None:
        """Allocates the older weights' array (AT_HOME only). Raises CapacityError without room."""
        if self.spare_arrays:
            raise InternalError(
                f"the shard of {self.names[0]} has room for a shadow, which cannot be an older"
                " version's"
            )
        weight = self.weight
        array = store.arrays.allocate_later(
            weight.tier, weight.dtype, weight.numel, f"older weight of {what}"
        )
        self.contents.beside = {"weight": array}

    def drop_older(self, store: ShardStore) -> None:
        """Frees the memory of :meth:`keep_older`, before any update has used it."""
        if self.spare_arrays:
            store.arrays.free_more(self.spare_arrays.pop("weight"))

    @property
    def older(self) -> StateArray:
        """The weights before the last update; the current ones if only they are kept."""
        return self.spare_arrays.get("weight", self.weight)

    # --- running updates ---

    @property
    def activity(self) -> Activity:
        """The running activity in the arrays."""
        return self.contents.activity

    def _check_move(self, to: Activity) -> None:
        if to not in MOVES[self.activity]:
            raise InternalError(
                f"the shard of {self.names[0]} is {self.activity.name} and cannot go to {to.name}"
            )

    @property
    def update(self) -> Update | None:
        """The last submitted update, until it was waited for."""
        return self.contents.update

    @property
    def shadow(self) -> Shadow | None:
        """The update that was made ahead, if any."""
        return self.contents.shadow

    @property
    def last_read(self) -> Event:
        """The event after which no copy to the device reads the weights at home."""
        return self._last_read

    @property
    def spare_arrays(self) -> dict[str, StateArray]:
        """Buffers for an update made ahead; their content is valid only while there is a shadow."""
        return self.contents.beside

    @property
    def shadow_extents(self) -> dict[str, native.Extent]:
        """The extents of an update made ahead; empty if there is no room for one."""
        return {name: array.extent for name, array in self.spare_arrays.items()}

    def lend(self, event: Event) -> None:
        """Lets a copy to the device read the weights at home until ``event``."""
        self._last_read = event

    def submit(self, update: Update) -> None:
        """Records the running ``update`` (AT_HOME or SHADOWED -> STEPPING). Idempotent."""
        contents = self.contents
        if contents.update is not update:
            self._check_move(Activity.STEPPING)
            contents.update, contents.shadow = update, None

    def advance(self, update: Update, weight: StateArray) -> None:
        """Records the running ``update``, which writes the new ``weight`` beside the old one
        (AT_HOME -> STEPPING). The new one becomes current, the old one older. Idempotent."""
        contents = self.contents
        if self.weight is not weight:
            self._check_move(Activity.STEPPING)
            before = {"weight": self.weight}
            # One statement, as in keep_shadow().
            contents.arrays, contents.beside, contents.update = (
                contents.arrays | {"weight": weight},
                before,
                update,
            )

    def wait(self) -> None:
        """Waits until the last step's bytes are at home (STEPPING -> AT_HOME). Raises its error."""
        self.contents.wait()

    def wait_idle(self) -> None:
        """Waits for updates and reads of the arrays, before the host changes them."""
        self.wait()
        self.drop_shadow()
        self._last_read.wait()
        self._last_read = PAST

    def cast_shadow(self, shadow: Shadow) -> None:
        """Records ``shadow``, which is about to be submitted (AT_HOME -> SHADOWED)."""
        self._check_move(Activity.SHADOWED)
        self.contents.shadow = shadow

    def drop_shadow(self) -> None:
        """Waits for the shadow and drops it (SHADOWED -> AT_HOME): its inputs change."""
        self.contents.drop_shadow()

    def keep_shadow(self) -> None:
        """Swaps the state with the shadow, which becomes the state (SHADOWED -> STEPPING)."""
        self._check_move(Activity.STEPPING)
        contents = self.contents
        before = {name: contents.arrays[name] for name in contents.beside}
        after, update = contents.arrays | contents.beside, contents.shadow.ticket
        # One statement, so that no interrupt leaves a state that is half the shadow's.
        contents.arrays, contents.beside, contents.update, contents.shadow = (
            after,
            before,
            update,
            None,
        )

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
        """Returns the extent of this rank's slice in a gradient that is whole in memory."""
        size = self.spec.grad_dtype.itemsize
        return self.arrays["grad"].extent.part(self.own_slice[0] * size, self.slice_numel * size)

    def write_part(
        self,
        store: ArrayIO,
        name: str,
        index: int,
        part: torch.Tensor,
        *,
        version: int,
        begin: int = 0,
        stays: bool = False,
    ) -> None:
        """Writes ``part`` to parameter ``index``'s part of array ``name``, from element ``begin``
        on, as far as it is at home here. ``stays``: it does not change until all is at home."""
        self.drop_shadow()
        self.last_read.wait()
        begin += self.part(name, index)[0]
        low, high = self.own_part(name, index)
        low, high = max(low, begin), min(high, begin + part.numel())
        if low < high:
            here = part[low - begin : high - begin]
            store.write(
                self.arrays[name], low - self.own(name)[0], here, version=version, stays=stays
            )
