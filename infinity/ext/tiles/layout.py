"""Layout: which layers run in tiles, and of which size, if a device's budget is below the bytes
that are held together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn

from ...config import Config
from ...core.machine.device import Device
from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import Tier
from ...core.plan.budgets import measured_free
from ...core.plan.unit_sizes import UnitSize
from ...core.run.context import ForwardContext
from ...core.run.job import Job
from ...core.run.replaced_forward import ReplacedForward
from ...core.seams import Events, Extension, Term
from ...core.units.forms import local_of
from ...core.wrap.described_model import DescribedModel
from ...core.wrap.lay_out import Ways
from ...core.wrap.partition import Group, RowsAtOnce
from .fused_loss import install_fused_loss
from .over_ranks import averaging_nbytes
from .tiled_layers import install_tiles
from .tiles import SMALLEST_TILE_NBYTES, candidates
from .uses_by_hand import used_by_hand

logger = logging.getLogger(__name__)

_found: WeakKeyDictionary[Ways, set[nn.Parameter]] = WeakKeyDictionary()


class Tiling:
    """Tiles of at most ``limit_nbytes``. ``is_sure``: no weight runs in tiles that code uses by
    hand."""

    def __init__(self, limit_nbytes: int, *, is_sure: bool):
        self.key, self.is_sure = (limit_nbytes, is_sure), is_sure

    def rows(self, ways: Ways) -> dict[nn.Parameter, RowsAtOnce]:
        """Finds the weights that run in tiles, and the rows of a tile."""
        without = _by_hand(ways) if self.is_sure else set()
        return candidates(ways.model.users, self.key[0], ways.dtype_of, without)

    def tell(self, groups: Sequence[Group], config: Config) -> None:
        """Says which layers run in tiles, and why."""
        tiled = [
            f"{group.name} x {-(-local_of(group.params[0]).numel() // group.at_once.numel)}"
            for group in groups
            if group.at_once is not None
        ]
        cause = (
            "what is free of the device"
            if config.device_memory is None
            else f"device_memory={format_nbytes(cast(int, config.device_memory))}"
        )
        logger.warning(
            "%s does not hold the largest unit: %d layers run in tiles (%s%s). Their sums"
            " are added in another order than untiled ones.",
            cause,
            len(tiled),
            ", ".join(tiled[:4]),
            ", ..." if len(tiled) > 4 else "",
        )


class TiledLayers(Extension):
    """Runs large layers in tiles of the largest size that fits."""

    may_stand_aside = True

    @classmethod
    def splits(
        cls, config: Config, free: Mapping[Tier, int] | None, ways: Ways
    ) -> Iterator[Tiling]:
        """Yields the tilings to try, largest tiles first. Weights that are used by hand run in
        tiles, too, if nothing else fits: a branch with such a use may never run."""
        if not _can_pass_tiles(ways, config):
            return
        limits = list(_limits(config, free, ways.device))
        for is_sure in (True, False):
            if not is_sure and not _by_hand(ways):
                return
            yield from (Tiling(limit, is_sure=is_sure) for limit in limits)

    @classmethod
    def terms(cls, config: Any, units: Sequence[UnitSize], device: Any) -> Iterator[Term]:
        """Yields the bytes of one tile, the largest, and those in which ranks average it."""
        yield Term(Tier.DEVICE, "a tile", max((unit.at_once_nbytes for unit in units), default=0))
        averaged = [
            averaging_nbytes(
                flat.shards,
                flat.replicas,
                unit.at_once_nbytes // flat.spec.dtype.itemsize,
                flat.spec.grad_dtype,
            )
            for unit in units
            if unit.at_once_nbytes
            for flat in unit.flat_params
            if flat.spec.stepped and flat.data_size > 1
        ]
        at = Tier.DEVICE if device.is_host else Tier.HOST
        yield Term(at, "a tile's gradients of other ranks", max(averaged, default=0))

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> TiledLayers:
        """Returns the extension."""
        return cls()

    def replace_forwards(
        self,
        job: Job,
        model: DescribedModel,
        find: Callable[[], ForwardContext],
        blocks: Sequence[tuple[str, nn.Module, list[Any]]],
    ) -> list[ReplacedForward]:
        """Replaces the forwards of the layers that run in tiles, and of heads whose loss is fused
        as the configuration asks."""
        rows = {}
        for unit, size in zip(job.units, job.planned.sizes):
            if size.at_once_nbytes:
                (flat_param,) = unit.flat_params
                (param,) = flat_param.params
                row_nbytes = local_of(param).size(1) * flat_param.spec.dtype.itemsize
                rows[param] = size.at_once_nbytes // row_nbytes
        module, fuses = model.module, job.config.fused_loss
        tiled = install_tiles(find, module, rows) if rows else []
        return tiled + (install_fused_loss(find, module, rows) if fuses else [])


def _can_pass_tiles(ways: Ways, config: Config) -> bool:
    """Tells whether tiles can be brought and averaged: by one process, or by ranks that have a
    shard of the weights each, perhaps the same one as others. ZeRO-1 and 2 keep whole weights on
    the device until the step, so tiles would save nothing."""
    flats = [flat for size in ways.sizes(config) for flat in size.flat_params]
    return all(
        flat.data_size == flat.shards * flat.replicas
        and (flat.shards == 1 or config.shard == "parameters")
        for flat in flats
    )


def _by_hand(ways: Ways) -> set[nn.Parameter]:
    """Returns the weights that code uses outside of their layers. The code is read once."""
    if ways not in _found:
        _found[ways] = used_by_hand(ways.model.modules)
    return _found[ways]


def _limits(config: Config, free: Mapping[Tier, int] | None, device: Device) -> Iterator[int]:
    """Yields the tile sizes to try, in bytes, largest first."""
    budget = cast("int | None", config.device_memory)
    if config.params == "device":
        return
    if budget is None:
        budget = (free or {}).get(Tier.DEVICE) or measured_free(Tier.DEVICE, config, device)
    limit = 1 << max(0, (budget // 4).bit_length() - 1)
    while limit > SMALLEST_TILE_NBYTES:
        yield limit
        limit //= 2
    yield SMALLEST_TILE_NBYTES
