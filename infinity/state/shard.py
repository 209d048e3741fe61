"""ParamShard: the parameters of one dtype in one unit, as flat arrays at their homes.

weight      what the model computes with, in the compute dtype
master      what the optimizer updates where that is not the weight itself: the low 16 bits (split) or fp32
moments     exp_avg and exp_avg_sq, or whatever of them the optimizer has
scales      of 8-bit moments: one byte for each block of 64 elements, always in memory
gradient    what backward landed, until the step consumes it
stepped     whether the optimizer updates these parameters; a shard that is not has weights only
slice       what of every array this rank has: an equal part of the flat elements, of one rank all of them
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from .. import native
from ..distributed.data_ranks import DataRanks
from ..machine.device import Event, PAST
from ..machine.tiers import Tier
from ..storage.arrays import ArrayIO, StateArray
from ..storage.store import ShardStore
from .flat_layout import FlatLayout
from .shard_spec import elements_each, MOMENTS, SCALES, ShardSpec

ENCODED_AT_ONCE = 1024 * 1024  # elements


@dataclass(frozen=True, eq=False)
class ShadowArrays:
    """An update whose results lie beside the state: see :mod:`infinity.planning.draft_policy`."""

    update: native.UnitUpdate
    told: object  # all that it was made with; another step has another

    @property
    def ticket(self) -> native.Ticket | None:
        """None before it is submitted."""
        return self.update.ticket


class ParamShard:
    """The arrays of one shard and exact conversion between them and parameter values.

    With other ranks, reading a value needs all of them; writing one does not.
    """

    def __init__(self, spec: ShardSpec, params: Sequence[torch.nn.Parameter], peers: DataRanks | None = None):
        self.spec, self.params = spec, tuple(params)
        self.peers = peers or DataRanks()
        self.names = [f"parameter {i} of a shard" for i in range(len(params))]  # until they are known
        self.layout = FlatLayout.of(params, self.peers.size)
        self.slice_numel = self.layout.numel // self.peers.size
        self.arrays: dict[str, StateArray] = {}
        self._reserved: list[StateArray] = []  # places on disk of what is cached on the host
        # The last submitted step; its bytes are at home once it is done.
        self.update: native.Ticket | Event | None = None
        self.beside: dict[str, StateArray] = {}  # room for the results of a draft; empty where none are made
        self.draft: ShadowArrays | None = None
        self.lent: Event = PAST  # when no copy to the device reads the weights at home any more

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
        """Elements of the whole array ``name`` that this rank (or ``rank``) has at home: first and behind the last."""
        if name == "grad" and self.peers.keeps_gradients:
            return 0, self.layout.numel
        each = self.slice_numel // elements_each(name)
        rank = self.peers.rank if rank is None else rank
        return rank * each, (rank + 1) * each

    @property
    def own_slice(self) -> tuple[int, int]:
        """Elements that the optimizer steps here: first and behind the last."""
        return self.peers.rank * self.slice_numel, (self.peers.rank + 1) * self.slice_numel

    def slice_part(self, index: int, rank: int | None = None) -> tuple[int, int]:
        """Elements of parameter ``index`` in this rank's slice (or ``rank``'s); none where begin = end."""
        place = self.layout.placements[index]
        first = (self.peers.rank if rank is None else rank) * self.slice_numel
        begin, end = max(place.offset, first), min(place.end, first + self.slice_numel)
        return begin, max(begin, end)

    def own_part(self, name: str, index: int) -> tuple[int, int]:
        """Elements of the whole array ``name`` that are parameter ``index``'s and at home here; none where begin = end."""
        (begin, end), (low, high) = self.part(name, index), self.own(name)
        begin, end = max(begin, low), min(end, high)
        return begin, max(begin, end)

    def allocate(
        self, store: ShardStore, tiers: dict[str, Tier], what: str, *, kept: Collection[str] = (), drafted: bool = False
    ) -> None:
        """Allocates every array at the tier that ``tiers`` gives its name; those in ``kept`` are cached on the host. ``drafted``:
        room for the results of a draft too."""
        for name, dtype in self.spec.array_dtypes().items():
            begin, end = self.own(name)
            numel = end - begin
            array = store.allocate(tiers[name], dtype, numel, f"{name} of {what}")
            if name in kept:
                self._reserved.append(array)
                array = store.allocate(Tier.HOST, dtype, numel, f"{name} of {what}, kept from NVMe")
            self.arrays[name] = array
            if drafted and self.spec.stepped and name != "grad":
                self.beside[name] = store.allocate(array.tier, dtype, numel, f"{name} of {what}, updated ahead")

    def settle(self) -> None:
        """Waits until the last step's bytes are at home. Raises what went wrong with it."""
        if self.update is not None:
            self.update.wait()
            self.update = None

    def come_to_rest(self) -> None:
        """The same, and until nothing reads them: they are about to be changed from the host."""
        self.settle()
        self.drop_draft()
        self.lent.wait()
        self.lent = PAST

    def drop_draft(self) -> None:
        """Forgets an update that was made ahead, once it is over: what it is made from is about to change."""
        if self.draft is not None and (ticket := self.draft.ticket) is not None:
            try:
                ticket.wait()
            finally:  # where the wait itself was interrupted the draft is still under way, and not forgotten
                self.draft = self.draft if not ticket.done else None
        self.draft = None

    def keep_draft(self) -> None:
        """Makes the draft the state. What was the state is room for the next draft."""
        before = {name: self.arrays[name] for name in self.beside}
        # In one statement, which nothing interrupts: a state half of which is the draft's would be no state at all.
        self.arrays, self.beside, self.update, self.draft = self.arrays | self.beside, before, self.draft.ticket, None

    def native_layout(self, rule: native.Rule) -> native.Layout:
        """The kernel's description of this shard."""
        spec = self.spec
        return native.Layout(
            rule=rule,
            weight=native.DTYPES[spec.dtype],
            master=spec.master,
            grad=native.DTYPES[spec.grad_dtype],
            moments=native.MOMENT_DTYPES[spec.moment_dtype],
        )

    def slice_of_grad(self) -> native.Extent:
        """This rank's slice of a gradient that lies whole in memory."""
        size = self.spec.grad_dtype.itemsize
        return self.arrays["grad"].extent.part(self.own_slice[0] * size, self.slice_numel * size)

    # --- parameter values ---

    def read_value(self, store: ArrayIO, index: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Parameter ``index`` as a new tensor of ``dtype`` (default: as wrapped), from the master where it is wider."""
        with store.guarding():
            self.settle()
        dtype = dtype or self.spec.wrapped_dtype
        weight = self.read_part(store, "weight", index)
        if dtype != self.spec.dtype and "master" in self.arrays:
            master = self.read_part(store, "master", index)
            weight = native.join_master(weight, master) if self.spec.master == native.Master.SPLIT else master
        return self._shaped(weight.to(dtype), index)

    def write_value(
        self, store: ArrayIO, index: int, value: torch.Tensor, *, version: int, fresh: bool = False
    ) -> None:
        """Sets parameter ``index``: master and weight become ``value``. ``fresh``: nothing but a value has been here yet."""
        self.write_flattened(store, index, self.flattened(value, index), version=version, fresh=fresh)

    def write_flattened(
        self, store: ArrayIO, index: int, flat: torch.Tensor, *, version: int, fresh: bool = False
    ) -> None:
        """The same of a value as :meth:`flattened` gives it. Doing it twice is doing it once."""
        self.come_to_rest()
        self._write_encoded(store, self.layout.placements[index].offset, flat, version, fresh)

    def write_first_values(self, store: ArrayIO, index: int, begin: int, values: torch.Tensor) -> None:
        """Sets the elements of parameter ``index`` of a fresh shard from ``begin`` on, counted row by row, to flat
        ``values``."""
        self.come_to_rest()
        place = self.layout.placements[index]
        values = values.to(self.spec.wrapped_dtype)
        if place.is_row_major:
            self._write_encoded(store, place.offset + begin, values, 0, True)
        else:
            value = self.read_value(store, index)
            places = torch.arange(begin, begin + values.numel(), device="cpu")
            value[torch.unravel_index(places, place.shape)] = values
            self.write_value(store, index, value, version=0, fresh=True)

    def _write_encoded(
        self, store: ArrayIO, offset: int, flat: torch.Tensor, version: int, fresh: bool
    ) -> None:
        """Master and weight of ``flat``, in pieces: what they are made of is several times as large. Low bits that are zero
        need not be written where nothing was yet."""
        spec = self.spec
        no_low_bits = fresh and spec.master == native.Master.SPLIT and flat.dtype == spec.dtype == torch.bfloat16
        for begin in range(0, flat.numel(), ENCODED_AT_ONCE):
            first, last = offset + begin, min(offset + begin + ENCODED_AT_ONCE, offset + flat.numel())
            low, high = self.own("weight")
            if (first := max(first, low)) < (last := min(last, high)):
                values = flat[first - offset : last - offset]
                for name, part in ({"weight": values} if no_low_bits else self.encode(values)).items():
                    store.write(self.arrays[name], first - low, part, version=version)

    def changes(
        self, store: ArrayIO, index: int, weight: torch.Tensor, *, before: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """What the arrays' parts of parameter ``index`` are to be so that its elements whose compute-dtype value differs from
        ``before`` (None: from the one at home) become ``weight``'s. The masters of the others keep the bits below the weight's
        precision. Empty where nothing differs. Nothing is written: see :meth:`write_changes`."""
        self.come_to_rest()
        begin, end = self.own_part("weight", index)
        if begin == end:
            return {}
        offset, first = self.layout.placements[index].offset, self.own("weight")[0]
        flat = self.flattened(weight, index)[begin - offset : end - offset]
        begin, end = begin - first, end - first  # at home
        if before is None:
            home = store.read(self.weight, begin, end)
        else:
            home = self.flattened(before, index)[begin + first - offset : end + first - offset]
        changed = ~same_bits(flat, home)
        if not changed.any():
            return {}
        encoded = self.encode(flat)
        return {name: torch.where(changed, part, store.read(self.arrays[name], begin, end)) for name, part in encoded.items()}

    def holds(self, store: ArrayIO, index: int, value: torch.Tensor) -> bool:
        """Whether this rank's part of parameter ``index`` at home is ``value``, bit for bit, in the dtype the model computes in."""
        return value.dtype == self.spec.dtype and not self.changes(store, index, value)

    def write_changes(self, store: ArrayIO, index: int, parts: dict[str, torch.Tensor], *, version: int) -> None:
        """Writes what :meth:`changes` found. Doing it twice is doing it once."""
        self.come_to_rest()
        begin = self.own_part("weight", index)[0] - self.own("weight")[0]
        for name, part in parts.items():
            store.write(self.arrays[name], begin, part, version=version)

    @property
    def hides_bits(self) -> bool:
        """Whether the masters have bits that the values, in the dtype they were wrapped with, do not show."""
        return "master" in self.arrays and self.spec.wrapped_dtype != torch.float32

    def read_master(self, store: ArrayIO, index: int) -> torch.Tensor:
        """The fp32 master of parameter ``index``, as a new tensor."""
        return self.read_value(store, index, torch.float32)

    def write_master(self, store: ArrayIO, index: int, master: torch.Tensor, *, version: int) -> int:
        """Sets the bits of parameter ``index``'s fp32 master below the weight's precision. An element whose weight at home is not
        the master's keeps the weight; returns how many there are."""
        self.come_to_rest()
        begin, end = self.own_part("weight", index)
        if begin == end:
            return 0
        offset, first = self.layout.placements[index].offset, self.own("weight")[0]
        parts = self.encode(self.flattened(master.to(torch.float32), index)[begin - offset : end - offset])
        begin, end = begin - first, end - first  # at home
        same = same_bits(parts["weight"], store.read(self.weight, begin, end))
        kept = torch.where(same, parts["master"], store.read(self.arrays["master"], begin, end))
        store.write(self.arrays["master"], begin, kept, version=version)
        return int((~same).sum())

    def encode(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Flat values of any float dtype -> the bytes of weight and, where there is one, master."""
        dtype = self.spec.dtype
        if not self.spec.stepped or self.spec.master == native.Master.OWN:
            return {"weight": value.to(dtype)}
        if value.dtype == dtype == torch.bfloat16 and self.spec.master == native.Master.SPLIT:
            return {"weight": value, "master": torch.zeros_like(value, dtype=torch.int16)}
        master = value.to(torch.float32)
        if self.spec.master == native.Master.FLOAT32:
            return {"weight": master.to(dtype), "master": master}
        weight, low = torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
        native.split_master(master.contiguous(), weight, low)
        return {"weight": weight, "master": low}

    # --- moments ---

    def read_moment(self, store: ArrayIO, name: str, index: int) -> torch.Tensor:
        """Moment ``name`` of parameter ``index`` as a new tensor in its dtype at rest; fp32 where that is 8-bit."""
        self.settle()
        values = self.read_part(store, name, index)
        if name in MOMENTS and self.spec.moment_dtype == torch.uint8:
            scales = self.read_part(store, SCALES[name], index)
            values = native.decode_moments(values, scales, sq=name == "exp_avg_sq")
        return self._shaped(values, index)

    def read_part(self, store: ArrayIO, name: str, index: int) -> torch.Tensor:
        """Parameter ``index``'s part of array ``name`` as it lies there."""
        begin, end = self.part(name, index)
        low, high = self.own_part(name, index)
        first = self.own(name)[0]
        if (low, high) == (begin, end) and self.peers.size == 1:
            return store.read(self.arrays[name], begin, end)
        out = torch.empty(end - begin, dtype=self.arrays[name].dtype, device="cpu")
        if low < high:
            out[low - begin : high - begin] = store.read(self.arrays[name], low - first, high - first)
        pieces = []
        for rank in range(self.peers.size):
            low, high = self.own(name, rank)
            low, high = max(begin, low), min(end, high)
            pieces.append((low - begin, max(low, high) - begin))
        self.peers.assemble(out, pieces, f"reading {name} of {self.names[index]}")
        return out

    def read_own_part(self, store: ArrayIO, name: str, index: int) -> torch.Tensor:
        """What of :meth:`read_part` is at home here."""
        begin, end = self.own_part(name, index)
        if begin == end:
            return torch.empty(0, dtype=self.arrays[name].dtype, device="cpu")
        first = self.own(name)[0]
        return store.read(self.arrays[name], begin - first, end - first)

    def write_part(
        self, store: ArrayIO, name: str, index: int, part: torch.Tensor, *, version: int, begin: int = 0
    ) -> None:
        """Puts ``part`` where :meth:`read_part` reads it, from its element ``begin`` on: of it, what is at home here."""
        self.drop_draft()
        self.lent.wait()
        begin += self.part(name, index)[0]
        low, high = self.own_part(name, index)
        low, high = max(low, begin), min(high, begin + part.numel())
        if low < high:
            store.write(self.arrays[name], low - self.own(name)[0], part[low - begin : high - begin], version=version)

    def part(self, name: str, index: int) -> tuple[int, int]:
        """Elements of array ``name`` that are parameter ``index``'s: first and behind the last."""
        place, each = self.layout.placements[index], elements_each(name)
        return place.offset // each, -(-place.end // each)

    def write_moment(self, store: ArrayIO, name: str, index: int, value: torch.Tensor, *, version: int) -> None:
        """Sets moment ``name`` of parameter ``index``."""
        self.settle()
        if self.spec.moment_dtype != torch.uint8:
            self.write_flat(store, name, index, value, version=version)
            return
        codes, scales = native.encode_moments(self.flattened(value, index), sq=name == "exp_avg_sq")
        self.write_part(store, name, index, codes, version=version)
        self.write_part(store, SCALES[name], index, scales, version=version)

    def write_flat(self, store: ArrayIO, name: str, index: int, value: torch.Tensor, *, version: int) -> None:
        """Writes ``value`` as it is (cast to the array's dtype) to parameter ``index``'s part of array ``name``."""
        self.write_part(store, name, index, self.flattened(value, index).to(self.arrays[name].dtype), version=version)

    # --- shape: a parameter's elements lie in the order of its strides ---

    def _shaped(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        place = self.layout.placements[index]
        return flat.as_strided(place.shape, place.stride)

    def flattened(self, value: torch.Tensor, index: int) -> torch.Tensor:
        """A copy of parameter ``index``'s ``value``, flat, on the CPU, in the order in which its elements lie."""
        place = self.layout.placements[index]
        flat = torch.empty(place.numel, dtype=value.dtype, device="cpu")
        flat.as_strided(place.shape, place.stride).copy_(value.detach())
        return flat


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise equality of representation: NaN equals itself, and 0.0 differs from -0.0."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return a.view(integer) == b.view(integer)
