"""Unit sizes: the bytes of flat params and units, which is all that a plan needs of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ... import native
from ..machine.sizes import round_down, round_up
from ..units.flat_layout import PARAM_ALIGNMENT
from ..units.flat_param_spec import EVERY_MOMENT, FlatParamSpec
from ..units.staged_reads import PIECE_NBYTES

MIN_CHUNK = native.CHECKSUM_NBYTES // 2  # elements: whole checksum blocks at every element size
STATE = ("weight", "master", *EVERY_MOMENT)
SUMMED_AT_ONCE = 3  # gradients of a tied weight, unless they land use by use


def bucket_numel(shards: int, itemsize: int) -> int:
    """Returns the elements of a shard that are averaged at once: so many that two buckets, what
    comes for them from other ranks, and a sum in fp32 are two pieces."""
    nbytes = 4 * shards * itemsize + torch.float32.itemsize
    return max(PARAM_ALIGNMENT, round_down(2 * PIECE_NBYTES // nbytes, PARAM_ALIGNMENT))


@dataclass(frozen=True)
class FlatParamSize:
    """Holds the sizes of one flat param."""

    spec: FlatParamSpec
    numel: int
    shards: int = 1  # ranks that hold an equal shard each
    replicas: int = 1  # ranks that hold the same shard
    data_size: int = 1  # ranks whose gradients are averaged; includes those with other experts
    whole_grad: bool = False  # every rank holds its whole gradient (ZeRO-1)
    node_size: int = 0  # ranks of a machine that share gathered weights (``shard_in_node``); else 0
    shapes: tuple[torch.Size, ...] = ()  # of the parameters; empty: unknown

    @property
    def is_averaged(self) -> bool:
        """Whether gradients are averaged over ranks. A rank then adds up its whole ones first."""
        return max(self.shards * self.replicas, self.data_size) > 1

    def nbytes(self, name: str) -> int:
        """Counts the bytes of array ``name`` at home on one rank; 0 if the flat param has none."""
        if name == "grad" and self.whole_grad:
            return round_up(
                int(self.numel * self.spec.nbytes_per_element.get(name, 0)), native.BLOCK_NBYTES
            )
        return self._shard_nbytes.get(name, 0)

    def whole_nbytes(self, name: str) -> int:
        """Counts the bytes of array ``name`` of all ranks."""
        return self.shards * self._shard_nbytes.get(name, 0)

    @cached_property
    def _shard_nbytes(self) -> dict[str, int]:
        """The bytes of every array's shard on one rank."""
        sizes = self.spec.nbytes_per_element
        return {
            name: round_up(int(self.numel // self.shards * size), native.BLOCK_NBYTES)
            for name, size in sizes.items()
        }


@dataclass(frozen=True)
class UnitSize:
    """Holds the sizes of one unit."""

    name: str
    flat_params: tuple[FlatParamSize, ...]
    at_once_nbytes: int = 0  # if its layers compute with some rows at a time; 0: gathered whole
    position: int = 0  # of its first parameter in the model: about the order of use
    # Gradients that autograd holds of it at once, on the device, before they land.
    autograd_nbytes: int = 0

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the whole weights, as gathered on the device."""
        return sum(flat.whole_nbytes("weight") for flat in self.flat_params)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the weights at home on one rank."""
        return sum(flat.nbytes("weight") for flat in self.flat_params)

    @property
    def is_sharded(self) -> bool:
        return any(flat.shards > 1 for flat in self.flat_params)

    @property
    def is_averaged(self) -> bool:
        return any(flat.is_averaged for flat in self.flat_params)
