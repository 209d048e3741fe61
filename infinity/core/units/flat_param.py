"""FlatParam: converts between parameters of one dtype in one unit and their flat arrays, exactly.

weight      the values that the model computes with, in the compute dtype
master      the optimizer's copy, unless it updates the weight: the low 16 bits (split) or fp32
moments     exp_avg and exp_avg_sq, or those of them that the optimizer has
scales      of 8-bit moments: one byte for each block of 64 elements, always in memory
gradient    accumulated by the backward, until the step consumes it
stepped     whether the optimizer updates these parameters; else the flat param has weights only
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ... import native
from ...ranks.collectives import Collectives
from ..homes.arrays import StateArray
from ..homes.write_behind import ArrayIO
from .array_parts import ArrayParts
from .encoding import encode, same_bits
from .flat_layout import FlatLayout
from .flat_param_spec import MOMENTS, SCALES, FlatParamSpec
from .home_arrays import HomeArrays

ENCODED_AT_ONCE = 1024 * 1024  # elements


class FlatParam:
    """Parameters of one dtype in one unit, and exact conversion between their values and arrays.

    layout
        The place of each parameter in the flat arrays.
    homes
        The arrays, and the running updates of them.
    parts
        Reads and writes of parameters' parts of the arrays.
    is_whole
        Whether all of it is on the device at once, and not some rows.

    With several ranks, every rank must call to read a value; writing one is local.
    """

    def __init__(
        self,
        spec: FlatParamSpec,
        params: Sequence[torch.nn.Parameter],
        collectives: Collectives | None = None,
        *,
        is_whole: bool = True,
    ):
        self.is_whole = is_whole
        self.params, self.collectives = tuple(params), collectives or Collectives()
        self.ranks = self.collectives.ranks
        self.names = [f"parameter {i} of a flat param" for i in range(len(params))]  # until set
        self.handles: list[Any] = []  # the ParamHandles of ``params``, once they are managed
        self.layout = FlatLayout.of(params, self.ranks)
        self.homes = HomeArrays(spec, self.layout, self.names)
        self.parts = ArrayParts(self.homes, self.collectives, self.names)

    @property
    def spec(self) -> FlatParamSpec:
        return self.homes.spec

    @property
    def arrays(self) -> dict[str, StateArray]:
        """The arrays at home, by their names."""
        return self.homes.arrays

    @property
    def weight(self) -> StateArray:
        return self.homes.weight

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the whole weights, as on the device."""
        return self.layout.numel * self.spec.dtype.itemsize

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's shard of the weights, as at home."""
        return self.layout.shard_numel * self.spec.dtype.itemsize

    # --- parameter values ---

    def read_value(
        self, store: ArrayIO, index: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Reads parameter ``index`` as a new tensor of ``dtype`` (default: as wrapped), from the
        master if that is wider. Every rank calls this."""
        with store.guard:
            self.homes.wait()
        dtype = dtype or self.spec.wrapped_dtype
        weight = self.parts.read(store, "weight", index)
        return self._shaped(
            self._with_master(weight, lambda: self.parts.read(store, "master", index), dtype),
            index,
        )

    def _with_master(
        self, weight: torch.Tensor, read_master: Callable[[], torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns the values of flat ``weight`` in ``dtype``, from the master if that is wider."""
        if dtype != self.spec.dtype and "master" in self.arrays:
            master = read_master()
            weight = (
                native.join_master(weight, master)
                if self.spec.master == native.Master.SPLIT
                else master
            )
        return weight.to(dtype)

    def assembling_values(self, store: ArrayIO) -> AbstractContextManager[None]:
        """Returns a block in which :meth:`read_value` reads from whole arrays: see
        :meth:`ArrayParts.assembling`."""
        with store.guard:
            self.homes.wait()
        return self.parts.assembling(
            store, ("weight", *(["master"] if self.spec.wrapped_dtype != self.spec.dtype else []))
        )

    def assembling_state(
        self, store: ArrayIO, moments: Iterable[str], *, masters: bool
    ) -> AbstractContextManager[None]:
        """Returns a block in which :meth:`read_moment` of ``moments`` reads from whole arrays. With
        ``masters``, :meth:`read_master` does so too."""
        self.homes.wait()
        has_scales = self.spec.moment_dtype == torch.uint8
        scales = [SCALES[name] for name in moments if has_scales and name in MOMENTS]
        return self.parts.assembling(
            store, (*moments, *scales, *(["weight", "master"] if masters else []))
        )

    def write_value(
        self, store: ArrayIO, index: int, value: torch.Tensor, *, version: int, fresh: bool = False
    ) -> None:
        """Sets parameter ``index``: master and weight become ``value``. ``fresh``: the arrays hold
        no state yet."""
        self.write_flattened(
            store, index, self.flattened(value, index), version=version, fresh=fresh
        )

    def write_flattened(
        self, store: ArrayIO, index: int, flat: torch.Tensor, *, version: int, fresh: bool = False
    ) -> None:
        """Sets parameter ``index`` from a value in the form of :meth:`flattened`. Idempotent."""
        self.homes.wait_idle()
        offset = self.layout.placements[index].offset
        self.write_elements(store, offset, flat, version=version, fresh=fresh)

    def write_first_values(
        self, store: ArrayIO, index: int, begin: int, values: torch.Tensor
    ) -> None:
        """Sets elements of parameter ``index`` of a fresh flat param to flat ``values``, from
        ``begin`` on in row-major order."""
        self.homes.wait_idle()
        placement = self.layout.placements[index]
        values = values.to(self.spec.wrapped_dtype)
        if placement.is_row_major:
            self.write_elements(store, placement.offset + begin, values, version=0, fresh=True)
        else:
            value = self.read_value(store, index)
            places = torch.arange(begin, begin + values.numel(), device="cpu")
            value[torch.unravel_index(places, placement.shape)] = values
            self.write_value(store, index, value, version=0, fresh=True)

    def write_elements(
        self, store: ArrayIO, offset: int, flat: torch.Tensor, *, version: int, fresh: bool = False
    ) -> None:
        """Writes the master and weight of ``flat`` from element ``offset`` on, in pieces: encoding
        needs several times their bytes. Zero low bits are not written to a fresh array."""
        spec = self.spec
        no_low_bits = (
            fresh
            and spec.master == native.Master.SPLIT
            and flat.dtype == spec.dtype == torch.bfloat16
        )
        for begin in range(0, flat.numel(), ENCODED_AT_ONCE):
            first, last = (
                offset + begin,
                min(offset + begin + ENCODED_AT_ONCE, offset + flat.numel()),
            )
            low, high = self.layout.home_range("weight")
            if (first := max(first, low)) < (last := min(last, high)):
                values = flat[first - offset : last - offset]
                for name, part in (
                    {"weight": values} if no_low_bits else encode(self.spec, values)
                ).items():
                    store.write(self.arrays[name], first - low, part, version=version)

    def changes(
        self,
        store: ArrayIO,
        index: int,
        weight: torch.Tensor,
        *,
        before: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Computes parameter ``index``'s parts of the arrays after an edit. Elements of ``weight``
        that differ from ``before`` (None: from home), in the dtype of ``weight``, replace those at
        home.

        Masters of the other elements keep the bits below its precision. Empty if nothing differs.
        Writes nothing: see :meth:`write_changes`.
        """
        self.homes.wait_idle()
        (low, high), (begin, end) = (
            self.layout.part_of_param("weight", index),
            self.layout.part_at_home("weight", index),
        )
        if begin == end:
            return {}
        flat = self.flattened(weight, index)[low:high]
        if before is None:
            home = self._with_master(
                store.read(self.weight, begin, end),
                lambda: store.read(self.arrays["master"], begin, end),
                flat.dtype,
            )
        else:
            home = self.flattened(before, index)[low:high]
        changed = ~same_bits(flat, home)
        if not changed.any():
            return {}
        encoded = encode(self.spec, flat)
        return {
            name: torch.where(changed, part, store.read(self.arrays[name], begin, end))
            for name, part in encoded.items()
        }

    def holds(self, store: ArrayIO, index: int, value: torch.Tensor) -> bool:
        """Tells whether this rank's part of parameter ``index`` at home equals ``value``, bit for
        bit, in the compute dtype."""
        return value.dtype == self.spec.dtype and not self.changes(store, index, value)

    def write_changes(
        self, store: ArrayIO, index: int, parts: dict[str, torch.Tensor], *, version: int
    ) -> None:
        """Writes the result of :meth:`changes`. Idempotent."""
        self.homes.wait_idle()
        begin, _ = self.layout.part_at_home("weight", index)
        for name, part in parts.items():
            store.write(self.arrays[name], begin, part, version=version)

    @property
    def hides_bits(self) -> bool:
        """Whether the masters have bits that values in the wrapped dtype do not show."""
        return "master" in self.arrays and self.spec.wrapped_dtype != torch.float32

    def read_master(self, store: ArrayIO, index: int) -> torch.Tensor:
        """Reads the fp32 master of parameter ``index``, as a new tensor. Every rank calls this."""
        return self.read_value(store, index, torch.float32)

    def write_master(
        self, store: ArrayIO, index: int, master: torch.Tensor, *, version: int
    ) -> int:
        """Sets the bits of parameter ``index``'s fp32 master below the weight's precision. Elements
        whose weight at home differs from the master's keep theirs; returns their number."""
        self.homes.wait_idle()
        (low, high), (begin, end) = (
            self.layout.part_of_param("weight", index),
            self.layout.part_at_home("weight", index),
        )
        if begin == end:
            return 0
        parts = encode(self.spec, self.flattened(master.to(torch.float32), index)[low:high])
        same = same_bits(parts["weight"], store.read(self.weight, begin, end))
        merged = torch.where(same, parts["master"], store.read(self.arrays["master"], begin, end))
        store.write(self.arrays["master"], begin, merged, version=version)
        return int((~same).sum())

    # --- moments ---

    def read_moment(self, store: ArrayIO, name: str, index: int) -> torch.Tensor:
        """Reads moment ``name`` of parameter ``index`` as a new tensor in its stored dtype; fp32 if
        that is 8-bit. Every rank calls this."""
        self.homes.wait()
        values = self.parts.read(store, name, index)
        if name in MOMENTS and self.spec.moment_dtype == torch.uint8:
            scales = self.parts.read(store, SCALES[name], index)
            values = native.decode_moments(values, scales, sq=name == "exp_avg_sq")
        return self._shaped(values, index)

    def write_moment(
        self, store: ArrayIO, name: str, index: int, value: torch.Tensor, *, version: int
    ) -> None:
        """Sets moment ``name`` of parameter ``index``."""
        self.homes.wait()
        if self.spec.moment_dtype != torch.uint8:
            self.write_flat(store, name, index, value, version=version)
            return
        codes, scales = native.encode_moments(self.flattened(value, index), sq=name == "exp_avg_sq")
        self.parts.write(store, name, index, codes, version=version)
        self.parts.write(store, SCALES[name], index, scales, version=version)

    def write_flat(
        self, store: ArrayIO, name: str, index: int, value: torch.Tensor, *, version: int
    ) -> None:
        """Writes ``value``, cast to the array's dtype, to parameter ``index``'s part of array
        ``name``."""
        self.parts.write(
            store,
            name,
            index,
            self.flattened(value, index).to(self.arrays[name].dtype),
            version=version,
        )

    # --- shape: a parameter's elements are in the order of its strides ---

    def _shaped(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        placement = self.layout.placements[index]
        return flat.as_strided(placement.shape, placement.stride)

    def flattened(self, value: torch.Tensor, index: int) -> torch.Tensor:
        """Copies parameter ``index``'s ``value``, flat, to the CPU, in the order of its strides."""
        placement = self.layout.placements[index]
        flat = torch.empty(placement.numel, dtype=value.dtype, device="cpu")
        flat.as_strided(placement.shape, placement.stride).copy_(value.detach())
        return flat
