"""Scratch: plans with what memory there is and, where that does not hold the state, with a scratch folder that is found."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import NamedTuple, cast

from torch import nn

from ..config.choices import AUTO
from ..config.config import Config
from ..distributed.collectives import Collectives
from ..errors import CapacityError, ConfigError
from ..machine import limits, scratch
from ..machine.device import Device
from ..machine.scratch import Candidate
from ..machine.sizes import format_nbytes
from ..machine.tiers import Tier
from ..planning.memory_plan import MemoryPlan, term_of
from ..state.partition import Group, partition
from ..state.shard import ParamShard
from ..state.shard_spec import ARRAYS
from .agreement import free_everywhere
from .lay_out import lay_out_groups, unit_size

logger = logging.getLogger(__name__)

MakeShards = Callable[[Group], list[ParamShard]]


class Laid(NamedTuple):
    """What :func:`lay_out_groups` found."""

    groups: list[Group]
    shards: list[list[ParamShard]]
    plan: MemoryPlan


def lay_out_here(
    model: nn.Module, config: Config, make_shards: MakeShards, device: Device, collectives: Collectives, *, reuses: bool = False
) -> tuple[Config, Laid]:
    """Lays the model out on this machine. With ``nvme_paths="auto"``: in memory where that holds the state, else also in a scratch
    folder, which is found, and put into the configuration that is returned; one line says what was chosen, and why.

    Called by all ranks together. Raises CapacityError, or ConfigError where a folder is needed and none can be used.
    """

    def lay_out(config: Config) -> Laid:
        free = free_everywhere(config, collectives, device)
        return Laid(*lay_out_groups(model, config, make_shards, device, free, reuses=reuses))

    if config.nvme_paths != AUTO:
        return config, lay_out(config)
    left, limit = limits.tightest()
    if "nvme" not in (config.params, config.optimizer, config.activations):
        in_memory = dataclasses.replace(config, nvme_paths=())
        with contextlib.suppress(CapacityError):  # of all ranks of these units: what they have free is what the least of them has
            laid = lay_out(in_memory)
            _tell(laid.plan, left, limit, None, collectives)
            return in_memory, laid
    found = scratch.candidates()
    needed = _state_nbytes(model, config, make_shards)
    chosen = scratch.choose(found, needed * collectives.ranks.local_size)
    everywhere, usable = collectives.least(
        [chosen is not None, chosen.usable_nbytes // collectives.ranks.local_size if chosen else 0], "scratch folders"
    )
    if not everywhere or chosen is None:
        raise _nowhere(found, needed, left, limit)
    capacity = usable if config.nvme_capacity is None else config.nvme_capacity
    config = dataclasses.replace(config, nvme_paths=(chosen.folder,), nvme_capacity=capacity)
    laid = lay_out(config)
    _tell(laid.plan, left, limit, chosen, collectives)
    return config, laid


def _state_nbytes(model: nn.Module, config: Config, make_shards: MakeShards) -> int:
    """Counts the bytes of all arrays that this rank has at home: what the disk holds at most."""
    sizes = [unit_size(group, make_shards(group)) for group in partition(model, cast("str | tuple[str, ...]", config.units), {})]
    return sum(shard.nbytes(name) for size in sizes for shard in size.shards for name in ARRAYS)


def _nowhere(found: list[Candidate], needed: int, left: int, limit: str) -> ConfigError:
    looked_at = ", ".join(map(str, found)) or "no folder"
    return ConfigError(
        f"weights, optimizer state and gradients are {format_nbytes(needed)}, and {limit} leaves {format_nbytes(left)}, of which a part is "
        f"activations'. A folder on a disk is needed, and none was found here, or on another machine of the job: looked at {looked_at}. Name "
        "one: Config(nvme_paths=['/path/on/the/disk'])."
    )


def _tell(plan: MemoryPlan, left: int, limit: str, chosen: Candidate | None, collectives: Collectives) -> None:
    if not collectives.ranks.is_first:
        return
    homes: dict[str, list[str]] = {term_of(name): [] for name in ARRAYS}
    for tier in Tier:
        for what, places in homes.items():
            if nbytes := plan.terms[tier].get(what, 0):
                places.append(f"{format_nbytes(nbytes)} on {tier}")
    held = "; ".join(f"{what} {' and '.join(places)}" for what, places in homes.items() if places)
    reserve = format_nbytes(left - limits.for_the_engine(left))
    where = f", swap files in {chosen.folder} ({chosen.usable_nbytes >> 30} GiB usable)" if chosen is not None else ""
    logger.warning(
        "homes chosen, for %s leaves %s, of which %s stay free for activations and data: %s%s. Config(params=, optimizer=, nvme_paths=) choose others.",
        limit, format_nbytes(left), reserve, held, where,
    )  # fmt: skip
